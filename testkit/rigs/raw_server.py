"""Server of raw TCP connections, for answers that no HTTP library would send."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from testkit.patience import PATIENCE_SECONDS

Reply = Callable[[socket.socket], None]

EVENTS_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)  # closing sends a reset, without waiting


@contextmanager
def raw_server(reply: Reply) -> Iterator[int]:
    """Serves each connection by a function in a thread of its own, and yields the port.

    The connection is closed after the function returns, or when the client closes it.
    """
    with closing(socket.create_server(("127.0.0.1", 0), backlog=1024)) as listener:
        accepting = threading.Thread(target=_accept, args=(listener, reply), daemon=True)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            accepting.join()


def sends(content: bytes) -> Reply:
    """Sends bytes after the request has arrived."""

    def reply(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(content)

    return reply


def sends_forever(head: bytes, piece: bytes) -> Reply:
    """Sends bytes until the client closes the connection."""

    def reply(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return reply


def sends_and_waits(content: bytes) -> Reply:
    """Sends bytes, and then nothing until the client closes the connection."""

    def reply(connection: socket.socket) -> None:
        sends(content)(connection)
        while connection.recv(4096):
            pass

    return reply


def resets(connection: socket.socket) -> None:
    """Closes a connection with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def read_request(connection: socket.socket) -> bytes:
    """Reads a request. A connection that is closed with unread bytes would be reset."""
    with connection.makefile("rb") as file:
        head = b""
        while (line := file.readline()).strip():
            head += line
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return head + file.read(int(length[1]) if length else 0)


def _accept(listener: socket.socket, reply: Reply) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.settimeout(PATIENCE_SECONDS)
        threading.Thread(target=_serve, args=(connection, reply), daemon=True).start()


def _serve(connection: socket.socket, reply: Reply) -> None:
    with closing(connection), suppress(OSError):
        reply(connection)
