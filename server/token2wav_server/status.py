"""Tells load balancers, over HTTP, whether new streams are welcome.

Triton's own readiness cannot: it stays while the server drains. The launcher knows that, and what the canary found.
"""

from __future__ import annotations

from enum import Enum
from http import HTTPStatus

from aiohttp import web

from token2wav_server.http_ports import HttpPorts, answer
from token2wav_server.ports import listening


class Status(Enum):
    """What a server is up to, and the HTTP status that says so.

    HAProxy (`http-check disable-on-404`) takes 404 as what it means here: no new streams, but let the open ones go on.
    Anybody else takes it as a failure, which for a readiness probe is right as well.
    """

    STARTING = HTTPStatus.SERVICE_UNAVAILABLE
    READY = HTTPStatus.OK
    DRAINING = HTTPStatus.NOT_FOUND


class StatusPort(HttpPorts):
    """Answers every request with the status that was told last; use it as a context manager.

    Args:
        host: address to listen on.
        port: of TCP.

    Raises:
        PortInUseError: it cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__({listening(host, port, "status"): self._answer})
        self._status = Status.STARTING

    def tell(self, status: Status) -> None:
        """Has this answered from now on."""
        self._status = status

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(self._status.value, f"{self._status.name.lower()}\n")
