"""Errors of the package with their exit codes, and the conversion of gRPC's errors.

A message is one sentence. It names the problem, the expected value and, if it helps, the remedy.
"""

from __future__ import annotations

import re
from typing import Any

from grpc import StatusCode

EXIT_CODES: dict[int, str] = {
    0: (
        "the whole utterance was received (health: the server works, or all of its streams are "
        "in use)"
    ),
    1: "unexpected error; please report it",
    2: "wrong usage, or an unusable token, voice or output file",
    3: "no server at the address, or the connection was lost",
    4: "the server rejected the utterance, failed, or sent an invalid response",
    5: "the server did not respond within --timeout",
    6: (
        "the server responds, but the model is missing, still loading, or failed to load "
        "(health: or shutting down)"
    ),
    7: "access denied: the client or the server rejected a certificate or a token",
    130: "interrupted (Ctrl-C); audio received so far is kept",
    143: "terminated (SIGTERM); audio received so far is kept",
}

# Parts of messages from a server that works but refuses an utterance. A response in a gRPC stream
# carries no status code, so the client recognizes errors by their text (docs/wire.md).
SHUTTING_DOWN = "server: it is shutting down"
ENGINE = "engine: "  # the process with the model has ended, or starts
FULL = "try again later"
_TRANSIENT = re.compile(  # includes messages of Triton itself
    f"^{SHUTTING_DOWN}|^{ENGINE}|{FULL}$|is no open stream|[Ss]tub process .* is not healthy|"
    "has no available versions|^backend: this process can no longer use the GPU"
)
_TLS_FAILED = re.compile("[Hh]andshake failed|[Vv]erification [Cc]heck failed")
# Errors of gRPC if the port is Triton's HTTP port, or if the server rejects a client without a
# certificate.
_HUNG_UP = re.compile("^failed to connect .*(Socket closed|Connection reset)")
_HTTP = re.compile("http1.x server")  # gRPC's text for an HTTP/1 response
_PORTS = "by default, Triton's gRPC port is 8001, its HTTP port 8000 and its metrics port 8002"
# Triton's message about an input with the wrong shape.
_WRONG_SHAPE = re.compile(
    r"unexpected shape for input '(\w+)' for model '.*'\. Expected \[([\d,-]*)\], got \[([\d,-]*)\]"
)
# Triton's message about an input that the model does not have.
_UNEXPECTED = re.compile(r"unexpected inference input '(\w+)' for model")
_FIELD = re.compile(r"(\w+): ")  # at the beginning of a message, of the server too
# HTTP/2 terms for a connection that a proxy closed. gRPC reports it as INTERNAL, UNKNOWN or
# CANCELLED.
_CONNECTION_LOST = re.compile("RST_STREAM|Stream removed|GOAWAY")


class ClientError(Exception):
    """Base class of this package's errors, with an exit code and a flag for retries.

    Attributes:
        exit_code: exit code of the command after this error.
        transient: whether the same utterance may succeed if it is sent again without changes.
    """

    exit_code: int = 1
    transient: bool = False

    @property
    def field(self) -> str | None:
        """Name at the beginning of the message, as in `tokens: empty`; None for no name."""
        named = _FIELD.match(str(self))
        return named and named[1]

    @property
    def problem(self) -> str:
        """Message without the name of the field."""
        return str(self).removeprefix(f"{self.field}: ")


class InputError(ClientError):
    """Input error: an argument or a file of the caller is invalid."""

    exit_code = 2


class TokenError(InputError):
    """Token error: the text, type, shape or range of speech tokens is invalid."""


class VoiceError(InputError):
    """Voice error: a voice lacks a field, or a field has an invalid shape or value."""


class OutputError(InputError):
    """Output error: a file, pipe or audio device cannot be opened or written."""


class ServerUnavailable(ClientError):  # noqa: N818 - users know this state by this name
    """Connection error: no server answers at the address, or the connection was lost."""

    exit_code = 3
    transient = True


