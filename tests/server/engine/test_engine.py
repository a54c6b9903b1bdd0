"""Engine of a tiny model behind its socket; the test itself is the front."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.door import Refusals
from testkit.models.tiny_model import FaultyVocoder, demo_tokens
from testkit.patience import PATIENCE_SECONDS, until
from testkit.replies import Expected
from token2wav import Token2Wav, Voice
from token2wav.cache.block_pool import OutOfBlocksError
from token2wav.config import LimitConfig, ServerConfig
from token2wav.errors import (
    BackendError,
    DeviceLostError,
    ExpiredError,
    IdleError,
    InputError,
    LimitError,
    StreamClosedError,
    Token2WavError,
)
from token2wav.serving.door.service import Service
from token2wav.voice import FIELDS
from token2wav_server.engine import frames
from token2wav_server.engine.connection import Connection
from token2wav_server.engine.engine import CONNECTED, Engine
from token2wav_server.engine.frames import FailedFrame, RequestFrame
from token2wav_server.replies import status_of

START, END = 1, 2


class Front:
    """Front of an engine. It collects the frames of each slot until the slot ends."""

    def __init__(self, path: Path) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        connected.settimeout(PATIENCE_SECONDS)
        self.socket = connected
        self.connection = Connection(connected)
        self._frames = self.connection.frames()
        assert frames.parse_ready(next(self._frames)) == frames.VERSION
        self.audio: dict[int, list[dict[str, Any]]] = {}
        self.ends: dict[int, FailedFrame | None] = {}
        self._slots = 0

    def send(
        self,
        tokens: Any,
        voice: Voice | None = None,
        sequence_id: int | str = 0,
        flags: int = 0,
        parameters: str = "",
    ) -> int:
        """Sends a request, and returns its slot."""
        self._slots += 1
        inputs = {} if tokens is None else {"tokens": np.asarray(tokens, np.int32)}
        if voice is not None:
            inputs |= {name: getattr(voice, name) for name in FIELDS}
        request = RequestFrame(self._slots, flags, sequence_id, parameters, inputs)
        self.connection.send(frames.request_frame(request))
        return self._slots

    def end_of(self, slot: int) -> FailedFrame | None:
        """Reads until a slot has ended, and returns its error."""
        while slot not in self.ends:
            self._take(next(self._frames))
        return self.ends[slot]

    def samples(self, slot: int) -> Any:
        assert self.end_of(slot) is None
        return np.concatenate([outputs["audio"] for outputs in self.audio.get(slot, [])])

    def has_ended(self) -> bool:
        """Reads until the engine closes the connection."""
        for frame in self._frames:
            self._take(frame)
        return True

    def close(self) -> None:
        self.connection.close()

    def _take(self, frame: bytearray) -> None:
        kind = frame[0]
        if kind == frames.AUDIO:
            slot, outputs = frames.parse_audio(frame)
            assert slot not in self.ends, "audio after the end"
            self.audio.setdefault(slot, []).append(outputs)
            return
        ended: dict[int, FailedFrame | None] = {}
        if kind == frames.FAILED:
            failed = frames.parse_failed(frame)
            ended = {failed.slot: failed}
        else:
            assert kind == frames.FINISHED
            ended = {frames.parse_slot(frame): None}
        assert not ended.keys() & self.ends.keys(), "a second end"
        self.ends |= ended


@pytest.fixture
def service(faulty: tuple[Token2Wav, FaultyVocoder]) -> Iterator[Service]:
    model = faulty[0]
    config = ServerConfig(limits=LimitConfig(streams=64))
    service = Service(model.pipeline, model.summary, config, Refusals())
    yield service
    service.close()


@pytest.fixture
def path(service: Service, tmp_path: Path) -> Path:
    path = tmp_path / "engine.sock"
    threading.Thread(target=Engine(service, path).serve, daemon=True).start()
    return path


@pytest.fixture
def front(path: Path) -> Iterator[Front]:
    front = Front(path)
    yield front
    front.close()


def open_requests(service: Service) -> int:
    return service._utterances.open_utterances


def test_the_audio_is_that_of_the_library(front: Front, voice: Voice, expected: Expected) -> None:
    slot = front.send(demo_tokens(4), voice)
    assert (front.samples(slot) == expected(4)).all()
    outputs = front.audio[slot][-1]
    assert {name: array.dtype.name for name, array in outputs.items()} == {
        "audio": "float32",
        "chunk_index": "int32",
        "final": "bool",
        "sample_rate": "int32",
        "samples_per_token": "int32",
        "samples_trimmed": "int32",
        "first_token": "int32",
        "token_count": "int32",
        "end_reason": "int32",
    }
    assert outputs["final"].tolist() == [True]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("tokens", "none"), "INVALID_ARG"),
        (StreamClosedError("stream: gone"), "NOT_FOUND"),
        (IdleError("stream: idle"), "NOT_FOUND"),
        (ExpiredError("stream: old"), "NOT_FOUND"),
        (LimitError("streams: full"), "UNAVAILABLE"),
        (OutOfBlocksError("cache: full"), "UNAVAILABLE"),
        (BackendError("backend: broken"), "INTERNAL"),
        (DeviceLostError("backend: lost"), "INTERNAL"),
        (Token2WavError("something"), "INTERNAL"),
    ],
)
def test_status_of_an_error_holds_for_its_subclasses(error: Token2WavError, status: str) -> None:
    assert status_of(error) == status


def test_an_error_refuses_its_request_alone(front: Front, voice: Voice, expected: Expected) -> None:
    refused = front.send(None)
    bad_json = front.send(demo_tokens(4), voice, parameters='{"steps": ')
    sound = front.send(demo_tokens(4), voice)
    assert front.end_of(refused) == FailedFrame(
        refused,
        3,
        "prompt_tokens: missing; the first request of an utterance needs it, or a voice_id",
    )
    assert (failed := front.end_of(bad_json)) is not None
    assert failed.text.startswith("backend: JSONDecodeError")
    assert (front.samples(sound) == expected(4)).all()


def test_a_cancelled_utterance_is_freed(front: Front, service: Service, voice: Voice) -> None:
    slot = front.send([], voice, 7, START, '{"keep_open": true}')
    until(lambda: open_requests(service) == 1)
    front.connection.send(frames.cancelled_frame(slot + 1))  # a slot that is not open
    front.connection.send(frames.cancelled_frame(slot))
    assert front.end_of(slot) == FailedFrame(slot, 2, "stream: it was cancelled")
    assert open_requests(service) == 0


def test_utterances_end_with_their_front(
    front: Front, path: Path, service: Service, voice: Voice, expected: Expected
) -> None:
    """Also an utterance without an open request, of which no client is known to listen."""
    assert path.with_name(path.name + CONNECTED).exists()
    front.end_of(front.send(demo_tokens(4), voice, 7, START))
    front.send([], voice, 8, START, '{"keep_open": true}')
    until(lambda: open_requests(service) == 2)
    front.close()
    until(lambda: open_requests(service) == 0)
    until(lambda: not path.with_name(path.name + CONNECTED).exists())
    other = Front(path)
    samples = other.samples(other.send(demo_tokens(4), voice))
    gone = other.end_of(other.send([], None, 7, END))
    other.close()
    assert (samples == expected(4)).all()
    assert gone is not None
    assert "cancelled" in gone.text


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<IBQ", 9, 99, 1),  # an unknown kind
        struct.pack("<IBB", 2, frames.REQUEST, 1),
        np.random.default_rng(0).bytes(4096),
    ],
)
def test_a_front_that_sends_anything_else_is_disconnected(
    front: Front, path: Path, service: Service, voice: Voice, expected: Expected, data: bytes
) -> None:
    front.end_of(front.send(demo_tokens(4), voice, 7, START))
    front.socket.sendall(data)
    assert front.has_ended()
    until(lambda: open_requests(service) == 0)
    other = Front(path)
    assert (other.samples(other.send(demo_tokens(4), voice)) == expected(4)).all()
    other.close()


def test_a_front_that_does_not_read_is_disconnected(
    front: Front, path: Path, service: Service, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("token2wav_server.engine.engine.MOST_UNSENT", 1 << 18)
    slots = [front.send(demo_tokens(25), voice) for _ in range(30)]
    until(lambda: not path.with_name(path.name + CONNECTED).exists())
    assert front.has_ended()
    assert len(front.ends) < len(slots)
    other = Front(path)
    assert len(other.samples(other.send(demo_tokens(4), voice)))
    other.close()


def test_all_replies_are_over_when_the_service_has_closed(
    front: Front, service: Service, voice: Voice
) -> None:
    slots = [front.send(demo_tokens(4), voice, number, START) for number in range(1, 20)]
    until(lambda: front.send([], None, 99, 0) > 0 and open_requests(service) > 0)
    service.close()
    for slot in slots:
        front.end_of(slot)
