"""TCP ports of a server: they are checked, found free, and reserved."""

from __future__ import annotations

import http.client
import socket
from contextlib import ExitStack
from dataclasses import dataclass, fields

from token2wav_server.launcher.errors import PortInUseError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """TCP ports of one server; the defaults are Triton's own."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls, host: str = LOOPBACK) -> Ports:
        """Returns three ports that nobody listens on at this moment."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(reserved(host)) for _ in fields(cls)]
            return cls(*(bound.getsockname()[1] for bound in sockets))

    def check_free(self, host: str) -> None:
        """Checks that every port can be listened on.

        Raises:
            PortInUseError: naming the first port that cannot, or that is given twice.
        """
        with ExitStack() as stack:
            for field in fields(self):
                stack.enter_context(listening(host, getattr(self, field.name), field.name))


def listening(host: str, port: int, service: str) -> socket.socket:
    """Opens a socket that listens.

    Args:
        service: name of the service in errors, and in the option that sets the port.

    Raises:
        PortInUseError: the port is taken, or is none.
    """
    bound = None
    try:
        bound = _bound(host, port)
        bound.listen()  # with SO_REUSEADDR, only listening notices another listener
    except (OSError, OverflowError) as error:
        if bound is not None:
            bound.close()
        reason = getattr(error, "strerror", None) or "must be between 1 and 65535"
        raise PortInUseError(
            f"{service} port {port} on {host} cannot be used ({reason}): "
            f"stop what listens there or choose another with --{service}-port"
        ) from None
    return bound


def reserved(host: str) -> socket.socket:
    """Opens a socket that keeps a free port for a process that will listen there: nobody else is given it meanwhile."""
    return _bound(host, 0)


def fetched(port: int, path: str) -> bytes | None:
    """Fetches what tritonserver answers on a port of the loopback, past any proxy; None if it is no success."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=2)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # A port that only lingers in TIME_WAIT is free for the server.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
