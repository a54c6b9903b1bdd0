"""Errors of this package. A message is one sentence: the file, the problem, the requirement."""

from __future__ import annotations


class FrontEndError(Exception):
    """Base of all errors that this package raises on purpose."""


class RecordingError(FrontEndError):
    """Recording error: a recording is unreadable, or its length, rate or level is unsuitable."""


class ModelError(FrontEndError):
    """Model error: an ONNX file is missing, has another interface, or returned invalid values."""


class OutputError(FrontEndError):
    """Output error: the output file cannot be written."""
