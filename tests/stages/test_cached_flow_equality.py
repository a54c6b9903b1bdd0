"""A stream equals its utterance computed at once, for any prompt, length and portions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.models.golden import TINY, snr_db
from testkit.recomputing import recomputing
from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import AUDIO, MEL, Parts, RecordedModel, flow_mel
from token2wav import RuntimeConfig, StreamConfig, Token2Wav
from token2wav.stages.cached_flow import CachedFlow

# Around the ends of blocks, the 3 look-ahead tokens, and the 4 frames that the vocoder holds back.
LENGTHS = [*range(1, 6), *range(22, 30), *range(47, 55), 75, 77, 78, 79, 100, 103]
PROMPTS = [0, 1, 24, 25, 27, 28, 41, 75]


def mel_of(parts: Parts, engine: CachedFlow, prompt: int, length: int, sizes: list[int]) -> float:
    """Returns the largest difference between the mel of a stream and the mel of the whole."""
    voice, tokens = a_voice(prompt), some_tokens(length)
    return off(flow_mel(parts, engine, portions(tokens, sizes), voice), parts.whole(tokens, voice))


@pytest.mark.parametrize("length", LENGTHS)
def test_mel_of_every_length(parts: Parts, engine: CachedFlow, length: int) -> None:
    assert mel_of(parts, engine, 41, length, [length]) <= MEL


@pytest.mark.parametrize("prompt", PROMPTS)
def test_mel_after_every_prompt(parts: Parts, engine: CachedFlow, prompt: int) -> None:
    for length in (1, 25 - prompt % 25, 28, 60):
        assert mel_of(parts, engine, prompt, length, [length]) <= MEL, f"{length} tokens"


@pytest.mark.parametrize("sizes", [[1], [2, 0, 5], [3], [25], [28, 25], [7, 61]], ids=str)
def test_mel_of_every_portioning(parts: Parts, engine: CachedFlow, sizes: list[int]) -> None:
    assert mel_of(parts, engine, 28, 90, sizes) <= MEL


@pytest.mark.parametrize(
    "stream",
    [StreamConfig(first_tokens=0, max_hop_tokens=most) for most in (25, 50, 200)],
    ids=lambda config: f"{config.max_hop_tokens}",
)
def test_mel_of_every_schedule(parts: Parts, engine: CachedFlow, stream: StreamConfig) -> None:
    voice, tokens = a_voice(41), some_tokens(160)
    assert off(flow_mel(parts, engine, [tokens], voice, stream), parts.whole(tokens, voice)) <= MEL


def test_mel_of_a_long_stream(parts: Parts, engine: CachedFlow) -> None:
    voice, tokens = a_voice(41), some_tokens(430)
    assert (
        off(flow_mel(parts, engine, portions(tokens, [13]), voice), parts.whole(tokens, voice))
        <= MEL
    )


@pytest.mark.parametrize(
    ("prompt", "length"), [(0, 1), (1, 4), (24, 26), (41, 29), (75, 53), (28, 100)]
)
def test_audio_is_that_of_the_same_mel_vocoded_at_once(
    parts: Parts, model: RecordedModel, prompt: int, length: int
) -> None:
    tokens = some_tokens(length)
    audio, mel = model.run(portions(tokens, [7]), a_voice(prompt))
    assert len(audio) == 960 * length
    assert off(mel, parts.whole(tokens, a_voice(prompt))) <= MEL
    assert off(audio, parts.vocode(mel)) <= AUDIO


@settings(max_examples=8)
@given(
    prompt=st.integers(0, 60),
    lengths=st.lists(st.integers(0, 40), max_size=6),
    last=st.integers(1, 40),
)
def test_any_pushes(
    parts: Parts, model: RecordedModel, prompt: int, lengths: list[int], last: int
) -> None:
    voice, tokens = a_voice(prompt), some_tokens(sum(lengths) + last)
    ends = np.cumsum(lengths, dtype=int)
    audio, mel = model.run(np.split(tokens, ends), voice)
    assert off(mel, parts.whole(tokens, voice)) <= MEL
    # A vocoder of random weights turns rounding into large errors of single samples (the logarithm
    # of a magnitude, the sign of a phase), so for any input only the sum of errors has a bound.
    assert audio.shape == (960 * len(tokens),)
    assert snr_db(audio, parts.vocode(mel)) >= 60


def test_loaded_models_agree_however_they_compute() -> None:
    voice, tokens = a_voice(41), some_tokens(60)
    models = [Token2Wav.load(TINY, runtime=RuntimeConfig(cache_mib=64)), recomputing(TINY)]
    mels = [model.mel(tokens, voice) for model in models]
    assert off(*mels) <= MEL
    incremental, recomputed = (model.synthesize(tokens, voice) for model in models)
    # End to end the mels differ by rounding, and F0 integrates that into phase.
    assert snr_db(incremental, recomputed) > 40
