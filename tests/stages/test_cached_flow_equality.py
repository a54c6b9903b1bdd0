"""A stream equals its utterance computed at once, for any prompt, length, portions, hops, window
and type of the cached values.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.models.golden import snr_db
from testkit.utterances import Mel, a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, Parts, RecordedModel, flow_mel
from token2wav import StreamConfig
from token2wav.cache.paged_kv_cache import Storage
from token2wav.stages.cached_flow import CachedFlow

# Around the ends of blocks, the 3 look-ahead tokens, and the 4 frames that the vocoder holds back.
LENGTHS = [*range(1, 6), *range(22, 30), *range(47, 55), 75, 77, 78, 79, 100, 103]
PROMPTS = [0, 1, 24, 25, 27, 28, 41, 75]
SIZES = [[1000], [1], [2, 0, 5], [3], [25], [28, 25], [7, 61]]  # of portions
HOPS = [100, 25, 50, 200]
CASES = [
    *zip(LENGTHS, cycle(PROMPTS), cycle(SIZES), cycle(HOPS), strict=False),
    *((25 - prompt % 25, prompt, [1000], 100) for prompt in PROMPTS),  # to the end of a block
    *((160, 41, [1000], hop) for hop in HOPS),
    (430, 41, [13], 100),
]


def assert_equal(parts: Parts, model: RecordedModel, prompt: int, pushed: list[np.ndarray]) -> None:
    """Asserts that the mel is that of the whole, and the audio that of the mel.

    A vocoder of random weights turns rounding into large errors of single samples (the logarithm of
    a magnitude, the sign of a phase), so for any input only the sum of errors has a bound.
    """
    voice, tokens = a_voice(prompt), np.concatenate(pushed)
    audio, mel = model.run(pushed, voice)
    assert off(mel, parts.whole(tokens, voice)) <= MEL
    assert audio.shape == (960 * len(tokens),)
    assert snr_db(audio, parts.vocode(mel)) >= 60


@pytest.mark.parametrize(("length", "prompt", "sizes", "hop"), CASES)
def test_any_length_prompt_portions_and_hops(
    parts: Parts, engine: CachedFlow, length: int, prompt: int, sizes: list[int], hop: int
) -> None:
    model = parts.model(engine, StreamConfig(first_tokens=0, max_hop_tokens=hop))
    assert_equal(parts, model, prompt, portions(some_tokens(length), sizes))


@settings(max_examples=8)
@given(
    prompt=st.integers(0, 60),
    lengths=st.lists(st.integers(0, 40), max_size=6),
    last=st.integers(1, 40),
)
def test_any_pushes(
    parts: Parts, model: RecordedModel, prompt: int, lengths: list[int], last: int
) -> None:
    tokens = some_tokens(sum(lengths) + last)
    assert_equal(parts, model, prompt, np.split(tokens, np.cumsum(lengths, dtype=int)))


@pytest.mark.parametrize("left_blocks", [0, 1, 2, 8])
@pytest.mark.parametrize("prompt", [0, 75])
def test_streams_equal_the_whole_under_the_mask_of_a_window(
    parts: Parts, left_blocks: int, prompt: int
) -> None:
    voice, tokens = a_voice(prompt), some_tokens(180)
    whole = parts.whole(tokens, voice, left_blocks=left_blocks)
    for engine, sizes, hop in (
        (parts.incremental(left_blocks=left_blocks), [17], 100),
        (parts.recompute(left_blocks=left_blocks), [17], 100),
        (parts.incremental(left_blocks=left_blocks), [1000], 25),
    ):
        stream = StreamConfig(first_tokens=0, max_hop_tokens=hop, left_blocks=left_blocks)
        assert off(flow_mel(parts, engine, portions(tokens, sizes), voice, stream), whole) <= MEL
    # A window as long as the utterance is exact.
    assert (off(whole, parts.whole(tokens, voice)) <= MEL) == (left_blocks == 8)


def test_prompt_stays_in_view(parts: Parts) -> None:
    """Without the prefix, a window of no blocks would limit every block to itself."""
    tokens = some_tokens(160)
    engine = parts.incremental(left_blocks=0)
    stream = StreamConfig(left_blocks=0)
    last = [
        flow_mel(parts, engine, [tokens], a_voice(28, seed), stream)[:, -40:] for seed in (0, 1)
    ]
    assert off(*last) > 1e-2


STORAGES: list[Storage] = ["float32", "float16", "int8", "float8"]
# Of the mel, relative to its deviation; measured 5.6e-5, 1.3e-3 and 7.0e-3.
ERROR = {"float32": 5e-6, "float16": 1.5e-4, "int8": 3e-3, "float8": 1.5e-2}
# Chunks of other lengths round sums differently, and a value beside a rounding step of the storage
# then moves by a whole step. In double precision the chunks make no difference (4e-15); measured in
# single 3e-6 and 3e-5.
CHUNKING = {"float32": 5e-6, "float16": 1e-5, "int8": 1e-4, "float8": 1e-3}


def relative_rms(error: Mel, reference: Mel) -> float:
    return float(np.sqrt(np.square(error).mean()) / reference.std())


@pytest.mark.parametrize("storage", STORAGES)
def test_mel_is_close_and_hardly_depends_on_the_chunks(parts: Parts, storage: Storage) -> None:
    voice, tokens = a_voice(41), some_tokens(210)
    growing = flow_mel(parts, parts.incremental(storage=storage), [tokens], voice)
    by_block = StreamConfig(first_tokens=0, max_hop_tokens=25)
    fixed = flow_mel(
        parts, parts.incremental(storage=storage), portions(tokens, [9]), voice, by_block
    )
    whole = parts.whole(tokens, voice)
    assert relative_rms(growing - whole, whole) <= ERROR[storage]
    assert relative_rms(growing - fixed, whole) <= CHUNKING[storage]
