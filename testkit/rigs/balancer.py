"""Real HAProxy with the shipped configuration, and a name server with the replicas' addresses."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from testkit.patience import PATIENCE_SECONDS
from token2wav_server.launcher.ports import Ports

CONFIGURATION = Path(__file__).resolve().parents[2] / "docker" / "balancer" / "haproxy.cfg"
NAME = "replicas.test"
_TYPE_A, _CLASS_INTERNET = 1, 1


def needs_haproxy() -> str:
    """Returns the path of haproxy, or skips the test."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("haproxy is not installed: apt-get install haproxy")
    return program


class NameServer:
    """Answers every question with the same IPv4 addresses, as Docker and Kubernetes do for replicas
    of a service.

    Args:
        addresses: addresses of the answers. A list may change meanwhile.
        bind: host and port to listen on.
    """

    def __init__(self, addresses: Sequence[str], bind: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(bind)
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()
        return f"{host}:{port}"

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._socket.recvfrom(512)
            except OSError:
                return
            self._socket.sendto(self._answer(query), sender)

    def _answer(self, query: bytes) -> bytes:
        # The only question has a name that ends with an empty label, a type and a class.
        end = query.index(0, 12) + 5
        question = query[12:end]
        addresses = self._addresses if struct.unpack("!H", question[-4:-2]) == (_TYPE_A,) else []
        header = query[:2] + struct.pack("!HHHHH", 0x8580, 1, len(addresses), 0, 0)
        records = [
            struct.pack("!HHHIH", 0xC00C, _TYPE_A, _CLASS_INTERNET, 1, 4)
            + socket.inet_aton(address)
            for address in addresses
        ]
        return header + question + b"".join(records)


@dataclass(frozen=True)
class Balancer:
    """Running HAProxy.

    Attributes:
        url: address for clients.
        status_url: address of its own metrics.
        log: its output.
    """

    url: str
    status_url: str
    log: Path

    @classmethod
    @contextmanager
    def start(
        cls,
        folder: Path,
        addresses: Sequence[str],
        *,
        grpc_port: int,
        status_port: int,
        **settings: str,
    ) -> Iterator[Balancer]:
        """Starts the balancer for replicas at these addresses, which listen on the same ports."""
        ports = Ports.free()
        names = NameServer(addresses)
        environment = os.environ | {
            "TOKEN2WAV_BIND": f"127.0.0.1:{ports.grpc}",
            "TOKEN2WAV_STATUS_BIND": f"127.0.0.1:{ports.http}",
            "TOKEN2WAV_REPLICAS": NAME,
            "TOKEN2WAV_GRPC_PORT": str(grpc_port),
            "TOKEN2WAV_STATUS_PORT": str(status_port),
            "TOKEN2WAV_DNS": names.url,
            **settings,
        }
        log = folder / "haproxy.log"
        command = [needs_haproxy(), "-db", "-f", str(CONFIGURATION)]
        with (
            log.open("w") as sink,
            subprocess.Popen(
                command, env=environment, stdout=sink, stderr=subprocess.STDOUT
            ) as process,
        ):
            try:
                yield cls(f"127.0.0.1:{ports.grpc}", f"http://127.0.0.1:{ports.http}", log)
            finally:
                process.kill()
                names.close()

    def states(self) -> dict[str, str]:
        """State of every replica that the balancer knows, by name: UP, DOWN, DRAIN, ..."""
        states = {}
        for line in self._get("/metrics").splitlines():
            if line.startswith("haproxy_server_status{") and line.endswith(" 1"):
                labels = dict(
                    label.split("=")
                    for label in line[line.index("{") + 1 : line.index("}")].split(",")
                )
                states[labels["server"].strip('"')] = labels["state"].strip('"')
        return {server: state for server, state in states.items() if state != "MAINT"}

    def wait_for(self, *states: str) -> None:
        """Waits until its replicas are in these states, in any order."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                replica_states = sorted(self.states().values())
            except OSError:
                replica_states = []
            if replica_states == sorted(states):
                return
            assert time.monotonic() < deadline, (
                f"{replica_states}, not {sorted(states)}; {self.log.read_text()[-2000:]}"
            )
            time.sleep(0.05)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(
            f"{self.status_url}{path}", timeout=PATIENCE_SECONDS
        ) as response:
            return response.read().decode()
