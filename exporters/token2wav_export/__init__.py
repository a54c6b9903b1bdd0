"""Exporter package: it exports models as ONNX graphs and TensorRT engines, for the command
`token2wav-export`.
"""

from __future__ import annotations

from token2wav.errors import Token2WavError


class ExportError(Token2WavError):
    """The graph could not be made, or what was made is wrong; nothing was added to the engine
    folder.
    """
