"""Delivery of results: order of its steps, and results that are errors, empty, or too late."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from testkit.models.tiny_model import TINY, demo_tokens, demo_voice, schedule_of
from testkit.replies import FakeClock
from token2wav import BackendError, StreamClosedError
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.serving.audio_output import AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.serving.delivery import deliver
from token2wav.serving.request import Request
from token2wav.stages.stage import DEFAULT_OPTIONS

CONFIG = CosyVoice3Config.read(TINY)


@dataclass(frozen=True)
class Sample:
    """Result of a chunk."""

    duration_s: float = 1.0
    sound_s: float | None = None


class Rig:
    """Request with a next chunk, and the results that were sent for it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        voice, playback = demo_voice(25), Playback(self.clock)
        chunker = Chunker(voice.prompt_tokens, CONFIG, schedule_of(CONFIG), playback)
        chunker.push(demo_tokens(200))
        self.request = Request(voice, DEFAULT_OPTIONS, chunker, playback, AudioOutput(CONFIG))
        self.sent: list[tuple[Sample, float]] = []

    def send(self, result: Sample, late: float) -> None:
        self.sent.append((result, late))

    @property
    def chunks(self) -> int:
        return self.request.chunker.chunks


def test_a_result_is_sent_and_recorded() -> None:
    rig, first, second = Rig(), Sample(), Sample(0.5)
    deliver(rig.request, first, rig.send)
    rig.clock.now += 1.25
    deliver(rig.request, second, rig.send)
    assert rig.sent == [(first, 0.0), (second, 0.25)]
    assert rig.request.playback.seconds_sent == 1.5
    assert rig.chunks == 2
    assert rig.request.last_progress == rig.clock.now


@pytest.mark.parametrize("result", [None, Sample(0.0)])
def test_a_result_without_audio_does_not_start_playback(result: Sample | None) -> None:
    rig = Rig()
    deliver(rig.request, result, rig.send)
    assert [sent for sent, _ in rig.sent] == ([] if result is None else [result])
    assert rig.request.playback.started is None
    assert rig.chunks == 1


def test_an_error_is_raised_and_nothing_is_sent() -> None:
    rig, error = Rig(), BackendError("backend: NaN")
    with pytest.raises(BackendError) as caught:
        deliver(rig.request, error, rig.send)
    assert caught.value is error
    assert (rig.sent, rig.chunks) == ([], 0)


@pytest.mark.parametrize("result", [None, Sample()])
def test_a_request_that_was_ended_before_gets_no_result(result: Sample | None) -> None:
    rig = Rig()
    rig.request.fail(StreamClosedError("stream: it was cancelled"))
    with pytest.raises(StreamClosedError, match=r"^stream: it was cancelled$"):
        deliver(rig.request, result, rig.send)
    assert (rig.sent, rig.chunks) == ([], 0)


def test_a_request_ended_during_delivery_computes_no_more() -> None:
    rig = Rig()

    def send(result: Sample, late: float) -> None:
        rig.send(result, late)
        rig.request.fail(StreamClosedError("stream: it was cancelled"))

    with pytest.raises(StreamClosedError):
        deliver(rig.request, Sample(), send)
    assert (len(rig.sent), rig.chunks) == (1, 0)
