"""Command `token2wav gateway` in a process that can be asked for the number of its tasks."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from token2wav_gateway import cli
from token2wav_server import Ports

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ObservedGateway:
    """Running gateway.

    Attributes:
        ports: its ports; Riva's interface has the one for gRPC.
        log: file with its log.
    """

    process: subprocess.Popen[str]
    ports: Ports
    log: Path

    @classmethod
    @contextmanager
    def start(
        cls, settings: dict[str, Any], folder: Path, descriptors: int
    ) -> Iterator[ObservedGateway]:
        """Starts a gateway, and does not wait until it is ready.

        Args:
            folder: folder for its settings and its log.
            descriptors: its limit of descriptors.
        """
        config, log, ports = folder / "gateway.yaml", folder / "gateway.log", Ports.free()
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", __name__, "--config", str(config)]
        command += ["--port", str(ports.http), "--metrics-port", str(ports.metrics)]
        command += ["--riva-port", str(ports.grpc)]
        with log.open("w") as sink:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=sink, text=True
            )
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))
        try:
            yield cls(process, ports, log)
        finally:
            process.kill()
            process.communicate()

    @property
    def metrics_url(self) -> str:
        return f"127.0.0.1:{self.ports.metrics}"

    def tasks(self) -> int:
        """Returns the number of tasks of its event loop."""
        self.process.send_signal(signal.SIGUSR1)
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


def main() -> int:
    # Python calls the function in the main thread, which runs the event loop.
    signal.signal(signal.SIGUSR1, lambda *_: print(len(asyncio.all_tasks()), flush=True))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
