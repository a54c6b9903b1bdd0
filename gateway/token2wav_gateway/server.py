"""Server of the gateway: uvicorn with bounds of connections, which drains before it ends."""

from __future__ import annotations

import asyncio
import socket
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING

import anyio
import uvicorn
from fastapi import FastAPI

from token2wav_gateway.doors.sockets import Sockets
from token2wav_gateway.edge.connections import Connections
from token2wav_gateway.edge.descriptors import most_connections, report_error
from token2wav_gateway.edge.protocols import CountedConfig, HttpConnection, SocketConnection
from token2wav_gateway.settings import LimitSettings, SettingsError

if TYPE_CHECKING:
    from token2wav_gateway.doors.riva_server import RivaServer

DRAIN_S = 30.0
_END_S = 5.0  # for the end of the application after a second signal
_POLL_S = 0.1
_HEAD_BYTES = 16 << 10
# Connections that are accepted at once, before the event loop does anything else.
_BACKLOG = 256
_OF_A_RIVA_CONNECTION = 3  # descriptors: of the client, and both ends of its way to the server


class BoundedConfig(CountedConfig):
    """Configuration of uvicorn for the gateway.

    Args:
        riva_port: port of Riva's gRPC interface; 0 for none.

    Raises:
        SettingsError: the limits need more file descriptors than the process may open, or the
            package of Riva's interface is not installed.
    """

    def __init__(
        self, app: FastAPI, limits: LimitSettings, *, host: str, port: int, riva_port: int = 0
    ) -> None:
        super().__init__(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            backlog=_BACKLOG,
            http=HttpConnection,
            h11_max_incomplete_event_size=_HEAD_BYTES,
            ws=SocketConnection,
            ws_max_size=limits.body_bytes,
            # Audio is hardly compressible, and zlib refuses some of the windows that clients offer.
            ws_per_message_deflate=False,
        )
        if riva_port and find_spec("riva") is None:
            raise SettingsError(
                "riva port: needs the package nvidia-riva-client; install the extra `riva`"
            )
        self.riva_port = riva_port
        riva_descriptors = _OF_A_RIVA_CONNECTION * limits.sockets if riva_port else 0
        self.client_connections = Connections(most_connections(limits, riva_descriptors))


class DrainingServer(uvicorn.Server):
    """Server that lets open requests and WebSockets finish before it ends.

    uvicorn alone closes WebSockets at once, in the middle of their sentences.

    Args:
        drain_s: seconds that open requests have to finish.
    """

    def __init__(self, config: BoundedConfig, app: FastAPI, drain_s: float = DRAIN_S) -> None:
        super().__init__(config)
        self._app = app
        self._riva_port = config.riva_port
        self._riva: RivaServer | None = None
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(report_error)
        await super().startup(sockets)
        if self.started and self._riva_port:
            # The import is here, because the package of the messages is optional.
            from token2wav_gateway.doors.riva_server import RivaServer

            riva = RivaServer(self._app.state.gateway)
            try:
                await riva.start(self.config.host, self._riva_port)
            except SettingsError:
                await self.shutdown(sockets)
                raise
            self._riva = riva

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        deadline = time.monotonic() + self._drain_s
        calls = asyncio.ensure_future(self._drain_calls(self._drain_s))
        open_sockets: Sockets = self._app.state.sockets
        open_sockets.drain()
        while (
            (open_sockets.count or not calls.done())
            and time.monotonic() < deadline
            and not self.force_exit
        ):
            await asyncio.sleep(_POLL_S)
        await self._drain_calls(0)  # at the deadline, or a second Ctrl-C, calls are cancelled
        self.config.timeout_graceful_shutdown = max(1, round(deadline - time.monotonic()))
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves this out then
            with anyio.move_on_after(_END_S):
                await self.lifespan.shutdown()

    async def _drain_calls(self, seconds: float) -> None:
        if self._riva is not None:
            await self._riva.drain(seconds)
