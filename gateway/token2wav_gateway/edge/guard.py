"""Guard of HTTP requests: access keys, and bounds of bodies, before anything else is done."""

from __future__ import annotations

from collections.abc import Set

import anyio
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from token2wav_gateway.access import Access
from token2wav_gateway.errors import (
    AccessDeniedError,
    GatewayError,
    LateBodyError,
    TooLargeError,
)
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import LimitSettings

UPLOADS = "/v1/audio/voices"


class Guard:
    """Middleware that bounds the memory and time of an HTTP request.

    It refuses a request without a valid key before its body is read, and a body that is too large
    or that arrives too slowly. It ends a response if the client takes no more bytes.

    Args:
        without_key: paths that need no key. All others need one.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: LimitSettings,
        metrics: Metrics,
        without_key: Set[str] = frozenset(),
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._metrics = metrics
        self._without_key = without_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._limits)
        try:
            self._check_key(scope)
            exchange.check_declared_length()
            await self._app(scope, exchange.receive, exchange.send)
        except (AccessDeniedError, TooLargeError) as error:
            exchange.refusal = error
        except (_StalledError, ClientDisconnect):
            return  # without its end, so that the server closes the connection
        refusal = exchange.refusal
        if refusal is not None and not exchange.started:
            answer = error_response(refusal, self._metrics)
            answer.headers["connection"] = "close"  # the rest of the body is not read
            await answer(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        if scope["path"] not in self._without_key:
            header = dict(scope["headers"]).get(b"authorization")
            self._access.check(None if header is None else header.decode("latin-1"))


class _Exchange:
    """Request and response, with their limits.

    Attributes:
        refusal: why the body is refused; None for a body within its limits.
        started: whether the response has started.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: LimitSettings) -> None:
        self.refusal: GatewayError | None = None
        self.started = False
        self._receive, self._send = receive, send
        self._most = limits.upload_bytes if scope["path"] == UPLOADS else limits.body_bytes
        self._stall_s = limits.idle_s
        self._seconds = limits.seconds
        self._deadline = anyio.current_time() + limits.seconds
        self._declared = dict(scope["headers"]).get(b"content-length", b"0")
        self._received = 0
        self._whole = False

    def check_declared_length(self) -> None:
        """Checks the length in the header of the request."""
        if self._declared.isdigit() and int(self._declared) > self._most:
            raise self._too_large()

    async def receive(self) -> Message:
        """Receives a message; a disconnection after the body was refused."""
        if self.refusal is None and not self._whole:
            try:
                with anyio.fail_after(self._deadline - anyio.current_time()):
                    message = await self._receive()
            except TimeoutError:
                self.refusal = LateBodyError(f"body: not complete after {self._seconds:g} s")
            else:
                self._received += len(message.get("body", b""))
                self._whole = not message.get("more_body", False)
                if self._received <= self._most:
                    return message
                self.refusal = self._too_large()
        if self.refusal is not None:
            return {"type": "http.disconnect"}
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Sends a message of the response, unless the body was refused."""
        if self.refusal is not None:
            return
        self.started = True
        try:
            with anyio.fail_after(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise _StalledError from None

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"body: larger than {self._most} bytes")


class _StalledError(OSError):
    """Error of a response: the client has stopped reading."""


def error_response(error: GatewayError, metrics: Metrics) -> JSONResponse:
    """Returns the response for an error, and counts it."""
    metrics.refused.labels(error.status).inc()
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body, error.status, headers)


class PathWithoutSlash:
    """Middleware that removes slashes at the end of a path.

    A redirection would not do, because many clients do not send the body of a request again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "path" in scope:
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)
