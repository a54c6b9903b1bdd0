"""HTTP listeners of the launcher.

They limit the number of connections, the size of headers and the duration of every wait, so that
no client can exhaust them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from enum import Enum
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web

from token2wav_server.launcher.ports import listening

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_Self = TypeVar("_Self", bound="HttpPorts")

PATIENCE_S = 10.0  # time for a client to send its headers, and the same time again for its body
CONNECTIONS = 128  # largest number of connections of one listener
_HEADERS = 64
_HEADER_BYTES = 4096
# Time for which the rest of a refused request is still read. A client that is still sending does
# not read the response before it has sent everything.
_LINGER_S = 1.0
_SHUTDOWN_S = 1.0
_LOGGER = logging.getLogger(__name__)
# Errors of clients are answered with a response, and not logged to the operator's console.
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False


class HttpPorts:
    """HTTP listeners in one thread of their own; use them as a context manager.

    A connection carries one request, so that a client cannot pipeline or smuggle another request
    after the first.

    Args:
        handlers: bound socket of each listener, and the function that answers requests there.
    """

    def __init__(self, handlers: Mapping[socket.socket, Handler]) -> None:
        self._handlers = handlers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._runners: list[web.ServerRunner] = []

    def __enter__(self: _Self) -> _Self:
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(self, *exception: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _open(self) -> None:
        for listener, handler in self._handlers.items():
            server = _BoundedServer(
                handler,
                handler_cancellation=True,  # if the client disconnects
                logger=_LOGGER,
                access_log=None,
                keepalive_timeout=PATIENCE_S,  # also the time until the headers are complete
                lingering_time=_LINGER_S,
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
                max_headers=_HEADERS,
                auto_decompress=False,
            )
            runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
            self._runners.append(runner)
            await runner.setup()
            await web.SockSite(runner, listener).start()

    async def _close(self) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))


class _BoundedServer(web.Server):
    """HTTP server with a limited number of connections, in which no incomplete request stays long.

    When the limit is reached, a new connection evicts the oldest connection whose request has not
    arrived completely. If every other request is complete, the new connection itself is closed. So
    incomplete requests evict each other, and a request that arrives without a pause is answered.

    A limit for each address would not help: behind a load balancer all clients have the same
    address, and an attacker may have many addresses. Reserving connections for health checks is not
    possible either, because the path of an incomplete request is not known yet.
    """

    def __init__(self, handler: Handler, **options: Any) -> None:
        super().__init__(self._answered, **options)
        self._handler = handler
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}  # oldest first
        self._requests: dict[web.RequestHandler, web.BaseRequest] = {}  # with complete headers

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport
        if len(self._transports) > CONNECTIONS:
            evicted = next(
                connection for connection in self._transports if not self._arrived(connection)
            )
            self._transports.pop(evicted).abort()

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        self._transports.pop(handler, None)
        self._requests.pop(handler, None)
        super().connection_lost(handler, exc)

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        self._requests[request.protocol] = request
        return await self._handler(request)

    def _arrived(self, connection: web.RequestHandler) -> bool:
        request = self._requests.get(connection)
        return request is not None and request.content.is_eof()


def answer(status: int, text: str, content_type: str = "text/plain") -> web.Response:
    """Returns a complete response, after which the connection is closed."""
    response = web.Response(status=status, text=text, content_type=content_type)
    response.force_close()
    return response


def refusal(status: int, reason: str) -> web.Response:
    """Returns an error response in Triton's format, a JSON object with the reason."""
    return answer(status, json.dumps({"error": reason}), "application/json")


class Status(Enum):
    """State of a server, and the HTTP status that reports this state.

    HAProxy with `http-check disable-on-404` interprets 404 as intended here: it sends no new
    streams to the server, and lets open streams continue. Other load balancers and readiness probes
    interpret 404 as a failure, which has the right effect too.
    """

    STARTING = HTTPStatus.SERVICE_UNAVAILABLE
    READY = HTTPStatus.OK
    DRAINING = HTTPStatus.NOT_FOUND


class StatusPort(HttpPorts):
    """HTTP listener that reports to load balancers whether the server accepts new streams.

    Use it as a context manager. Triton's own readiness endpoint is not enough, because it stays
    ready while the server drains. The launcher knows that the server drains, and also knows the
    result of the canary.

    Raises:
        PortInUseError: the port cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__({listening(host, port, "status"): self._answer})
        self._status = Status.STARTING

    def set_status(self, status: Status) -> None:
        """Sets the status with which every request is answered from now on."""
        self._status = status

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(self._status.value, f"{self._status.name.lower()}\n")
