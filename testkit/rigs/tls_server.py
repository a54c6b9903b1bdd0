"""Server that requires certificates of its clients, and calls that clients do not need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from testkit.models.golden import TINY
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.certificates import Authority
from testkit.rigs.serve_command import Serving
from token2wav_client import Client, Tls
from token2wav_server.launcher.ports import Ports

ADDRESS, NAME = "127.0.0.2", "token2wav.test"
RESTRICTED = "This protocol is restricted"
UNLOAD = service_pb2.RepositoryModelUnloadRequest(model_name="token2wav")
REGISTER = service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/b")
# Calls that clients do not need, each with the reason why the admin key does not open it.
CLOSED: list[tuple[str, Any, str]] = [
    ("TraceSetting", service_pb2.TraceSettingRequest(), ""),
    ("LogSettings", service_pb2.LogSettingsRequest(), ""),
    ("RepositoryIndex", service_pb2.RepositoryIndexRequest(), ""),
    ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest(), RESTRICTED),
    ("CudaSharedMemoryStatus", service_pb2.CudaSharedMemoryStatusRequest(), RESTRICTED),
    ("SystemSharedMemoryRegister", REGISTER, RESTRICTED),
    ("RepositoryModelUnload", UNLOAD, "explicit model load / unload is not allowed"),
]


def tls_options(authority: Authority) -> list[str]:
    """Returns options of a server with TLS."""
    return [
        f"--tls-certificate={authority.certificate(NAME)}",
        f"--tls-key={authority.key(NAME)}",
        "--canary-seconds=0",
    ]


@contextmanager
def mutual_server(authority: Authority, admin_key: Path, folder: Path) -> Iterator[Serving]:
    """Starts a server of the tiny model that requires certificates. It is not ready yet."""
    settings = folder / "server.yaml"
    settings.write_text("stream: {first_tokens: 0}\nlimits: {streams_per_client: 2}\n")
    options = [
        *tls_options(authority),
        f"--config={settings}",
        f"--tls-client-ca={authority.ca}",
        f"--admin-key-file={admin_key}",
        "--verbose",
    ]
    ports, status_port = Ports.free(ADDRESS), Ports.free(ADDRESS).http
    with Serving.replica(TINY, ADDRESS, ports, status_port, *options) as server:
        yield server


def mutual(authority: Authority, **other: Path | str) -> Tls:
    settings: dict[str, Any] = {
        "ca": authority.ca,
        "cert": authority.certificate("client"),
        "key": authority.key("client"),
        "server_name": NAME,
    }
    return Tls(**(settings | other))


def speaks(url: str, **how: Any) -> bool:
    with Client(url, **how) as client:
        return client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None


def channel(url: str, name: str, *files: Path) -> Any:
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
    return grpc.secure_channel(url, credentials, options=[("grpc.ssl_target_name_override", name)])


def admin(key: Path) -> tuple[tuple[str, str], ...]:
    return (("triton-grpc-protocol-admin-key", key.read_text().strip()),)
