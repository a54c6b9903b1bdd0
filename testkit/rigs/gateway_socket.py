"""WebSocket of a gateway under test for text in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig
from testkit.rigs.raw_client import SOCKET_PATH

CONFIG = {"type": "session.config", "voice": VOICE, "stream_audio": True}


class Socket:
    """WebSocket that collects what it receives."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.events: list[dict[str, Any]] = []
        self.audio: list[bytes] = []

    def send(self, **message: Any) -> None:
        self._connection.send(json.dumps(message))

    def until(self, kind: str) -> dict[str, Any]:
        """Receives until an event of a kind has arrived."""
        while True:
            message = self._connection.recv(timeout=PATIENCE_SECONDS)
            if isinstance(message, bytes):
                self.audio.append(message)
                continue
            self.events.append(json.loads(message))
            if self.events[-1]["type"] == kind:
                return self.events[-1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]


def address(gateway: GatewayRig) -> str:
    return gateway.url.replace("http", "ws") + SOCKET_PATH


@contextmanager
def opened(gateway: GatewayRig, **config: Any) -> Iterator[Socket]:
    """Opens a session. Fields of `config` replace those of `CONFIG`."""
    with connect(address(gateway), open_timeout=PATIENCE_SECONDS, close_timeout=1) as connection:
        socket = Socket(connection)
        socket.send(**CONFIG | config)
        yield socket
