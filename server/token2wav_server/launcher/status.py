"""Status port of the launcher: it tells load balancers, over HTTP, whether new streams are welcome.

Triton's own readiness cannot: it stays while the server drains. The launcher knows that, and what the canary found.
"""

from __future__ import annotations

from enum import Enum
from http import HTTPStatus

from aiohttp import web

from token2wav_server.launcher.http_ports import HttpPorts, answer
from token2wav_server.launcher.ports import listening


class Status(Enum):
    """State of a server, as the HTTP status that tells it.

    HAProxy (`http-check disable-on-404`) takes 404 as what it means here: no new streams, but let the open ones go on.
    Anybody else takes it as a failure, which for a readiness probe is right as well.
    """

    STARTING = HTTPStatus.SERVICE_UNAVAILABLE
    READY = HTTPStatus.OK
    DRAINING = HTTPStatus.NOT_FOUND


class StatusPort(HttpPorts):
    """HTTP listener that answers every request with the status that was told last; use it as a context manager.

    Args:
        host: address to listen on.
        port: TCP port to listen on.

    Raises:
        PortInUseError: it cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__({listening(host, port, "status"): self._answer})
        self._status = Status.STARTING

    def tell(self, status: Status) -> None:
        """Sets the status that is answered from now on."""
        self._status = status

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        return answer(self._status.value, f"{self._status.name.lower()}\n")
