"""Tritonserver with a front of the engine, without the launcher, for `FakeEngine`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from token2wav_server.front.build import LIBRARY
from token2wav_server.launcher.binaries import find_tritonserver
from token2wav_server.launcher.ports import Ports, fetched

_CONFIG = """
backend: "{backend}"
max_batch_size: 0
input [
  {{ name: "tokens" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "prompt_mel" data_type: TYPE_FP32 dims: [ -1, 80 ] optional: true }},
  {{ name: "voice_id" data_type: TYPE_UINT8 dims: [ -1 ] optional: true }},
  {{ name: "codes" data_type: TYPE_INT32 dims: [ -1, -1 ] optional: true }}
]
output [
  {{ name: "audio" data_type: TYPE_FP32 dims: [ -1 ] }},
  {{ name: "chunk_index" data_type: TYPE_INT32 dims: [ 1 ] }},
  {{ name: "final" data_type: TYPE_BOOL dims: [ 1 ] }}
]
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
"""


@dataclass
class Server:
    """A tritonserver with a front.

    Attributes:
        folder: has the socket of the engine, and the log.
    """

    folder: Path
    ports: Ports
    process: subprocess.Popen[bytes]

    @property
    def engine_path(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.ports.grpc}"

    @property
    def log(self) -> str:
        return (self.folder / "triton.log").read_text(errors="replace")

    @property
    def ready(self) -> bool:
        return fetched(self.ports.http, "/v2/health/ready") is not None


@contextmanager
def tritonserver(front: Path, *, instances: int = 1, engine: bool = True) -> Iterator[Server]:
    """Starts tritonserver. It is not ready before there is an engine.

    Args:
        front: library of the native front, or program of the Python front.
    """
    # The path of a socket has at most 107 bytes, and pytest's folders have long names.
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    version = folder / "repository" / "token2wav" / "1"
    version.mkdir(parents=True)
    is_python = front.suffix == ".py"
    shutil.copy(front, version / ("model.py" if is_python else LIBRARY))
    backend = "python" if is_python else "token2wav"
    (version.parent / "config.pbtxt").write_text(
        _CONFIG.format(instances=instances, backend=backend)
    )
    triton = find_tritonserver(folder, python_models=is_python)
    ports = Ports.free()
    arguments = {
        "model-repository": version.parent.parent,
        "backend-directory": triton.backends,
        "http-address": "127.0.0.1",
        "http-port": ports.http,
        "grpc-address": "127.0.0.1",
        "grpc-port": ports.grpc,
        "allow-metrics": "false",
        "exit-timeout-secs": 10,
    }
    environment = dict(triton.environment)
    if engine:
        environment["TOKEN2WAV_ENGINE"] = str(folder / "engine.sock")
    with (folder / "triton.log").open("wb") as log:
        process = subprocess.Popen(
            [
                triton.executable,
                "--disable-auto-complete-config",
                *(f"--{name}={value}" for name, value in arguments.items()),
            ],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Server(folder, ports, process)
    finally:
        # The stub of the Python front may outlive a tritonserver that is killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder)
