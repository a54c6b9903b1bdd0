"""TCP ports of a server: they are checked, found free, reserved, and asked."""

from __future__ import annotations

import http.client
import socket
from contextlib import ExitStack, closing, suppress
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
        """Raises PortInUseError that names the first port that cannot be listened on, or that is
        given twice.
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
    family = _family(host)
    try:
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except (OSError, OverflowError, ValueError) as error:  # the last: there is no IPv6
        # Without what follows in brackets, which is host and port again.
        reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (")[0]
        reason = "must be between 1 and 65535" if isinstance(error, OverflowError) else reason
        raise PortInUseError(
            f"{service} port {port} on {host} cannot be used ({reason}): "
            f"stop what listens there or choose another with --{service}-port"
        ) from None


def reserved(host: str) -> socket.socket:
    """Opens a socket that keeps a free port for a process that will listen there: nobody else is
    given it meanwhile.
    """
    bound = socket.socket(_family(host))
    # else that process could not bind it too
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, 0))
    return bound


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def fetched(port: int, path: str) -> bytes | None:
    """Fetches what tritonserver answers on a port of the loopback, past any proxy; None if it is no
    success.
    """
    with (
        suppress(OSError, http.client.HTTPException),
        closing(http.client.HTTPConnection(LOOPBACK, port, timeout=2)) as connection,
    ):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    return None
