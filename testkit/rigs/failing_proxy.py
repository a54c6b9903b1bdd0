"""Proxy of a server that fails as a server, its machine or the network fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from testkit.rigs.raw_server import resets
from token2wav_server.launcher.ports import LOOPBACK, reserved

# As if a server was killed, as if its machine rejects connections after it has accepted them, and
# as if the network loses everything.
MANNERS = ("refuses", "resets", "stalls")
_PIECE_BYTES = 65_536


class Proxy:
    """TCP proxy of one server. It passes bytes on, unless there is an outage.

    Args:
        target: port of the server.
    """

    def __init__(self, target: int) -> None:
        # Reserves the port while the proxy refuses connections.
        self._reserved = reserved(LOOPBACK)
        self.port: int = self._reserved.getsockname()[1]
        self._target = target
        self._listener: asyncio.Server | None = None
        self._resets = False
        self._flows = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Begins to work, or works again after an outage."""
        self._resets = False
        self._flows.set()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connect, LOOPBACK, self.port)

    async def fail(self, manner: str) -> None:
        """Begins an outage, in one of `MANNERS`."""
        if manner == "stalls":
            self._flows.clear()
            return
        self._resets = True
        if manner == "refuses" and self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._open:
            _reset(writer)

    async def close(self) -> None:
        """Ends all connections, and waits until they have ended."""
        await self.fail("refuses")
        self._flows.set()
        while self._open:
            await asyncio.sleep(0.01)
        self._reserved.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._resets:
            _reset(writer)
            return
        server_reader, server_writer = await asyncio.open_connection(LOOPBACK, self._target)
        both = {writer, server_writer}
        self._open |= both
        pumps = {
            asyncio.create_task(self._pump(reader, server_writer)),
            asyncio.create_task(self._pump(server_reader, writer)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self._open -= both
        for end in both:
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    resets(writer.get_extra_info("socket"))
    writer.transport.abort()
