"""Chunks of many streams in one batch equal the same chunks alone, however they are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from testkit.batches import WHOLE_BLOCKS, mels_together
from testkit.packing import pad_batches
from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, Parts, flow_mel
from token2wav.backends import exported_buckets
from token2wav.execution import step
from token2wav.execution.runner import ESTIMATOR
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.cached_flow import CachedFlow

# of the mel: sums in another order, which depends on the sizes that a library is asked for
BATCHED = 1e-5
PREPARED = exported_buckets(longest=4, past=(4, 8))

Utterance = tuple[int, int]  # prompt tokens, tokens
UTTERANCES: list[list[Utterance]] = [
    [(0, 30), (0, 30)],
    [(0, 200), (25, 40), (41, 7), (75, 130)],
    [(28, 1), (53, 175), (0, 99), (1, 26), (99, 60)],
]


def run_together(parts: Parts, engine: CachedFlow, utterances: list[Utterance]) -> list[np.ndarray]:
    """Returns the mels of utterances with chunks that always run in one batch."""
    schedule = HopSchedule.of(WHOLE_BLOCKS, parts.config)
    streams = []
    for seed, (prompt, length) in enumerate(utterances):
        voice = a_voice(prompt)
        chunker = Chunker(voice.prompt_tokens, parts.config, schedule)
        streams.append((engine.open(voice), chunker, some_tokens(length, seed)))
    mels = mels_together(engine, streams)
    return [mel[:, -2 * length :] for mel, (_, length) in zip(mels, utterances, strict=True)]


def fill_estimator_state(engine: CachedFlow, handle: int, value: float) -> None:
    """Overwrites the state of the estimator's convolutions in a stream."""
    rows = engine.states.rows(ESTIMATOR, 1)
    for tensor in rows.tensors.values():
        tensor.fill_(value)
    engine.states.write(torch.tensor([engine._streams[handle].slot]), rows)


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


@pytest.mark.parametrize("prompt", [0, 41])
def test_attention_of_all_blocks_of_a_chunk_in_one_call(
    parts: Parts, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_LONG_PAST", 0)
    voice, tokens = a_voice(prompt), some_tokens(260)
    assert (
        off(
            flow_mel(parts, parts.incremental(), portions(tokens, [130]), voice),
            parts.whole(tokens, voice),
        )
        <= MEL
    )
