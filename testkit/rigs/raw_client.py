"""Client of the gateway that sends bytes as they are, whether they are valid or not."""

from __future__ import annotations

import base64
import socket
from contextlib import closing

from testkit.patience import PATIENCE_SECONDS

SOCKET_PATH, REALTIME_PATH = "/v1/audio/speech/stream", "/v1/realtime"
_UPGRADE = (
    " HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n"
).encode()
_MASK = bytes(4)


def opened(port: int) -> closing[socket.socket]:
    """Opens a connection."""
    return closing(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))


def until_closed(connection: socket.socket) -> bytes:
    """Reads until the gateway closes the connection."""
    content = b""
    try:
        while piece := connection.recv(65536):
            content += piece
    except ConnectionResetError:  # the gateway had not read everything
        pass
    return content


def answer(port: int, request: bytes) -> bytes:
    """Sends a request, and reads until the gateway closes the connection."""
    with opened(port) as connection:
        connection.sendall(request)
        return until_closed(connection)


def begin_post(connection: socket.socket) -> None:
    """Sends a request up to its chunked body."""
    connection.sendall(
        b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )


def begin_websocket(
    connection: socket.socket, headers: bytes = b"", path: str = SOCKET_PATH
) -> bytes:
    """Opens a WebSocket, and returns the response."""
    connection.sendall(f"GET {path}".encode() + _UPGRADE + headers + b"\r\n")
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head


def frame(opcode: int, payload: bytes = b"", *, last: bool = True) -> bytes:
    """Frame of a WebSocket."""
    size, extended = len(payload), b""
    if size > 125:
        size, extended = 127, size.to_bytes(8, "big")
    return bytes([opcode | (0x80 if last else 0), 0x80 | size]) + extended + _MASK + payload
