"""Errors of this package. Messages are one sentence: the file, what was found, what is needed."""

from __future__ import annotations


class FrontEndError(Exception):
    """Base of all errors that this package raises on purpose."""


class RecordingError(FrontEndError):
    """A recording that cannot be read, or is no use as a voice: its length, rate or level."""


class ModelError(FrontEndError):
    """An ONNX file that is missing, has another interface, or gave something that cannot be right."""


class OutputError(FrontEndError):
    """The output file cannot be written."""
