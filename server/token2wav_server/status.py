"""Tells load balancers, over HTTP, whether new streams are welcome.

Triton's own readiness cannot: it stays while the server drains. The launcher knows that, and what the canary found.
"""

from __future__ import annotations

import threading
from enum import Enum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType

from token2wav_server.errors import PortInUseError
from token2wav_server.ports import family, reason_of

_PATIENCE_S = 5.0  # for a client that connects and says nothing


class Status(Enum):
    """What a server is up to, and the HTTP status that says so.

    HAProxy (`http-check disable-on-404`) takes 404 as what it means here: no new streams, but let the open ones go on.
    Anybody else takes it as a failure, which for a readiness probe is right as well.
    """

    STARTING = HTTPStatus.SERVICE_UNAVAILABLE
    READY = HTTPStatus.OK
    DRAINING = HTTPStatus.NOT_FOUND


class StatusPort:
    """Answers every GET with the status that was told last; use it as a context manager.

    Args:
        host: address to listen on.
        port: of TCP.

    Raises:
        PortInUseError: it cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        self._status = Status.STARTING
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _PATIENCE_S

            def do_GET(self) -> None:
                status = outer._status
                body = f"{status.name.lower()}\n".encode()
                self.send_response(status.value)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def version_string(self) -> str:
                return "token2wav"

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing: balancers ask every second."""

        class Server(ThreadingTCPServer):  # not HTTPServer, which asks DNS for its own name first
            address_family = family(host)
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Says nothing: clients that hang up are no errors."""

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise PortInUseError(
                f"status port {port} on {host} cannot be used ({reason_of(error)}): "
                "stop what listens there or choose another with --status-port"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)

    def tell(self, status: Status) -> None:
        """Has this answered from now on."""
        self._status = status

    def __enter__(self) -> StatusPort:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
