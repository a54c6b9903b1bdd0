"""Client of gRPC that sends a message in pieces, and need not finish it."""

from __future__ import annotations

import socket

from testkit.patience import PATIENCE_SECONDS

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
_END_HEADERS = 4
_WINDOW, _MOST_FRAME = 65_535, 16_384  # bytes, unless the server allows more
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
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "x",
            "content-type": "application/grpc",
            "te": "trailers",
            **(headers or {}),
        }
        block = b"".join(_literal(name) + _literal(fields[name], b"") for name in fields)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(_SETTINGS, 0, 0, b"")
        self._send(_HEADERS, _END_HEADERS, _STREAM, block)
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
        self._send(_DATA, 0, _STREAM, payload)

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
        self._socket.sendall(head + payload)

    def _receive(self) -> None:
        """Receives a frame, which may widen a window."""
        head = self._exactly(9)
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


def _literal(text: str, prefix: bytes = b"\0") -> bytes:
    """Text of at most 126 bytes in HPACK, for which neither side keeps an entry."""
    return prefix + bytes([len(text)]) + text.encode()
