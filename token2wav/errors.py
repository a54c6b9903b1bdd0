"""Errors of the library. There is one class for each kind of error, and a message is one sentence.

A message names the field, the value that was received and the values that are allowed. The server
maps these classes to status codes in one table (`token2wav_server.triton_reply`). Users of the
project see no other exceptions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Token2WavError(Exception):
    """Base class of all errors that this library raises on purpose."""


class ConfigError(Token2WavError):
    """A configuration file or value cannot be used."""


class ArtifactError(ConfigError):
    """An exported graph or TensorRT engine is missing, damaged, or was made for another model,
    software version or GPU.
    """


class CheckpointError(Token2WavError):
    """A model folder is incomplete, or its weights do not fit its configuration."""


class BackendUnavailableError(ConfigError):
    """A backend cannot run on this host. The message names the missing part."""


class InputError(Token2WavError):
    """An argument of a call has a wrong type, shape or value.

    Attributes:
        field: name of the argument in the public interface.
        sound_tokens: number of tokens before the one that the error names; None for another error.
    """

    def __init__(self, field: str, problem: str, sound_tokens: int | None = None) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.sound_tokens = sound_tokens
        self._problem = problem

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, int | None]]:
        """Pickles all arguments, so that other processes can unpickle the error.

        By default Python would create the exception from its message alone.
        """
        return type(self), (self.field, self._problem, self.sound_tokens)


class StreamClosedError(Token2WavError):
    """The stream has ended, was cancelled, or does not exist."""


class IdleError(StreamClosedError):
    """The stream was closed because no tokens arrived for too long."""


class ExpiredError(StreamClosedError):
    """The stream was closed because it was open for too long."""


class LimitError(Token2WavError):
    """The request is valid, but a limit leaves no room for it now. A later retry may succeed."""


class BackendError(Token2WavError):
    """The backend failed on valid input. The stream is lost; other streams are not affected."""


class DeviceLostError(BackendError):
    """The GPU rejects all further work of this process.

    Every stream is lost, and only a new process can use the GPU.
    """


def one_line(error: Exception) -> str:
    """Returns the text of an error without line breaks."""
    return " ".join(str(error).split())


def to_public_error(error: Exception) -> Token2WavError:
    """Returns an error of this library, as it is sent to clients.

    Any other exception is logged, and becomes a BackendError.
    """
    if isinstance(error, Token2WavError):
        return error
    log.error("the backend failed", exc_info=error)
    return BackendError(f"backend: {type(error).__name__}: {one_line(error)[:300]}")


def attempt(call: Callable[..., None], *arguments: Any) -> None:
    """Calls a function of a client or an observer, which may have vanished. An exception is logged
    and not raised, so that it affects no other request.
    """
    try:
        call(*arguments)
    except Exception:
        log.warning("%s failed and is skipped", getattr(call, "__qualname__", call), exc_info=True)
