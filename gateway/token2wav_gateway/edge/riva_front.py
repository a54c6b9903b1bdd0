"""Front of the gRPC server of Riva's interface: it bounds the bytes of unfinished messages.

The library grpc bounds the length of a message, and keeps its bytes in memory until the last byte
has arrived. Many clients together could therefore fill the memory with unfinished messages.
The front relays the bytes of each connection, and follows the frames of HTTP/2.
"""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from token2wav_gateway.edge.fair_reads import FairReads
from token2wav_gateway.edge.tasks import first_of

log = logging.getLogger(__name__)

_PREFACE_BYTES = 24  # of a client, before its first frame
_FRAME_HEADER_BYTES, _MESSAGE_HEADER_BYTES = 9, 5
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3  # types of frames
_END_STREAM = 1  # flag
_PIECE = 16 << 10  # bytes that are relayed at once
_CLOSE_S = 10.0  # for a client to take the last bytes


class FrameError(Exception):
    """Error of a client: bytes that are no frames of a gRPC client."""


class Frames:
    """Frames of HTTP/2 in one direction of a connection, which arrive in pieces of any size.

    Args:
        skipped: bytes before the first frame.
        begin: takes the type, the flags and the stream of each frame.
        data: takes the stream of a frame with data, and each piece of its payload.
    """

    def __init__(
        self,
        skipped: int,
        begin: Callable[[int, int, int], None],
        data: Callable[[int, memoryview], None],
    ) -> None:
        self._begin, self._data = begin, data
        self._header = bytearray()
        self._left = skipped  # bytes of the payload
        self._stream: int | None = None  # of the data that arrive

    def feed(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            if self._left:
                payload, view = view[: self._left], view[self._left :]
                self._left -= len(payload)
                if self._stream is not None:
                    self._data(self._stream, payload)
                continue
            missing = _FRAME_HEADER_BYTES - len(self._header)
            self._header += view[:missing]
            view = view[missing:]
            if len(self._header) == _FRAME_HEADER_BYTES:
                self._begin_frame()

    def _begin_frame(self) -> None:
        header = bytes(self._header)
        self._header.clear()
        self._left = int.from_bytes(header[:3], "big")
        kind, flags = header[3], header[4]
        stream = int.from_bytes(header[5:], "big") & 0x7FFFFFFF
        self._stream = stream if kind == _DATA else None
        self._begin(kind, flags, stream)


class _Message:
    """Message of gRPC that arrives, after a header with its length.

    Attributes:
        received: bytes that have arrived of an unfinished message.
        begun: time at which the first byte of the message arrived.
    """

    def __init__(self) -> None:
        self.received, self.begun = 0, 0.0
        self._header = bytearray()

    def take(self, payload: memoryview) -> None:
        while payload:
            if len(self._header) < _MESSAGE_HEADER_BYTES:
                missing = _MESSAGE_HEADER_BYTES - len(self._header)
                self._header += payload[:missing]
                payload = payload[missing:]
            if len(self._header) == _MESSAGE_HEADER_BYTES:
                length = int.from_bytes(self._header[1:], "big")
                taken = min(length - self.received, len(payload))
                if not self.received:
                    self.begun = time.monotonic()
                self.received += taken
                payload = payload[taken:]
                if self.received == length:
                    self.received = 0
                    self._header.clear()


class Unfinished:
    """Unfinished messages of a connection.

    Attributes:
        size: received bytes of all unfinished messages.
    """

    def __init__(self) -> None:
        self.size = 0
        self._messages: dict[int, _Message] = {}  # by stream
        self._newest = 0  # stream
        self.requests = Frames(_PREFACE_BYTES, self._begin_request, self._take)
        self.responses = Frames(0, self._begin_response, lambda _, __: None)

    @property
    def since(self) -> float:
        """Time of the first byte of the oldest message; infinite without bytes of a message."""
        messages = self._messages.values()
        return min((message.begun for message in messages if message.received), default=math.inf)

    def _begin_request(self, kind: int, flags: int, stream: int) -> None:
        if kind == _DATA and flags & ~_END_STREAM:
            raise FrameError("data with padding")
        if kind == _HEADERS and stream > self._newest:
            # The library ignores such streams without an answer, so nothing would end them here.
            if stream % 2 == 0:
                raise FrameError("a stream with an even number")
            self._newest = stream
            self._messages[stream] = _Message()
        elif kind == _RST_STREAM:
            self._forget(stream)

    def _begin_response(self, kind: int, flags: int, stream: int) -> None:
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._forget(stream)

    def _take(self, stream: int, payload: memoryview) -> None:
        if (message := self._messages.get(stream)) is not None:
            before = message.received
            message.take(payload)
            self.size += message.received - before

    def _forget(self, stream: int) -> None:
        if (message := self._messages.pop(stream, None)) is not None:
            self.size -= message.received


class _Relayed:
    """Connection of a client, and the connection to the server.

    Attributes:
        turn: see `FairConnection`.
    """

    def __init__(self) -> None:
        self.turn = 0.0
        self.unfinished = Unfinished()


class RivaFront:
    """Front of a gRPC server that listens at a Unix socket.

    If unfinished messages of all clients together have more bytes than allowed, the connection with
    the oldest message is closed. The newest or largest message may be from an honest client.
    A client that reads nothing is disconnected, because it keeps the place of another client.

    Args:
        most_bytes: most bytes of all unfinished messages together.
        most_connections: largest number of connections.
        stall_s: seconds in which nothing more can be sent to a client, after which it is
            disconnected.
    """

    def __init__(self, most_bytes: int, most_connections: int, stall_s: float) -> None:
        self._most_bytes = most_bytes
        self._stall_s = stall_s
        self._most_connections = most_connections
        self._reads = FairReads()
        self._open: dict[_Relayed, asyncio.Task[None]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="riva-")
        self._server: asyncio.Server | None = None

    @property
    def path(self) -> Path:
        """Path of the server's socket, in a folder that only this user can enter."""
        return Path(self._folder.name) / "grpc"

    async def start(self, host: str, port: int) -> None:
        """Opens the port.

        Raises:
            OSError: the port cannot be opened.
        """
        self._server = await asyncio.start_server(self._relay, host, port, limit=_PIECE)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._folder.cleanup()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relayed, task = _Relayed(), asyncio.current_task()
        assert task is not None
        self._open[relayed] = task
        try:
            if len(self._open) > self._most_connections:
                return
            server_reader, server = await asyncio.open_unix_connection(self.path, limit=_PIECE)
            try:
                await first_of(
                    self._copy_requests(relayed, reader, server),
                    self._copy_responses(relayed, server_reader, writer),
                )
            finally:
                server.transport.abort()
        except (OSError, FrameError, asyncio.CancelledError):
            pass
        finally:
            self._open.pop(relayed, None)
            writer.close()
            # A client that does not take the last bytes is disconnected.
            asyncio.get_running_loop().call_later(_CLOSE_S, writer.transport.abort)

    async def _copy_requests(
        self, relayed: _Relayed, reader: asyncio.StreamReader, server: asyncio.StreamWriter
    ) -> None:
        try:
            while piece := await reader.read(_PIECE):
                await self._reads.run(relayed, self._follow(relayed, piece))
                server.write(piece)
                await server.drain()
        finally:  # the next connection of the client may be there already
            self._open.pop(relayed, None)

    async def _copy_responses(
        self, relayed: _Relayed, reader: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(_PIECE):
            relayed.unfinished.responses.feed(piece)
            client.write(piece)
            with anyio.fail_after(self._stall_s):
                await client.drain()

    async def _follow(self, relayed: _Relayed, piece: bytes) -> None:
        """Counts the bytes of a client, and closes a connection if there are too many."""
        relayed.unfinished.requests.feed(piece)
        if sum(other.unfinished.size for other in self._open) > self._most_bytes:
            oldest = min(self._open, key=lambda other: other.unfinished.since)
            log.warning(
                "unfinished messages of Riva's interface have more than %d bytes; the connection "
                "with the oldest message is closed",
                self._most_bytes,
            )
            self._open[oldest].cancel()
