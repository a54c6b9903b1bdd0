"""Exporter package: exports models as ONNX graphs and TensorRT engines for `token2wav export`."""

from __future__ import annotations

from token2wav.errors import Token2WavError


class ExportError(Token2WavError):
    """Export error: a graph cannot be made or is wrong; nothing was added to the engine folder."""
