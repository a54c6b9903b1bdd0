"""Provisional first audio from part of a block, and exact audio from the first whole block on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, FlowStream, Parts, estimator_state
from token2wav import StreamConfig
from token2wav.config.token_format import NO_TOKEN
from token2wav.networks.masks import attention_bias
from token2wav.networks.ode import OdeTables
from token2wav.serving.chunking import Chunker
from token2wav.serving.hops import HopSchedule
from token2wav.stages.stage import FlowStage, TokenChunk

LOOKAHEAD, FIRST_LOOKAHEAD = 3, 2
BLOCK = 25
FIRST_TOKENS = [5, 6, 8, 10, 12, 16, 25, 40]
PROMPTS = [0, 1, 24, 25, 30, 75, 99]

sizes_of_portions = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Parts.load()


def speak(
    parts: Parts,
    engine: FlowStage[Any],
    prompt: int,
    count: int,
    sizes: Sequence[int],
    first_tokens: int = 6,
) -> FlowStream:
    """Returns an ended stream that got its tokens in portions of these sizes, in a cycle."""
    stream = FlowStream(
        engine, a_voice(prompt), parts.config, StreamConfig(first_tokens=first_tokens)
    )
    for portion in portions(some_tokens(count), sizes):
        stream.push(portion)
    stream.finish().close()
    return stream


def provisional_frames(stream: FlowStream, prompt: int) -> int:
    """Returns the number of frames at the start of a mel that came from incomplete blocks."""
    return 2 * max([chunk.stop - prompt for chunk in stream.chunks if chunk.provisional], default=0)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("first_tokens", FIRST_TOKENS)
def test_first_audio_when_the_first_lookahead_is_complete(
    parts: Parts, prompt: int, first_tokens: int
) -> None:
    config = parts.config
    schedule = HopSchedule.of(StreamConfig(first_tokens=first_tokens), config)
    chunker = Chunker(a_voice(prompt).prompt_tokens, config, schedule)
    # the whole first hop may be complete earlier
    first = min(prompt + first_tokens, config.grid(prompt).first_boundary + schedule.first)
    while chunker.next_chunk is None:
        chunker.push(some_tokens(1))
    chunk = chunker.next_chunk
    assert chunk.start + chunk.skip == prompt
    if chunk.provisional:
        # A chunk that ends shortly after a block waits until the block is complete.
        after_block = first % BLOCK < LOOKAHEAD - FIRST_LOOKAHEAD + 1
        assert chunk.stop == first or (after_block and first < chunk.stop < first + LOOKAHEAD)
        assert chunker.received == chunk.stop + FIRST_LOOKAHEAD
        absent = LOOKAHEAD - FIRST_LOOKAHEAD
        assert (chunk.tokens[-absent:] == NO_TOKEN).all()
        assert (chunk.tokens[:-absent] >= 0).all()
    else:
        assert chunk.stop == first
        assert chunker.received == first + LOOKAHEAD


@given(
    st.sampled_from(PROMPTS), st.sampled_from(FIRST_TOKENS), sizes_of_portions, st.integers(1, 160)
)
@settings(max_examples=8)
def test_audio_equals_the_whole_except_for_provisional_chunks(
    parts: Parts, prompt: int, first_tokens: int, sizes: list[int], count: int
) -> None:
    whole = parts.whole(some_tokens(count), a_voice(prompt))
    cached, recomputed = (
        speak(parts, engine, prompt, count, sizes, first_tokens)
        for engine in (parts.incremental(), parts.recompute())
    )
    state_stop, heard = parts.config.grid(prompt).prefix, prompt
    for chunk in cached.chunks:
        assert (chunk.start, chunk.start + chunk.skip) == (state_stop, min(heard, chunk.stop))
        assert chunk.provisional or chunk.last or chunk.stop % BLOCK == 0
        assert heard < chunk.stop or not chunk.provisional
        heard, state_stop = max(heard, chunk.stop), state_stop if chunk.provisional else chunk.stop
    assert heard == prompt + count
    exact = provisional_frames(cached, prompt)
    assert exact <= 2 * (BLOCK + 39 + LOOKAHEAD)
    assert off(cached.mel, recomputed.mel) <= MEL
    assert off(cached.mel[:, exact:], whole[:, exact:]) <= MEL


def test_provisional_chunks_take_no_page_and_leave_no_trace(parts: Parts) -> None:
    engine = parts.incremental()
    stream = FlowStream(engine, a_voice(30), parts.config, StreamConfig())
    before, state = engine.pool.used, estimator_state(engine, stream.handle)
    stream.push(some_tokens(15))
    assert [chunk.provisional for chunk in stream.chunks] == [True]
    assert engine.pool.used == before
    assert engine._streams[stream.handle].next_token == 25
    assert torch.equal(estimator_state(engine, stream.handle), state)
    stream.close()
    assert engine.pool.used == engine.prefixes.pages


def test_missing_lookahead_is_silent_as_after_the_end(parts: Parts) -> None:
    """A provisional chunk without any look-ahead has the mel of an utterance that ends there."""
    engine, tokens = parts.incremental(), some_tokens(10)
    absent = np.full(LOOKAHEAD, NO_TOKEN, np.int32)
    early = TokenChunk(np.concatenate((tokens, absent)), 0, 10, last=False, provisional=True)
    handle = engine.open(a_voice(0))
    [mel] = engine.advance([(handle, early)])
    [ended] = engine.advance([(handle, TokenChunk(tokens, 0, 10, last=True))])
    engine.close(handle)
    assert off(mel.numpy(), ended.numpy()) <= MEL


def test_fewer_steps_see_the_past_at_their_own_times() -> None:
    """A provisional chunk of 3 ODE steps equals the solver with 3 of the 10 times, beside the past
    that the solver with all times has at these times.
    """
    parts, tokens, voice = Parts.load(10), some_tokens(BLOCK + 8 + LOOKAHEAD), a_voice(0)
    engine = parts.incremental(provisional_steps=3)
    handle = engine.open(voice)
    [past] = engine.advance(
        [(handle, TokenChunk(tokens[: BLOCK + LOOKAHEAD], 0, BLOCK, last=False))]
    )
    late = TokenChunk(tokens[BLOCK:], BLOCK, BLOCK + 8, last=False, provisional=True)
    [mel] = engine.advance([(handle, late)])
    engine.close(handle)

    estimator, frames, count = parts.flow.estimator, 2 * BLOCK, 2 * (BLOCK + 8)
    solver, early = parts.solver.tables, OdeTables.of(parts.flow.estimator, 10, 0.7, evaluated=3)
    assert early.stored_steps == [0, 3, 7]
    with torch.inference_mode():
        mu = parts.flow.mu(torch.from_numpy(tokens)[None])[:, :, :count]
        speaker = parts.flow.speaker(torch.tensor(voice.speaker_embedding))[None]
        conditions = estimator.project_conditions(*solver.guided(mu, speaker, torch.zeros_like(mu)))
        grid = parts.config.grid(0).scaled(2)
        positions = torch.arange(count)
        bias, rope = attention_bias(grid.allows(positions, positions)), estimator.rope(positions)

        def advanced(tables: OdeTables, step: int, x: torch.Tensor) -> torch.Tensor:
            modulation = tables.modulation[step]
            velocity = estimator.velocity(tables.rows(x), conditions, modulation, bias, rope=rope)
            return tables.advance(step, x, velocity)

        whole = partial_x = parts.flow_noise.window(0, count)[None]
        for step in range(10):
            if step in early.stored_steps:
                mixed = torch.cat((whole[..., :frames], partial_x[..., frames:]), dim=2)
                partial_x = advanced(early, early.stored_steps.index(step), mixed)
            whole = advanced(solver, step, whole)
    assert off(past.numpy(), whole[0, :, :frames].numpy()) <= MEL
    assert off(mel.numpy(), partial_x[0, :, frames:].numpy()) <= MEL


@pytest.mark.parametrize("provisional_steps", [1, 3])
def test_fewer_steps_leave_no_trace(parts: Parts, provisional_steps: int) -> None:
    tokens = some_tokens(60)
    few, all_steps = (
        speak(parts, parts.incremental(provisional_steps=steps), 30, len(tokens), [15, 20])
        for steps in (provisional_steps, 0)
    )
    exact = provisional_frames(few, 30)
    assert np.array_equal(few.mel[:, exact:], all_steps.mel[:, exact:])
    assert not np.array_equal(few.mel[:, :exact], all_steps.mel[:, :exact])
