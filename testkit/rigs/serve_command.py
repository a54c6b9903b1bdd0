"""The command `token2wav serve` as an operator runs it, and streams at a language model's pace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.metrics import scrape
from testkit.rigs.processes import Program, children, finished, program, suspend
from testkit.rigs.settings import FRONT
from testkit.rigs.traces import Traces
from token2wav_client import Client, ClientError, ClientVoice
from token2wav_server.launcher import reaper
from token2wav_server.launcher.ports import Ports

TOKENS_PER_SECOND = 25
# Settings of servers under test, with the front that TEST_FRONT names (auto or python).
WHOLE_BLOCKS = Path(__file__).parent / f"whole_blocks_{FRONT}.yaml"
_CONFIG = f"--config={WHOLE_BLOCKS}"  # further arguments may replace it


@dataclass
class Serving(Program):
    """A running command.

    Attributes:
        status_port: port that tells a balancer whether the server accepts streams, 0 for none.
    """

    ports: Ports
    address: str = "127.0.0.1"
    status_port: int = 0

    @classmethod
    @contextmanager
    def start(
        cls,
        model: Path,
        *arguments: str,
        inside: Sequence[str] = (),
    ) -> Iterator[Serving]:
        """Runs the command, and reads its stderr together with its stdout.

        Args:
            inside: outer command that runs this command, such as a container.
        """
        ports = Ports.free()
        words = [*inside, *command(model, ports), _CONFIG, *arguments]
        with cls.run(words, ports) as serving:
            yield serving

    @classmethod
    @contextmanager
    def ready(cls, model: Path, *arguments: str, inside: Sequence[str] = ()) -> Iterator[Serving]:
        """Runs the command, and waits until its server is ready."""
        with cls.start(model, *arguments, inside=inside) as serving:
            serving.wait_for_line("token2wav: ready, ")
            yield serving

    @classmethod
    @contextmanager
    def replica(
        cls, model: Path, address: str, ports: Ports, status_port: int, *arguments: str
    ) -> Iterator[Serving]:
        """Runs the command with given ports on an address, as in a container."""
        options = [f"--host={address}", f"--status-port={status_port}", *arguments]
        words = [*command(model, ports), _CONFIG, *options]
        with cls.run(words, ports, address, status_port) as serving:
            try:
                yield serving
            finally:
                serving.process.terminate()
                try:
                    serving.wait()
                except subprocess.TimeoutExpired as error:
                    raise AssertionError("\n".join(serving.printed)) from error

    @property
    def url(self) -> str:
        return f"{self.address}:{self.ports.grpc}"

    @property
    def traces(self) -> Traces:
        """Returns the traces of the running server: reaper, tritonserver, fronts and engine."""
        [server] = [
            process
            for child in children(self.process.pid)
            for process in children(child)
            if program(process) == "tritonserver"
        ]
        return Traces.of(server)

    def health(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return health(self.url, *arguments)

    @property
    def metrics_url(self) -> str:
        return f"{self.address}:{self.ports.metrics}"

    def open_streams(self) -> int:
        """Returns the number of open utterances."""
        return int(scrape(self.metrics_url)['token2wav_open_streams{owner="scheduler"}'])

    def kill(self) -> None:
        """Kills every process at once, as when a machine goes down, and removes its leftovers."""
        traces = self.traces
        processes = [self.process.pid, *traces.processes]
        for process in processes:
            suspend(process)  # so that none reacts to a death
        for process in processes:
            os.kill(process, signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        until(lambda: not any(left.startswith("process ") for left in traces.remaining()))
        reaper.remove_leftovers(traces.folders[0], traces.shm_prefix)


class Speaker(threading.Thread):
    """Stream that pushes its tokens one by one at their pace, and keeps the result.

    Attributes:
        audio: audio of a stream that has ended normally.
        error: error of a stream that has failed.
        ended_at: time of the end on the monotonic clock.
        heard: set with the first chunk.
        may_end: must be set before the last token is sent, unless the stream ends by itself.
    """

    def __init__(
        self,
        url: str,
        voice: ClientVoice,
        tokens: NDArray[np.int32],
        *,
        at_once: int = 60,
        ends: bool = True,
    ) -> None:
        super().__init__(daemon=True)
        self.audio: NDArray[Any] | None = None
        self.error: ClientError | None = None
        self.ended_at = 0.0
        self.heard, self.may_end = threading.Event(), threading.Event()
        if ends:
            self.may_end.set()
        self._url, self._voice = url, voice
        self._portions = [tokens[:at_once], *np.split(tokens[at_once:], len(tokens) - at_once)]

    def run(self) -> None:
        chunks = []
        try:
            with Client(self._url) as client:
                for chunk in client.synthesize(self._paced(), self._voice):
                    chunks.append(chunk.audio)
                    self.heard.set()
            self.audio = np.concatenate(chunks)
        except ClientError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def _paced(self) -> Iterator[NDArray[np.int32]]:
        *portions, last = self._portions
        for portion in portions:
            yield portion
            time.sleep(1 / TOKENS_PER_SECOND)
        self.may_end.wait()
        yield last


def speak(
    url: str, voice: ClientVoice, tokens: NDArray[np.int32], streams: int, *, ends: bool = True
) -> list[Speaker]:
    """Starts several streams, and returns when each has received its first audio."""
    speakers = [Speaker(url, voice, tokens, ends=ends) for _ in range(streams)]
    for speaker in speakers:
        speaker.start()
    for speaker in speakers:
        assert speaker.heard.wait(PATIENCE_SECONDS), speaker.error
    return speakers


def command(model: Path, ports: Ports) -> list[str]:
    program = Path(sys.executable).with_name("token2wav")
    numbers = [f"--{name}-port={port}" for name, port in vars(ports).items()]
    return [str(program), "serve", str(model), *numbers]


def synth(url: str, *options: str) -> list[str]:
    """Returns the client's command that speaks an utterance."""
    return [sys.executable, "-m", "token2wav", "synth", f"--url={url}", *options]


def health(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "token2wav", "health", f"--url={url}"]
    return finished(*program, "--connect-timeout=60", "--timeout=60", *arguments)
