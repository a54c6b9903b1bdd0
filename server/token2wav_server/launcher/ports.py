"""TCP ports of a server: functions that check, find, reserve and query ports."""

from __future__ import annotations

import argparse
import http.client
import socket
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields

from token2wav.config.values import number
from token2wav.errors import ConfigError
from token2wav_server.launcher.errors import PortInUseError

LOOPBACK = "127.0.0.1"
_PAUSE_S = 2.0  # longest pause in the response of a server on this machine
PORT = number(int, 1, 65535, "a port, which is a number")  # converter for argparse


@dataclass(frozen=True)
class Ports:
    """TCP ports of one server; the defaults are Triton's own."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    @classmethod
    def free(cls, host: str = LOOPBACK) -> Ports:
        """Returns three ports that no process uses at this moment."""
        return cls(*free_ports(len(fields(cls)), host))

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds options for the host and the three ports to the parser of a command."""
        parser.add_argument(
            "--host", default=LOOPBACK, help="address to listen on (default: %(default)s)"
        )
        for field in fields(cls):
            parser.add_argument(
                f"--{field.name}-port",
                type=PORT,
                default=field.default,
                metavar="PORT",
                help="default: %(default)s",
            )

    @classmethod
    def of(cls, options: argparse.Namespace) -> Ports:
        """Returns the ports of a command line with the options of `add_options`."""
        return cls(options.http_port, options.grpc_port, options.metrics_port)

    def check_free(self, host: str) -> None:
        """Checks that every port can be listened on.

        Raises:
            PortInUseError: a port is taken, invalid or given twice. The message names the first
                such port.
        """
        with ExitStack() as stack:
            for field in fields(self):
                stack.enter_context(listening(host, getattr(self, field.name), field.name))


def listening(host: str, port: int, service: str, option: str = "") -> socket.socket:
    """Opens a socket that listens on a port.

    Args:
        option: option that sets the port; by default `--SERVICE-port`.

    Raises:
        PortInUseError: the port is taken, or the number is not a valid port.
    """
    family = _family(host)
    try:
        return socket.create_server(
            (host, port), family=family, dualstack_ipv6=family == socket.AF_INET6
        )
    except (OSError, OverflowError, ValueError) as error:  # ValueError: no IPv6
        # Python appends host and port in brackets to the reason. They are removed, because the
        # message below names them.
        reason = str(error.strerror if isinstance(error, OSError) else error).partition(" (")[0]
        reason = "must be between 1 and 65535" if isinstance(error, OverflowError) else reason
        raise PortInUseError(
            f"{service} port {port} on {host} cannot be used ({reason}): stop the program "
            f"that uses the port, or choose another with {option or f'--{service}-port'}"
        ) from None


def free_ports(count: int, host: str = LOOPBACK) -> list[int]:
    """Returns different ports that no process uses at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(reserved(host)) for _ in range(count)]
        return [reservation.getsockname()[1] for reservation in sockets]


def check_host(host: str) -> None:
    """Checks the value of an option `--host`.

    Raises:
        ConfigError: this machine cannot listen on the host.
    """
    if not host:
        raise ConfigError(
            "--host: empty; use 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
        )
    try:
        reserved(host).close()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a valid host name"
        raise ConfigError(
            f"--host {host}: not an address that this machine can listen on "
            f"({reason}); use 127.0.0.1, or 0.0.0.0 for all addresses of this machine"
        ) from error


def reserved(host: str) -> socket.socket:
    """Opens a socket that reserves a free port for a process that will listen on it.

    While the socket is open, the kernel does not give the port to another process that asks for a
    free port.
    """
    reservation = socket.socket(_family(host))
    # Without this option the process could not bind the port while this socket is open.
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind((host, 0))
    return reservation


def client_host(host: str) -> str:
    """Returns the address of a server that listens on `host`, for clients on this machine."""
    return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)


def bracketed(host: str) -> str:
    """Returns a host as it stands before a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def fetched(port: int, path: str, host: str = LOOPBACK) -> bytes | None:
    """Fetches a path from a server on this machine, without a proxy.

    Returns:
        The body of the response; None if the request fails or its status is not 200.
    """
    with (
        suppress(OSError, http.client.HTTPException),
        closing(http.client.HTTPConnection(host, port, timeout=_PAUSE_S)) as connection,
    ):
        connection.request("GET", path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    return None
