"""Streams without end: with attention to a bounded past, their state stops growing."""

from __future__ import annotations

import numpy as np

from testkit.utterances import a_voice, some_tokens
from tests.stages.rig import Parts
from token2wav import StreamConfig, Token2Wav
from token2wav.stages.waveform import WaveformStage

SECONDS = 40


def test_nothing_grows_in_40_seconds(parts: Parts) -> None:
    config = StreamConfig(left_blocks=2, max_hop_tokens=25)
    engine = parts.incremental(pages=16, left_blocks=2, longest_hop=25)
    model: Token2Wav = parts.model(engine, config).model
    pipeline = model.pipeline
    request = pipeline.utterance(a_voice(41))
    pipeline.open(request)
    chunker, handles = request.chunker, request.handles
    assert handles is not None
    vocoder = pipeline.vocoder._engine
    assert isinstance(vocoder, WaveformStage)
    flow, tokens = engine._streams[handles[0]], some_tokens(25 * SECONDS)
    seen: list[tuple[int, ...]] = []
    for second in np.split(tokens, SECONDS):
        chunker.push(second)
        while chunker.next_chunk is not None:
            pipeline.advance([request])
            chunker.finish_chunk()
        seen.append(
            (
                engine.pool.used,
                flow.blocks.page_count,
                len(flow.blocks.pages),
                len(flow.tokens),
                engine.states.used,
                vocoder.store.used,
                vocoder._streams[handles[1]].pending.numel(),
                len(chunker._tokens._tokens),
            )
        )
    pipeline.close(request)
    assert chunker.new_tokens == 25 * SECONDS
    assert set(seen[8:]) == {seen[8]}
    assert engine._recompute.open_streams == 0
