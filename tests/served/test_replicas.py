"""Two servers behind the balancer: effects on streams when one is killed, returns or is drained."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS, until
from testkit.rigs.balancer import Balancer, needs_haproxy
from testkit.rigs.serve_command import Serving, Speaker, speak, synth
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice, ServerUnavailable
from token2wav_client.voice import FIELDS
from token2wav_server.launcher.ports import Ports

ADDRESSES = ("127.0.0.2", "127.0.0.3")
STREAMS = 6
NOTICE_SECONDS = 5


@dataclass
class Fleet:
    """Servings by address, and their balancer."""

    balancer: Balancer
    ports: Ports
    status_port: int
    replicas: dict[str, Serving] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator[Fleet]:
        needs_haproxy()
        ports, status_ports = Ports.free(ADDRESSES[0]), Ports.free(ADDRESSES[0])
        with (
            Balancer.start(
                folder, ADDRESSES, grpc_port=ports.grpc, status_port=status_ports.http
            ) as balancer,
            ExitStack() as stack,
        ):
            yield cls(balancer, ports, status_ports.http, _stack=stack)

    def complete(self) -> None:
        """Starts the missing replicas, and waits until the balancer sends streams to them."""
        missing = [address for address in ADDRESSES if address not in self.replicas]
        for address in missing:
            replica = Serving.replica(
                TINY,
                address,
                self.ports,
                self.status_port,
                "--canary-seconds=0",
                f"--notice-seconds={NOTICE_SECONDS}",
            )
            self.replicas[address] = self._stack.enter_context(replica)
        for address in missing:
            self.replicas[address].wait_for_line("token2wav: ready, ")
        self.balancer.wait_for("UP", "UP")

    def open_streams(self) -> dict[str, int]:
        return {address: replica.open_streams() for address, replica in self.replicas.items()}

    def wait_for_streams(self, total: int) -> dict[str, int]:
        until(lambda: sum(self.open_streams().values()) == total)
        return self.open_streams()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet.start(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def tokens(golden: GoldenSet) -> NDArray[np.int32]:
    return np.tile(golden.tokens, 3)[:200]  # 6 seconds at the pace of the speakers


@pytest.fixture(scope="module")
def expected(model: Token2Wav, golden: GoldenSet, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    return model.synthesize(tokens, golden.voice)


def test_a_killed_replica_costs_only_its_own_streams(
    fleet: Fleet,
    voice: ClientVoice,
    tokens: NDArray[np.int32],
    expected: NDArray[np.float32],
    tmp_path: Path,
) -> None:
    fleet.complete()
    with retrying_client(fleet.balancer.url, voice, tokens, tmp_path) as client:
        victim = max(streams := fleet.wait_for_streams(1), key=lambda address: streams[address])
        speakers = speak(fleet.balancer.url, voice, tokens, STREAMS)
        streams = fleet.wait_for_streams(STREAMS + 1)
        assert abs(streams[ADDRESSES[0]] - streams[ADDRESSES[1]]) <= 1, streams
        killed = streams[victim] - 1
        fleet.replicas.pop(victim).kill()

        for _ in range(4):  # new streams, at once
            with Client(fleet.balancer.url) as new_client:
                assert new_client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
        for speaker in speakers:
            speaker.join()
        lost = [speaker.error for speaker in speakers if speaker.error is not None]
        assert len(lost) == killed
        for error in lost:
            assert isinstance(error, ServerUnavailable)
            assert str(error).startswith(
                f"no server at {fleet.balancer.url}, or the connection was lost ("
            )
        all_heard(speakers, STREAMS - killed, expected)

        errors = client.communicate(timeout=PATIENCE_SECONDS)[1]
        assert client.returncode == 0, errors
        assert "retry 1 of 5" in errors
        heard, _ = soundfile.read(tmp_path / "out.wav", dtype="float32")
        assert np.abs(heard - expected).max() <= SERVER_EQUALS_LIBRARY
    fleet.balancer.wait_for("DOWN", "UP")


def test_a_drained_replica_loses_nothing(
    fleet: Fleet, voice: ClientVoice, tokens: NDArray[np.int32], expected: NDArray[np.float32]
) -> None:
    fleet.complete()  # after the test above: a replica that returns is used again
    speakers = speak(fleet.balancer.url, voice, tokens, STREAMS)
    streams = fleet.wait_for_streams(STREAMS)
    assert set(streams.values()) == {STREAMS // 2}
    leaving = fleet.replicas.pop(ADDRESSES[1])
    leaving.process.send_signal(signal.SIGTERM)
    new = 0
    while leaving.process.poll() is None:  # without retries, so none may fail
        with Client(fleet.balancer.url) as client:
            assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
        new += 1
        time.sleep(0.2)
    assert new > 1
    assert leaving.process.returncode == 0
    for speaker in speakers:
        speaker.join()
    all_heard(speakers, STREAMS, expected)
    assert "NOLB" in fleet.balancer.log.read_text() or "stopping" in fleet.balancer.log.read_text()


def all_heard(speakers: list[Speaker], count: int, expected: NDArray[np.float32]) -> None:
    audios = [speaker.audio for speaker in speakers if speaker.audio is not None]
    assert len(audios) == count, [speaker.error for speaker in speakers]
    for audio in audios:
        assert np.abs(audio - expected).max() <= SERVER_EQUALS_LIBRARY


@contextmanager
def retrying_client(
    url: str, voice: ClientVoice, tokens: NDArray[np.int32], folder: Path
) -> Iterator[subprocess.Popen[str]]:
    """Runs the client command at the pace of a language model."""
    np.save(folder / "tokens.npy", tokens)
    np.savez(folder / "voice.npz", **{name: getattr(voice, name) for name in FIELDS})
    names = {"tokens": "tokens.npy", "voice": "voice.npz", "out": "out.wav"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    options += ["--retry=5", "--rate=25", "--audio-format=float32", "--quiet"]
    with subprocess.Popen(synth(url, *options), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
