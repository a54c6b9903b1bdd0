"""Errors of the gateway. Each error knows its HTTP status and its type in OpenAI's error format."""

from __future__ import annotations

import errno
from typing import Any

# Errors of a full disk, a quota, and a limit of file sizes.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


INTERNAL = "gateway: internal error"  # message for a client, without the error itself


class GatewayError(Exception):
    """Base of all errors that a client of the gateway sees.

    Attributes:
        status: HTTP status.
        kind: `type` in OpenAI's error format.
        param: name of the field at fault; None if no field is.
        code: `code` in OpenAI's error format, by which clients tell errors apart; None for most.
    """

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        """Body of the response, in OpenAI's error format."""
        # Words of a server may have half of a surrogate pair, which UTF-8 cannot encode.
        message = str(self).encode(errors="backslashreplace").decode()
        fields = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": fields}


class RequestError(GatewayError):
    """Error of a request: a field is missing, of another type or out of range."""

    status, kind = 400, "invalid_request_error"


class AccessDeniedError(GatewayError):
    """Error of a request without a valid access key."""

    status, kind = 401, "authentication_error"


class NotAllowedError(GatewayError):
    """Error of a request that another key or another web page may make, or nobody."""

    status, kind = 403, "permission_error"


class NotFoundError(GatewayError):
    """Error of a request for something that does not exist."""

    status, kind = 404, "invalid_request_error"


class LateBodyError(GatewayError):
    """Error of a request whose body does not arrive in time."""

    status, kind = 408, "invalid_request_error"


class TooLargeError(GatewayError):
    """Error of a request with a body above a limit."""

    status, kind = 413, "invalid_request_error"


class BusyError(GatewayError):
    """Error of a request above the limit of a key or of the gateway."""

    status, kind = 429, "rate_limit_error"


class StorageError(GatewayError):
    """Error of the gateway's disk: it is full (507), or it cannot be written (503).

    Args:
        error: error of the operating system. Its path does not reach the client.
    """

    status = 503

    def __init__(self, error: OSError) -> None:
        full = error.errno in _FULL
        super().__init__(f"gateway: its {'disk is full' if full else 'folder cannot be written'}")
        if full:
            self.status = 507


class ModelError(GatewayError):
    """Error of the language model server or the speech server behind the gateway.

    Args:
        message: server and problem, without texts of clients.
        quote: words of the server, which may repeat a text. They reach the client, but not the log.

    Attributes:
        summary: the message without the quotation.
    """

    status, kind = 502, "server_error"

    def __init__(self, message: str, *, quote: str = "") -> None:
        super().__init__(f"{message}: {quote}" if quote else message)
        self.summary = message


class ModelBusyError(ModelError):
    """Error of a server behind the gateway that is full or restarts; a retry may succeed."""

    status = 503


class ModelTimeoutError(ModelError):
    """Error of a server behind the gateway that did not answer in time."""

    status = 504