class ModelNotReadyError(ServerUnavailable):
    """Readiness error: the model is missing, loading or has failed, or the server shuts down."""

    exit_code = 6


class AccessError(ClientError):
    """Access error: TLS failed, or the server or a proxy rejected the token or certificate."""

    exit_code = 7


class ServerError(ClientError):
    """Server error: the server rejected or failed the utterance; the message is the server's."""

    exit_code = 4


class TransientServerError(ServerError):
    """Transient server error: the server is full, shuts down or restarts.

    The utterance itself is valid, so a retry may succeed.
    """

    transient = True


class ProtocolError(ServerError):
    """Protocol error: a response of the server breaks the protocol."""


class ResponseTimeoutError(ClientError):
    """Time-out error: the server owed a response and sent none in time."""

    exit_code = 5
    transient = True


class UtteranceClosedError(ClientError):
    """State error: tokens were pushed after the end of an utterance, or the client is closed."""


def error_of_rpc(error: Any, url: str) -> ClientError:
    """Converts the grpc.RpcError of a call to `url` into an error of this package."""
    code = error.code()
    details = " ".join((error.details() or code.name).split())
    if code in (StatusCode.UNAUTHENTICATED, StatusCode.PERMISSION_DENIED):
        return AccessError(f"the server at {url} rejects this token or certificate ({details})")
    if code == StatusCode.UNAVAILABLE and _TLS_FAILED.search(details):
        return AccessError(f"no secure connection to {url} ({details})")
    if code == StatusCode.UNAVAILABLE and _HUNG_UP.search(details):
        return ServerUnavailable(
            f"the server at {url} closed the connection: it may require TLS or a client "
            f"certificate, or the port is not its gRPC port; {_PORTS} ({details})"
        )
    if code == StatusCode.UNAVAILABLE and _HTTP.search(details):
        return ServerUnavailable(
            f"the server at {url} responds with HTTP, not gRPC; {_PORTS} ({details})"
        )
    if code == StatusCode.UNAVAILABLE or _CONNECTION_LOST.search(details):
        return ServerUnavailable(f"no server at {url}, or the connection was lost ({details})")
    if code == StatusCode.DEADLINE_EXCEEDED:
        return ServerUnavailable(
            f"the server at {url} accepts connections but does not respond ({details})"
        )
    if code == StatusCode.UNIMPLEMENTED:
        return ServerUnavailable(
            f"the server at {url} is not a Triton server, or it does not offer this call to "
            f"the client ({details})"
        )
    if code == StatusCode.CANCELLED:
        return TransientServerError(f"the server at {url} cancelled the utterance ({details})")
    return ServerError(details)


def error_of_response(message: str) -> ServerError:
    """Converts the message of an error response into an error of this package."""
    if wrong := _WRONG_SHAPE.search(message):
        name, expected, sent = wrong.groups()
        return ServerError(
            f"{name}: shape {_shape(sent)}, expected {_wanted(expected)} for this model"
        )
    if unexpected := _UNEXPECTED.search(message):
        name = unexpected[1]
        return ServerError(f"{name}: sent, but this model takes no {name}")
    return TransientServerError(message) if _TRANSIENT.search(message) else ServerError(message)


def _shape(lengths: str) -> str:
    """Formats the lengths in Triton's message as a shape."""
    shown = lengths.split(",")
    return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"


def _wanted(lengths: str) -> str:
    """Describes a shape in Triton's message, where a dimension of any length is -1."""
    sizes = lengths.split(",")
    if "-1" not in sizes:
        return _shape(lengths)
    words = [f"{len(sizes)} dimension{'s' * (len(sizes) > 1)}"]
    words += [
        f"dimension {axis} of length {length}"
        for axis, length in enumerate(sizes, 1)
        if length != "-1"
    ]
    return ", ".join(words)
