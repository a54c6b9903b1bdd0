"""What a failed gRPC call means to a user: one place that turns status codes into this package's errors."""

from __future__ import annotations

from typing import Any

import grpc

from token2wav_client.errors import ClientError, ServerError, ServerUnavailable

_NOT_TRITON = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


def explain(error: Any, url: str) -> ClientError:
    """Translate a grpc.RpcError of a call to `url`."""
    code = error.code()
    details = " ".join((error.details() or code.name).split())
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerUnavailable(f"no server at {url}, or it went away ({details})")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServerUnavailable(f"the server at {url} accepts connections but does not answer ({details})")
    if code in _NOT_TRITON:
        return ServerUnavailable(f"what answers at {url} is no Triton server open to this client ({details})")
    if code == grpc.StatusCode.CANCELLED:
        return ServerError(f"the server at {url} cancelled the utterance ({details})")
    return ServerError(details)
