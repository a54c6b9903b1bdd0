"""Whole utterances: every entry that takes all tokens at once gives the audio of
`vocode(mel(tokens))`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import snr_db
from testkit.models.tiny_model import ODE_STEPS, TINY, demo_tokens, demo_voice
from testkit.replies import LIMITS, joined, speak
from token2wav import (
    InputError,
    RuntimeConfig,
    StreamClosedError,
    StreamConfig,
    Token2Wav,
    Voice,
)
from token2wav.serving.worker import WorkerPool

Entry = Callable[[NDArray[np.int32], Voice], NDArray[np.float32]]

# phase integrates the float rounding of the mel; a piece that is spoken early leaves 2 dB
SAME_DB = 55


@pytest.fixture(scope="module")
def model() -> Token2Wav:
    """The tiny model with few steps; with its other default settings, streams speak early."""
    stream = StreamConfig(steps=(ODE_STEPS,))
    return Token2Wav.load(TINY, stream=stream, runtime=RuntimeConfig(device="cpu"))


@pytest.fixture(scope="module")
def whole(model: Token2Wav) -> Callable[[int], NDArray[np.float32]]:
    """Returns the audio of the first n demo tokens, whose mel is computed at once."""
    voice = demo_voice(25)
    return cache(lambda count: model.vocode(model.mel(demo_tokens(count), voice)))


@pytest.fixture(scope="module", params=["synthesize", "finish", "one request"])
def entry(request: pytest.FixtureRequest, model: Token2Wav) -> Iterator[Entry]:
    def finish(tokens: NDArray[np.int32], voice: Voice) -> NDArray[np.float32]:
        with model.stream(voice) as stream:
            return np.concatenate([chunk.audio for chunk in stream.finish(tokens)])

    workers = WorkerPool(model.pipeline, LIMITS)
    entries: dict[str, Entry] = {
        "synthesize": model.synthesize,
        "finish": finish,
        "one request": lambda tokens, voice: joined(speak(workers, voice, len(tokens))),
    }
    yield entries[request.param]
    workers.close()


# Around the first early piece, and around the ends of blocks, with and without the look-ahead.
LENGTHS = [(1, 2, 3, 7, 8, 9, 11, 15), (22, 24, 25, 26, 28, 29), (47, 49, 50, 51, 53, 60)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_length_gives_the_audio_of_the_whole(
    whole: Callable[[int], NDArray[np.float32]], entry: Entry, lengths: tuple[int, ...]
) -> None:
    voice = demo_voice(25)
    for count in lengths:
        expected, audio = whole(count), entry(demo_tokens(count), voice)
        assert audio.shape == expected.shape
        assert snr_db(audio, expected) > SAME_DB, f"{count} tokens"


def test_the_same_tokens_speak_early_where_others_may_follow() -> None:
    """Shows that the test above runs tokens that could be spoken early.

    The model is new: a model that has measured long waits admits no early stream.
    """
    model = Token2Wav.load(TINY, runtime=RuntimeConfig(device="cpu"))
    with model.stream(demo_voice(25)) as stream:
        assert stream.push(demo_tokens(15))


def test_tokens_of_finish_continue_the_pushed_tokens(model: Token2Wav) -> None:
    voice, tokens = demo_voice(25), demo_tokens(30)
    with model.stream(voice) as stream:
        assert not stream.push(tokens[:5])
        audio = np.concatenate([chunk.audio for chunk in stream.finish(tokens[5:])])
    assert snr_db(audio, model.vocode(model.mel(tokens, voice))) > SAME_DB


def test_a_bad_last_token_leaves_the_stream_as_it_was(model: Token2Wav) -> None:
    with model.stream(demo_voice(25)) as stream:
        stream.push(demo_tokens(5))
        with pytest.raises(InputError, match=r"^tokens: -1 at index 0"):
            stream.finish([-1])
        [chunk] = stream.finish()
        assert len(chunk.audio) == 960 * 5
        with pytest.raises(StreamClosedError):
            stream.finish([-1])
