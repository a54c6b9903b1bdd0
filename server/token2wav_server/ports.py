"""The three ports of a server."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass, fields

from token2wav_server.errors import PortInUseError


@dataclass(frozen=True)
class Ports:
    """TCP ports of one server; the defaults are Triton's own."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls, host: str = "127.0.0.1") -> Ports:
        """Returns three ports that nobody listens on at this moment."""
        with ExitStack() as stack:
            sockets = [stack.enter_context(_bound(host, 0)) for _ in fields(cls)]
            return cls(*(bound.getsockname()[1] for bound in sockets))

    def check_free(self, host: str) -> None:
        """Checks that every port can be listened on.

        Raises:
            PortInUseError: naming the first port that cannot, or that is given twice.
        """
        with ExitStack() as stack:
            for field in fields(self):
                port = getattr(self, field.name)
                try:
                    stack.enter_context(_bound(host, port))
                except (OSError, OverflowError) as error:
                    raise PortInUseError(
                        f"{field.name} port {port} on {host} cannot be used ({reason_of(error)}): "
                        f"stop what listens there or choose another with --{field.name}-port"
                    ) from None


def family(host: str) -> socket.AddressFamily:
    """Of an address as it is written."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def reason_of(error: OSError | OverflowError) -> str:
    """Why a port could not be bound, in words."""
    return getattr(error, "strerror", None) or "must be between 1 and 65535"


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(family(host), socket.SOCK_STREAM)
    try:
        # A port that only lingers in TIME_WAIT is free for the server.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(1)  # with SO_REUSEADDR, only listening notices another listener
    except BaseException:
        bound.close()
        raise
    return bound
