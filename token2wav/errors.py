"""Errors that a user can cause: there is one class per kind, and one sentence per message.

A message says what is wrong, what was found and what is allowed. The server maps these classes to
status codes in one table (`token2wav_server.protocol`); nothing else in the project raises to a
user.
"""

from __future__ import annotations


class Token2WavError(Exception):
    """Base of all errors that this library raises on purpose."""


class ConfigError(Token2WavError):
    """A configuration file or value cannot be used."""


class ArtifactError(ConfigError):
    """An exported graph or engine is missing, damaged, or does not belong to the model, software or
    GPU.
    """


class CheckpointError(Token2WavError):
    """A model folder is incomplete, or its weights do not fit its configuration."""


class EngineUnavailableError(ConfigError):
    """An engine cannot run on this host; the message says what it lacks."""


class InputError(Token2WavError):
    """An argument of a call is not what the model takes.

    Attributes:
        field: name of the argument, as the user knows it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self._problem = problem

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str]]:
        """Pickles both arguments, for other processes: an exception alone would be made anew of its
        message.
        """
        return type(self), (self.field, self._problem)


class StreamClosedError(Token2WavError):
    """The stream has ended, was cancelled, or is not known."""


class IdleError(StreamClosedError):
    """The stream was dropped because no tokens came for too long."""


class ExpiredError(StreamClosedError):
    """The stream was dropped because it was open for too long."""


class LimitError(Token2WavError):
    """The request is fine, but there is no room for it now; trying again later may succeed."""


class EngineError(Token2WavError):
    """The engine failed on valid input; the stream it happened on is lost, others are not."""


class DeviceLostError(EngineError):
    """The GPU refuses all further work of this process; every stream is lost, and only a new
    process can go on.
    """
