"""Exporter package: it exports models as ONNX graphs and TensorRT engines, for the command `token2wav-export`."""

from __future__ import annotations
