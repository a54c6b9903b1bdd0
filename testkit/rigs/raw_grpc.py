"""Client of gRPC on a plain socket, which sends a message in pieces, and need not finish it."""

from __future__ import annotations

import socket
import struct

from testkit.patience import PATIENCE_SECONDS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
CONTINUATION = 9
END_STREAM, END_HEADERS = 1, 4  # flags
INITIAL_WINDOW = 4  # key of a setting
HEAD = 9  # bytes of the head of a frame
WINDOW, MOST_FRAME = 65_535, 16_384  # bytes, unless the server allows more
MOST_WINDOW = 2**31 - 1
STREAM = 1


class UnfinishedCall:
    """Call with a request that never ends.

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
        self._windows = {0: WINDOW, STREAM: WINDOW}
        self._socket.sendall(opening(method, headers or {}))
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
            allowed = min(size, MOST_FRAME, *self._windows.values())
            if allowed > 0:
                self._data(bytes(allowed))
                size -= allowed
            else:
                self._receive()

    def _data(self, payload: bytes) -> None:
        for stream in self._windows:
            self._windows[stream] -= len(payload)
        self._socket.sendall(frame(DATA, 0, STREAM, payload))

    def _receive(self) -> None:
        """Receives a frame, which may widen a window."""
        head = self._exactly(HEAD)
        payload = self._exactly(int.from_bytes(head[:3], "big"))
        kind, stream = head[3], int.from_bytes(head[5:], "big")
        if kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind in (HEADERS, RST_STREAM, GOAWAY):
            raise ConnectionAbortedError("the call has ended")

    def _exactly(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            piece = self._socket.recv(size - len(content))
            if not piece:
                raise ConnectionAbortedError("the connection has ended")
            content += piece
        return content


def opening(method: str, headers: dict[str, str]) -> bytes:
    """Returns the bytes that open a connection and a call. The server may send any amount."""
    frames = (
        frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, MOST_WINDOW)),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MOST_WINDOW - WINDOW)),
        frame(HEADERS, END_HEADERS, STREAM, header_block(method, headers)),
    )
    return PREFACE + b"".join(frames)


def header_block(method: str, headers: dict[str, str]) -> bytes:
    """Returns the headers of a call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        **headers,
    }
    return b"".join(_literal(name) + _literal(fields[name], b"") for name in fields)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str, prefix: bytes = b"\0") -> bytes:
    """Text of at most 126 bytes in HPACK, for which neither side keeps an entry."""
    return prefix + bytes([len(text)]) + text.encode()
