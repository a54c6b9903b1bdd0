"""Chunks of many streams in one batch equal the same chunks alone, however they are packed."""

from __future__ import annotations

import pytest
import torch

from testkit.batches import WHOLE_BLOCKS
from testkit.packing import pad_batches
from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import Parts, Utterance, fill_estimator_state, flow_mel, run_together
from token2wav.backends import exported_buckets
from token2wav.execution.batch import BatchSize
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.cached_flow import CachedFlow

# of the mel: sums in another order, which depends on the sizes that a library is asked for
BATCHED = 1e-5
PREPARED = exported_buckets(longest=4, past=(4, 8))

UTTERANCES: list[list[Utterance]] = [
    [(0, 30), (0, 30)],
    [(0, 200), (25, 40), (41, 7), (75, 130)],
    [(28, 1), (53, 175), (0, 99), (1, 26), (99, 60)],
]


@pytest.fixture(params=["row", "packed", "prepared"])
def batching(parts: Parts, request: pytest.FixtureRequest) -> CachedFlow:
    if request.param == "row":
        return parts.incremental()
    return pad_batches(parts.incremental(), PREPARED if request.param == "prepared" else [])


@pytest.mark.parametrize("utterances", UTTERANCES)
def test_a_batch_equals_its_streams_alone(
    parts: Parts, batching: CachedFlow, utterances: list[Utterance]
) -> None:
    together = run_together(parts, batching, utterances)
    for seed, ((prompt, length), mel) in enumerate(zip(utterances, together, strict=True)):
        alone = flow_mel(parts, parts.incremental(), [some_tokens(length, seed)], a_voice(prompt))
        assert off(mel, alone) <= BATCHED


@pytest.mark.parametrize("left_blocks", [0, 1, 3])
def test_a_batch_with_a_window_equals_its_streams_alone(parts: Parts, left_blocks: int) -> None:
    for engine in (
        parts.incremental(left_blocks=left_blocks),
        pad_batches(parts.incremental(left_blocks=left_blocks)),
    ):
        together = run_together(parts, engine, UTTERANCES[1])
        for seed, ((prompt, length), mel) in enumerate(zip(UTTERANCES[1], together, strict=True)):
            assert (
                off(
                    mel,
                    parts.whole(
                        some_tokens(length, seed), a_voice(prompt), left_blocks=left_blocks
                    ),
                )
                <= 2e-5
            )


def test_a_broken_stream_harms_no_other_of_its_batch(parts: Parts, batching: CachedFlow) -> None:
    healthy, config = a_voice(28), parts.config
    schedule = HopSchedule.of(WHOLE_BLOCKS, config)
    handles = [batching.open(healthy) for _ in range(3)]
    with torch.inference_mode():
        fill_estimator_state(batching, handles[1], torch.nan)
    chunkers = [Chunker(healthy.prompt_tokens, config, schedule) for _ in handles]
    for length, chunker in zip((60, 140, 60), chunkers, strict=True):
        chunker.push(some_tokens(length), end=True)
    for _ in range(2):  # its NaN in pages for padding must not reach the second batch
        batch = [(h, c.next_chunk) for h, c in zip(handles, chunkers, strict=True) if c.next_chunk]
        mels = batching.advance(batch)
        assert [bool(torch.isfinite(mel).all()) for mel in mels] == [True, False, True]
        for chunker in chunkers:
            chunker.finish_chunk()
    for handle in handles:
        batching.close(handle)


def test_a_batch_takes_the_smallest_bucket_that_fits() -> None:
    assert BatchSize(1, 2, 3).fits(BatchSize(1, 2, 3))
    assert not BatchSize(1, 2, 4).fits(BatchSize(4, 2, 3))
    assert exported_buckets(4, (4, 8, 16)) == [
        BatchSize(streams, length, past)
        for streams in (1, 2, 4)
        for length in (1, 2, 4)
        for past in (4, 8, 16)
    ]
