"""Errors of an export, beside those that the library itself raises."""

from __future__ import annotations

from token2wav.errors import Token2WavError


class ExportError(Token2WavError):
    """The graph could not be made, or what was made is wrong; nothing was added to the engine folder."""


class MissingPackageError(Token2WavError):
    """A package that the command needs is not installed."""
