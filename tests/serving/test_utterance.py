"""Results of a request: what its listener has heard, empty results, and results after its end."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from testkit.models.tiny_model import TINY, demo_tokens, demo_voice, schedule_of
from testkit.replies import FakeClock
from token2wav import StreamClosedError
from token2wav.families.cosyvoice3.config import CosyVoice3Config
from token2wav.serving.audio_output import AudioOutput
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.serving.utterance import Utterance
from token2wav.stages.stage import DEFAULT_OPTIONS

CONFIG = CosyVoice3Config.read(TINY)


@dataclass(frozen=True)
class Sample:
    """Result of a chunk."""

    duration_s: float = 1.0
    sound_s: float | None = None


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def utterance(clock: FakeClock) -> Utterance:
    """Utterance with a next chunk."""
    voice, playback = demo_voice(25), Playback(clock)
    chunker = Chunker(voice.prompt_tokens, CONFIG, schedule_of(CONFIG), playback)
    chunker.push(demo_tokens(200))
    return Utterance(voice, DEFAULT_OPTIONS, chunker, playback, AudioOutput(CONFIG))


def test_a_result_is_heard_and_recorded(utterance: Utterance, clock: FakeClock) -> None:
    late = []
    for result, seconds in ((Sample(), 1.25), (Sample(0.5), 0.0)):
        late.append(utterance.hear(result))
        utterance.finish_chunk(result)
        clock.now += seconds
    assert late == [0.0, 0.25]
    assert utterance.playback.seconds_sent == 1.5
    assert utterance.chunker.chunks == 2
    assert utterance.last_progress == clock.now


@pytest.mark.parametrize("result", [None, Sample(0.0)])
def test_a_result_without_audio_does_not_start_playback(
    utterance: Utterance, result: Sample | None
) -> None:
    assert utterance.hear(result) == 0.0
    utterance.finish_chunk(result)
    assert utterance.playback.started is None
    assert utterance.chunker.chunks == 1


@pytest.mark.parametrize("result", [None, Sample()])
def test_a_request_that_was_ended_gets_no_result(
    utterance: Utterance, result: Sample | None
) -> None:
    utterance.fail(StreamClosedError("stream: it was cancelled"))
    for record in (utterance.hear, utterance.finish_chunk):
        with pytest.raises(StreamClosedError, match=r"^stream: it was cancelled$"):
            record(result)
    assert (utterance.playback.started, utterance.chunker.chunks) == (None, 0)
