"""With a bounded view of the past, a stream may go on for ever: nothing that it holds grows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.execution.rig import Parts, a_voice, some_tokens
from token2wav import StreamConfig, Token2Wav
from token2wav.execution.hift_stage import HiFTEngine
from token2wav.streaming.accumulator import TokenAccumulator

SECONDS = 40


def test_nothing_grows_in_40_seconds(parts: Parts) -> None:
    config = StreamConfig(left_blocks=2, max_hop_tokens=25)
    engine = parts.incremental(pages=16, left_blocks=2, longest_hop=25)
    model: Token2Wav = parts.model(engine, config).model
    pipeline = model.pipeline
    session = pipeline.open(a_voice(41))
    vocoder = pipeline.vocoder._engine  # type: ignore[attr-defined]
    assert isinstance(vocoder, HiFTEngine)
    flow, tokens = engine._streams[session.flow_handle], some_tokens(25 * SECONDS)
    seen: list[tuple[int, ...]] = []
    for second in np.split(tokens, SECONDS):
        session.push(second)
        while session.next_chunk() is not None:
            pipeline.advance([session])
        seen.append(
            (
                engine.pool.used,
                flow.blocks.held,
                len(flow.blocks.own),
                len(flow.tokens),
                flow.conv_state.untyped_storage().nbytes(),
                vocoder.store.used,
                vocoder._streams[session.vocoder_handle].held.numel(),
                len(session._tokens._tokens),
            )
        )
    pipeline.close(session)
    assert session.tokens_received == 25 * SECONDS
    assert set(seen[8:]) == {seen[8]}
    assert engine._recompute.open_streams == 0


@pytest.mark.parametrize("push", [1, 25, 400])
def test_accumulator_forgets_what_no_window_needs(parts: Parts, push: int) -> None:
    tokens = some_tokens(20_000)
    accumulator = TokenAccumulator(tokens[:41], parts.config.flow)
    start = 25
    for at in range(41, len(tokens) - push, push):
        accumulator.append(tokens[at : at + push])
        while accumulator.covers(start + 25):
            chunk = accumulator.window(start, start + 25, last=False)
            assert np.array_equal(chunk.tokens, tokens[start - 2 : start + 28])
            start += 25
    assert start > 19_000
    assert len(accumulator._tokens) <= 2 * (push + 60) + 200
    tail = accumulator.window(start, accumulator.count, last=True)
    assert np.array_equal(tail.tokens, tokens[start - 2 : accumulator.count])
