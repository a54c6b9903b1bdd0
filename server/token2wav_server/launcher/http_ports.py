"""HTTP listeners of the launcher: they bound connections, headers and every wait, so that no client
exhausts them.
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

PATIENCE_S = 10.0  # for a client to send its headers, and again for its body
CONNECTIONS = 128  # of one listener
_HEADERS = 64
_HEADER_BYTES = 4096
# How long to go on reading what a refused client still sends: it would not read the answer before.
_LINGER_S = 1.0
_SHUTDOWN_S = 1.0
_LOGGER = logging.getLogger(__name__)
# what clients do wrong is told to them, and not to the operator's console
_LOGGER.addHandler(logging.NullHandler())
_LOGGER.propagate = False


class HttpPorts:
    """HTTP listeners in one thread of their own; use them as a context manager.

    A connection carries one request, so that nothing can be pipelined or smuggled behind it.

    Args:
        handlers: function that answers, by the bound socket that it answers on.
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
        for bound, handler in self._handlers.items():
            server = _BoundedServer(
                handler,
                handler_cancellation=True,  # a client that leaves takes its request with it
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
            await web.SockSite(runner, bound).start()

    async def _close(self) -> None:
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))


class _BoundedServer(web.Server):
    """HTTP server with a bounded number of connections, none of which an incomplete request can
    occupy for long.

    When all places are taken, a new connection evicts the oldest one whose request has not arrived
    in full, or is closed itself if there is none. So half-open requests push each other out, and a
    request that is sent at once is answered. Places per address would not do: behind a balancer all
    clients have one address, and an attacker may have many. A half-open request does not name its
    path, so no place could be kept for the path of health either.
    """

    def __init__(self, handler: Handler, **options: Any) -> None:
        super().__init__(self._answered, **options)
        self._handler = handler
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}  # oldest first
        self._requests: dict[web.RequestHandler, web.BaseRequest] = {}  # whose headers have arrived

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
    """Returns a whole response, after which the connection ends."""
    response = web.Response(status=status, text=text, content_type=content_type)
    response.force_close()
    return response


def refusal(status: int, reason: str) -> web.Response:
    """Returns a response that says what is wrong, in the form of Triton's own."""
    return answer(status, json.dumps({"error": reason}), "application/json")


class Status(Enum):
    """State of a server, as the HTTP status that tells it.

    HAProxy (`http-check disable-on-404`) takes 404 as what it means here: no new streams, but let
    the open ones go on. Anybody else takes it as a failure, which for a readiness probe is right as
    well.
    """

    STARTING = HTTPStatus.SERVICE_UNAVAILABLE
    READY = HTTPStatus.OK
    DRAINING = HTTPStatus.NOT_FOUND


class StatusPort(HttpPorts):
    """HTTP listener that tells load balancers whether new streams are welcome; use it as a context
    manager.

    Triton's own readiness cannot: it stays while the server drains. The launcher knows that, and
    what the canary found.

    Raises:
        PortInUseError: it cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__({listening(host, port, "status"): self._answer})
        self._status = Status.STARTING

    def tell(self, status: Status) -> None:
        """Sets the status that every request is answered with from now on."""
        self._status = status

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(self._status.value, f"{self._status.name.lower()}\n")
