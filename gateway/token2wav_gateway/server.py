"""Server of the gateway: uvicorn with bounds of connections, which drains before it ends."""

from __future__ import annotations

import asyncio
import socket
import time

import uvicorn
from fastapi import FastAPI

from token2wav_gateway.connections import Connections
from token2wav_gateway.descriptors import most_connections, report_error
from token2wav_gateway.protocols import CountedConfig, HttpConnection, SocketConnection
from token2wav_gateway.settings import LimitSettings
from token2wav_gateway.sockets import Sockets

DRAIN_S = 30.0
_POLL_S = 0.1
_HEAD_BYTES = 16 << 10
# Connections that are accepted at once, before the event loop does anything else.
_BACKLOG = 256


class BoundedConfig(CountedConfig):
    """Configuration of uvicorn for the gateway.

    Raises:
        SettingsError: the limits need more file descriptors than the process may open.
    """

    def __init__(self, app: FastAPI, limits: LimitSettings, *, host: str, port: int) -> None:
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
        self.client_connections = Connections(most_connections(limits))


class DrainingServer(uvicorn.Server):
    """Server that lets open requests and WebSockets finish before it ends.

    uvicorn alone closes WebSockets at once, in the middle of their sentences.

    Args:
        drain_s: seconds that open requests have to finish.
    """

    def __init__(self, config: BoundedConfig, app: FastAPI, drain_s: float = DRAIN_S) -> None:
        super().__init__(config)
        self._app = app
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(report_error)
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        deadline = time.monotonic() + self._drain_s
        open_sockets: Sockets = self._app.state.sockets
        open_sockets.drain()
        while open_sockets.count and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(_POLL_S)
        self.config.timeout_graceful_shutdown = max(1, round(deadline - time.monotonic()))
        await super().shutdown(sockets)
