"""Streams that are computed between two ODE steps of a batch of the flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from testkit.batches import mels_together
from testkit.models.tiny_model import ODE_STEPS, schedule_of
from testkit.packing import pad_batches
from testkit.utterances import Mel, a_voice, some_tokens
from tests.stages.rig import Parts
from token2wav.execution.batch import BatchSize
from token2wav.execution.step_boundary import at_boundaries, interruption
from token2wav.serving.chunking import Chunker
from token2wav.serving.clocks import Playback
from token2wav.stages.cached_flow import CachedFlow

# The batch of three streams takes the larger sizes, in steps; the interrupting stream the smaller.
WHOLE = [BatchSize(1, blocks, 8) for blocks in (1, 2, 4)]
IN_STEPS = [BatchSize(4, blocks, 8) for blocks in (1, 2, 4)]
RUNS: dict[str, Callable[[CachedFlow], CachedFlow]] = {
    "torch": lambda engine: engine,
    "exported step": pad_batches,
    "exported step in buckets": lambda engine: pad_batches(engine, WHOLE + IN_STEPS, IN_STEPS),
}
BATCH = ((28, 60), (0, 80), (41, 27))  # prompt tokens and tokens of each stream
NEWCOMER = (53, 40)


def mels(parts: Parts, engine: CachedFlow, *utterances: tuple[int, int]) -> list[Mel]:
    """Returns the mels of utterances, whose chunks run in one batch."""
    streams = []
    for prompt, count in utterances:
        voice = a_voice(prompt)
        schedule = schedule_of(parts.config)
        chunker = Chunker(voice.prompt_tokens, parts.config, schedule, Playback())
        streams.append((engine.open(voice), chunker, some_tokens(count, seed=prompt)))
    return mels_together(engine, streams)


def same(left: Sequence[Mel], right: Sequence[Mel]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("run", RUNS)
def test_no_stream_changes_by_an_interruption(parts: Parts, run: str) -> None:
    engine = RUNS[run](parts.incremental(pages=128))
    batch, newcomer = mels(parts, engine, *BATCH), mels(parts, engine, NEWCOMER)
    used = engine.pool.used, engine.states.used
    interrupting: list[list[Mel]] = []

    def interrupt() -> None:
        with interruption():
            interrupting.append(mels(parts, engine, NEWCOMER))

    with at_boundaries(interrupt):
        assert same(mels(parts, engine, *BATCH), batch)
    assert len(interrupting) >= ODE_STEPS - 1
    assert all(same(mel, newcomer) for mel in interrupting)
    assert (engine.open_streams, engine.pool.used, engine.states.used) == (0, *used)


def test_interrupting_work_shares_no_rows_with_a_bucket_in_steps(parts: Parts) -> None:
    """Not even if it has the size of the bucket."""
    [size, *_] = IN_STEPS
    engine = pad_batches(parts.incremental(pages=128), [*WHOLE[:1], size], [size])
    [runner] = engine._runners.values()
    rows, _ = runner._batches._buckets[size]
    assert shares_rows(runner._make(size), rows)
    with interruption():
        assert not shares_rows(runner._make(size), rows)


def shares_rows(left: Any, right: Any) -> bool:
    return bool(left.conv_state.data_ptr() == right.conv_state.data_ptr())


def test_the_batches_of_a_prompt_are_counted_until_it_is_in_the_cache(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = parts.incremental(pages=128)
    computed, compute = list[int](), engine._compute

    def counting(chunks: Any) -> Any:
        computed.append(len(chunks))
        return compute(chunks)

    monkeypatch.setattr(engine, "_compute", counting)
    for prompt in (0, 53, 260):
        voice = a_voice(prompt)
        batches = engine.prompt_batches(voice)
        computed.clear()
        engine.close(engine.open(voice))
        assert (len(computed), engine.prompt_batches(voice)) == (batches, 0)
    assert batches == 3
