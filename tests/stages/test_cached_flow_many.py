"""Streams that run side by side do not affect each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.patience import PATIENCE_SECONDS
from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import MEL, FlowStream, Parts, flow_mel
from token2wav.stages.cached_flow import CachedFlow

Utterance = tuple[int, int, int]  # prompt tokens, tokens, tokens per push

UTTERANCES = st.lists(
    st.tuples(st.sampled_from([0, 1, 25, 28, 41]), st.integers(1, 90), st.integers(5, 60)),
    min_size=2,
    max_size=8,
)


@settings(max_examples=5)
@given(utterances=UTTERANCES, data=st.data())
def test_interleaved_streams(
    parts: Parts, engine: CachedFlow, utterances: list[Utterance], data: st.DataObject
) -> None:
    streams = [FlowStream(engine, a_voice(prompt), parts.config) for prompt, _, _ in utterances]
    waiting = [
        portions(some_tokens(length, seed), [size])
        for seed, (_, length, size) in enumerate(utterances)
    ]
    while running := [index for index, pushes in enumerate(waiting) if pushes]:
        index = data.draw(st.sampled_from(running))
        streams[index].push(waiting[index].pop(0))
    for index in data.draw(st.permutations(range(len(streams)))):
        streams[index].finish()
        streams[index].close()
    for seed, ((prompt, length, size), stream) in enumerate(zip(utterances, streams, strict=True)):
        tokens = some_tokens(length, seed)
        alone = flow_mel(
            parts, parts.incremental(pages=16), portions(tokens, [size]), a_voice(prompt)
        )
        assert off(stream.mel, alone) <= MEL
        assert off(stream.mel, parts.whole(tokens, a_voice(prompt))) <= MEL


def test_streams_of_several_threads(parts: Parts) -> None:
    engine = parts.incremental()
    start = threading.Barrier(8)

    def run(seed: int) -> np.ndarray:
        start.wait(timeout=PATIENCE_SECONDS)
        return flow_mel(
            parts, engine, portions(some_tokens(60, seed), [9]), a_voice((0, 28, 41)[seed % 3])
        )

    with ThreadPoolExecutor(8) as threads:
        mels = list(threads.map(run, range(8)))
    for seed, mel in enumerate(mels):
        assert off(mel, parts.whole(some_tokens(60, seed), a_voice((0, 28, 41)[seed % 3]))) <= MEL
    assert engine.prefixes.computed == 3
    assert (engine.open_streams, engine.prefixes.referenced) == (0, 0)
