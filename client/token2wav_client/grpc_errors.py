"""Errors of gRPC: translate status codes and the server's sentences into errors of this package."""

from __future__ import annotations

import re
from typing import Any

import grpc

from token2wav_client.errors import (
    AccessError,
    ClientError,
    ServerError,
    ServerUnavailable,
    TransientServerError,
)

_DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_TLS_FAILED = re.compile("[Hh]andshake failed|[Vv]erification [Cc]heck failed")
_HUNG_UP = re.compile("^failed to connect .*Socket closed")  # also how a server refuses one without a certificate
# HTTP/2's words for a connection that a proxy gave up, which gRPC reports as INTERNAL, UNKNOWN or CANCELLED.
_CONNECTION_LOST = re.compile("RST_STREAM|Stream removed|GOAWAY")
# Answers in a stream carry no status code, only their sentence (docs/architecture.md, and Triton's own).
_SHUTTING_DOWN = "server: it is shutting down"
_TRANSIENT = re.compile(
    f"^{_SHUTTING_DOWN}|try again later$|is no open stream|[Ss]tub process .* is not healthy|has no available versions"
)


def error_of_rpc(error: Any, url: str) -> ClientError:
    """Translate the grpc.RpcError of a call to `url`."""
    code = error.code()
    details = " ".join((error.details() or code.name).split())
    if code in _DENIED:
        return AccessError(f"{url} lets nobody in with this token or certificate ({details})")
    if code == grpc.StatusCode.UNAVAILABLE and _TLS_FAILED.search(details):
        return AccessError(f"no secure connection to {url} ({details})")
    if code == grpc.StatusCode.UNAVAILABLE and _HUNG_UP.search(details):
        return ServerUnavailable(f"what answers at {url} hangs up: does it want TLS, or a certificate? ({details})")
    if code == grpc.StatusCode.UNAVAILABLE or _CONNECTION_LOST.search(details):
        return ServerUnavailable(f"no server at {url}, or it went away ({details})")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerUnavailable(f"the server at {url} accepts connections but does not answer ({details})")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return ServerUnavailable(f"what answers at {url} is no Triton server open to this client ({details})")
    if code == grpc.StatusCode.CANCELLED:
        return TransientServerError(f"the server at {url} cancelled the utterance ({details})")
    return ServerError(details)


def error_of_response(message: str) -> ServerError:
    """Translate the sentence of an error response."""
    return TransientServerError(message) if _TRANSIENT.search(message) else ServerError(message)


def is_shutting_down(error: ServerError) -> bool:
    """Whether a server that works said that it takes no new utterances."""
    return str(error).startswith(_SHUTTING_DOWN)


def is_full(error: ServerError) -> bool:
    """Whether a server that works said that it has no room now."""
    return str(error).endswith("try again later")
