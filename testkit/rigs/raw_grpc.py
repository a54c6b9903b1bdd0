"""Clients of gRPC on plain sockets: one sends a message in pieces, and need not finish it. The
other sends many messages at little cost.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from testkit.patience import PATIENCE_SECONDS

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4  # flags
_INITIAL_WINDOW = 4  # key of a setting
_HEAD = 9  # bytes of the head of a frame
_WINDOW, _MOST_FRAME = 65_535, 16_384  # bytes, unless the server allows more
_MOST_WINDOW = 2**31 - 1
_STREAM = 1


class UnfinishedCall:
    """Call whose request never ends.

    Args:
        address: host:port.
        method: path of the method.
        declared: bytes that the message should have.
        headers: headers of the call.
    """

    def __init__(
        self, address: str, method: str, declared: int, headers: dict[str, str] | None = None
    ) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
        self._windows = {0: _WINDOW, _STREAM: _WINDOW}
        self._socket.sendall(_opening(method, headers or {}))
        self._data(b"\0" + declared.to_bytes(4, "big"))

    def __enter__(self) -> UnfinishedCall:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, size: int) -> None:
        """Sends further bytes of the message, as fast as the server allows.

        Raises:
            ConnectionError: the server has ended the call or the connection.
        """
        while size:
            allowed = min(size, _MOST_FRAME, *self._windows.values())
            if allowed > 0:
                self._data(bytes(allowed))
                size -= allowed
            else:
                self._receive()

    def _data(self, payload: bytes) -> None:
        for stream in self._windows:
            self._windows[stream] -= len(payload)
        self._socket.sendall(_frame(_DATA, 0, _STREAM, payload))

    def _receive(self) -> None:
        """Receives a frame, which may widen a window."""
        head = self._exactly(_HEAD)
        payload = self._exactly(int.from_bytes(head[:3], "big"))
        kind, stream = head[3], int.from_bytes(head[5:], "big")
        if kind == _WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind in (_HEADERS, _RST_STREAM, _GOAWAY):
            raise ConnectionAbortedError("the call has ended")

    def _exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            piece = self._socket.recv(size - len(content))
            if not piece:
                raise ConnectionAbortedError("the connection has ended")
            content += piece
        return content


class StreamCall(asyncio.Protocol):
    """Call of a method with streams in both directions, with a connection of its own, in asyncio.

    A message and its answer cost 0.1 ms of CPU time, a third of their cost in grpc.aio. So a load
    generator can share the cores of a server.

    Args:
        on_message: is called with each message of the server.

    Attributes:
        ended: done after the end of the call, with ConnectionError unless `close` has ended it.
    """

    def __init__(self, method: str, on_message: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._method, self._on_message = method, on_message
        self._received, self._messages, self._unsent = bytearray(), bytearray(), bytearray()
        self._windows, self._initial_window = {0: _WINDOW, _STREAM: _WINDOW}, _WINDOW

    @classmethod
    async def open(
        cls, address: str, method: str, on_message: Callable[[bytes], None]
    ) -> StreamCall:
        """Connects to host:port.

        Raises:
            OSError: no server listens there.
        """
        host, _, port = address.rpartition(":")
        _, call = await asyncio.get_running_loop().create_connection(
            lambda: cls(method, on_message), host, int(port)
        )
        return call

    def send(self, message: bytes) -> None:
        """Sends a message, as soon as the server allows."""
        self._unsent += b"\0" + len(message).to_bytes(4, "big") + message
        self._flush()

    def close(self) -> None:
        """Closes the connection at once."""
        if not self.ended.done():
            self.ended.set_result(None)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(_opening(self._method, {}))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionAbortedError("the server has ended the call"))

    def data_received(self, content: bytes) -> None:
        received, at = self._received, 0
        received += content
        while len(received) >= at + _HEAD:
            start = at + _HEAD
            stop = start + int.from_bytes(received[at : at + 3], "big")
            if len(received) < stop:
                break
            kind, flags, stream = struct.unpack_from(">BBI", received, at + 3)
            self._accept(kind, flags, stream, bytes(received[start:stop]))
            at = stop
        del received[:at]

    def _accept(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._messages += payload
            self._deliver()
        elif kind == _WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
            self._flush()
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            answer = payload if kind == _PING else b""
            self._transport.write(_frame(kind, _ACK, 0, answer))
            if kind == _SETTINGS:
                self._apply(payload)
        if kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            self._transport.abort()

    def _apply(self, settings: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", settings):
            if key == _INITIAL_WINDOW:
                self._windows[_STREAM] += value - self._initial_window
                self._initial_window = value
        self._flush()

    def _deliver(self) -> None:
        messages = self._messages
        while len(messages) >= (head := 5):
            stop = head + int.from_bytes(messages[1:head], "big")
            if len(messages) < stop:
                return
            message = bytes(messages[head:stop])
            del messages[:stop]
            self._on_message(message)

    def _flush(self) -> None:
        unsent = self._unsent
        while (size := min(len(unsent), _MOST_FRAME, *self._windows.values())) > 0:
            self._transport.write(_frame(_DATA, 0, _STREAM, bytes(unsent[:size])))
            del unsent[:size]
            for stream in self._windows:
                self._windows[stream] -= size


def _opening(method: str, headers: dict[str, str]) -> bytes:
    """Returns the bytes that open a connection and a call. The server may send any amount."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        **headers,
    }
    block = b"".join(_literal(name) + _literal(fields[name], b"") for name in fields)
    frames = (
        _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, _MOST_WINDOW)),
        _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MOST_WINDOW - _WINDOW)),
        _frame(_HEADERS, _END_HEADERS, _STREAM, block),
    )
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str, prefix: bytes = b"\0") -> bytes:
    """Text of at most 126 bytes in HPACK, for which neither side keeps an entry."""
    return prefix + bytes([len(text)]) + text.encode()
