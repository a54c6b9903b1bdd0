"""Origins: web pages that may use the gateway."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from token2wav_gateway.edge.guard import error_response
from token2wav_gateway.errors import NotAllowedError
from token2wav_gateway.metrics import Metrics

_SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


class OriginCheck:
    """Middleware that refuses WebSockets and changes from web pages of other hosts.

    A browser sends a WebSocket's handshake, a form or a text to any address of its user's network,
    for any page. It adds the origin of the page. Programs other than browsers send no origin.

    Args:
        origins: origins that are allowed besides the host of the request, in lower case.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str], metrics: Metrics) -> None:
        self._app = app
        self._origins = origins
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" or scope.get("method", "GET") not in _SAFE_METHODS:
            headers = Headers(scope=scope)
            for origin in headers.getlist("origin"):
                if not self._allowed(origin.lower(), headers.get("host", "").lower()):
                    error = NotAllowedError(
                        f"origin: {origin[:64]!r} is neither the host of the request nor one of "
                        "`origins` in the settings of the gateway"
                    )
                    answer = error_response(error, self._metrics)
                    answer.headers["connection"] = "close"  # the body is not read
                    await answer(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _allowed(self, origin: str, host: str) -> bool:
        try:
            return origin in self._origins or urlsplit(origin).netloc == host != ""
        except ValueError:  # no URL
            return False
