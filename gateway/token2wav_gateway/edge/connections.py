"""Connections of clients: their number, and the pace at which they are read."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

from token2wav_gateway.edge.fair_reads import FairReads

log = logging.getLogger(__name__)

# Bytes that are read at once. They bound the time of a turn: 85 chunks of one byte, or 85 empty
# frames of a WebSocket, take 1 ms. A connection whose bytes are parsed fast, such as a recording,
# reads more of them at once.
_LEAST_BYTES, _MOST_BYTES = 512, 4096
_FAST_S = 0.0003
_UNSENT = 64 << 10  # bytes that wait in the operating system
_CLOSE_S = 10.0  # for a client to take the last bytes

_ResultT = TypeVar("_ResultT")


class Reader(Protocol):
    """Protocol of a connection.

    Attributes:
        evictable: whether the connection may be closed for a new one, because its request has not
            arrived completely or has been answered.
    """

    @property
    def evictable(self) -> bool: ...

    def data_received(self, data: bytes) -> None: ...


class Connections:
    """Connections of a server, limited in number.

    If a connection is above the limit, the oldest connection without a complete request is closed,
    of the address that has the most connections. So requests that never become complete evict each
    other, an address evicts no connection of another address with fewer connections, and a health
    check always gets a connection. There is no limit for each address, because behind a proxy all
    clients have the same address.

    Args:
        most: largest number of connections. It must be larger than the number of requests that the
            application answers at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._reads = FairReads()
        self._count = 0
        self._open: dict[str, dict[Connection, None]] = {}  # of each address, the oldest first

    def add(self, transport: asyncio.Transport) -> Connection:
        """Adds a new connection, and closes another one if the limit is exceeded."""
        connection = Connection(transport, self._reads)
        self._open.setdefault(connection.address, {})[connection] = None
        self._count += 1
        if self._count > self._most:
            self._evict()
        return connection

    def remove(self, connection: Connection) -> None:
        """Removes a connection that is closed, if it was not removed before."""
        neighbours = self._open.get(connection.address, {})
        if connection in neighbours:
            del neighbours[connection]
            self._count -= 1
        if not neighbours:
            self._open.pop(connection.address, None)

    def _evict(self) -> None:
        for neighbours in sorted(self._open.values(), key=len, reverse=True):
            for connection in neighbours:
                if connection.evictable:
                    log.warning(
                        "%d connections are open, which is the limit; one without a complete "
                        "request is closed",
                        self._most,
                    )
                    self.remove(connection)
                    connection.abort()
                    return


class Connection:
    """A connection, as uvicorn sees its transport. It works in turn with the other connections.

    Attributes:
        address: address of the client.
        turn: see `FairConnection`.
    """

    def __init__(self, transport: asyncio.Transport, reads: FairReads) -> None:
        self.address = str((transport.get_extra_info("peername") or ("",))[0])
        self.turn = 0.0
        self._buffer = memoryview(bytearray(_MOST_BYTES))
        self._size = _LEAST_BYTES  # of the next read
        self._transport = transport
        self._bound_unsent()
        self._reads = reads
        self._waiting = b""  # bytes that have no turn yet
        self._paused = False  # by uvicorn
        self._deadline: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def evictable(self) -> bool:
        return self._transport.is_closing() or self._reader.evictable

    @property
    def buffer(self) -> memoryview:
        return self._buffer[: self._size]

    def received(self, size: int) -> None:
        """Queues the first bytes of the buffer, and reads no more until they have had a turn."""
        self._waiting = bytes(self._buffer[:size])
        self._reads.join(self, self.read)
        if self._waiting:
            self._transport.pause_reading()

    def read(self) -> None:
        """Parses the bytes that have arrived."""
        data, self._waiting = self._waiting, b""
        if self._transport.is_closing():
            return
        if not self._paused:
            self._transport.resume_reading()
        started = time.perf_counter()
        try:
            self._reader.data_received(data)
        except Exception:
            log.exception("a connection is closed after an error")
            self._transport.abort()
        fast = time.perf_counter() - started < _FAST_S
        self._size = min(2 * self._size, _MOST_BYTES) if fast else _LEAST_BYTES

    async def in_turn(self, work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        """Runs work for a message of the client, in turn with the other connections."""
        return await self._reads.run(self, work)

    def pause_reading(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if not self._waiting:
            self._transport.resume_reading()

    def close(self) -> None:
        """Closes the connection after the client has taken the last bytes, or has not in time."""
        self._transport.close()
        if self._transport.get_write_buffer_size() and self._deadline is None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(_CLOSE_S, self._transport.abort)

    def lost(self) -> None:
        """Releases the connection after it was closed."""
        if self._deadline is not None:
            self._deadline.cancel()

    def _bound_unsent(self) -> None:
        """Bounds the bytes that the operating system takes before they can be sent.

        It would take a minute of audio for a client that does not read.
        """
        connection = self._transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)

    @property
    def _reader(self) -> Reader:
        return cast(Reader, self._transport.get_protocol())
