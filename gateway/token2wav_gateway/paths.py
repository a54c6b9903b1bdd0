"""Paths of requests: a path with a slash at its end means the path without it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


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
