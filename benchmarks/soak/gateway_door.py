"""Doors of a gateway with a key: connections that a test fills itself, and its WebSocket."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from websockets.sync.client import connect

SPEECH, STREAM = "/v1/audio/speech", "/v1/audio/speech/stream"
_PATIENCE_SECONDS = 150.0  # longer than the gateway's limit of a text


@dataclass(frozen=True)
class Door:
    """Address of a gateway."""

    port: int
    key: str
    address: str = "127.0.0.1"  # address of the client on this machine

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def connection(self, window: int = 0) -> socket.socket:
        """Opens a connection.

        Args:
            window: bytes that the operating system receives for the client; 0 for its default.
        """
        opened = socket.socket()
        opened.settimeout(_PATIENCE_SECONDS)
        if window:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        try:
            opened.bind((self.address, 0))
            opened.connect(("127.0.0.1", self.port))
        except OSError:
            opened.close()
            raise
        return opened

    def head(self, request: str, **headers: object) -> bytes:
        """Returns the head of a request with the key, such as `head("GET /v1/models")`."""
        lines = "".join(f"{name.replace('_', '-')}: {headers[name]}\r\n" for name in headers)
        key = f"authorization: Bearer {self.key}\r\n"
        return f"{request} HTTP/1.1\r\nhost: x\r\n{lines}{key}\r\n".encode()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Returns a POST request."""
        content, kind = json.dumps(body).encode(), "application/json"
        return self.head(f"POST {path}", content_type=kind, content_length=len(content)) + content

    def socket(self, **options: Any) -> Any:
        """Opens a WebSocket."""
        opened = self.connection()
        # The package's thread that reads would wait for a time-out after another thread has closed
        # the connection.
        opened.settimeout(None)
        return connect(
            f"ws://127.0.0.1:{self.port}{STREAM}",
            sock=opened,
            additional_headers=self.headers,
            open_timeout=_PATIENCE_SECONDS,
            close_timeout=1,
            **options,
        )
