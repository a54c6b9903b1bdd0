"""Forwarder of TCP connections to a server, which can play an outage of that server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.raw_server import raw_server, resets


class Forwarder:
    """Forwarder of connections.

    Args:
        url: host:port of the server.

    Attributes:
        down: whether the server is down. Connections are then reset.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.rpartition(":")
        self._address = host, int(port)
        self.down = False
        self._open: set[socket.socket] = set()

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Yields the host:port that forwards to the server."""
        with raw_server(self._forward) as port:
            yield f"127.0.0.1:{port}"

    def stop(self) -> None:
        """Begins an outage, which ends all connections."""
        self.down = True
        for connection in self._open.copy():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _forward(self, client: socket.socket) -> None:
        if self.down:
            resets(client)
            return
        with closing(socket.create_connection(self._address, PATIENCE_SECONDS)) as server:
            self._open |= {client, server}
            answers = threading.Thread(target=_copy, args=(server, client))
            answers.start()
            _copy(client, server)
            answers.join()
            self._open -= {client, server}


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(65_536):
            target.sendall(piece)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
