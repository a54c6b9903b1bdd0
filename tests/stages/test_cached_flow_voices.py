"""The work for a prompt is done once per voice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.utterances import a_voice, off, some_tokens
from tests.stages.rig import MEL, RESERVED, CountingSolver, Parts, flow_mel
from token2wav import Voice

PREFILLED = 128  # tokens: 5 blocks and their look-ahead; more than are computed at once


def test_second_stream_of_a_voice_computes_nothing_of_it(parts: Parts) -> None:
    solver = CountingSolver()
    engine = parts.incremental(solver=solver)
    first = engine.open(a_voice(PREFILLED))
    assert (engine.prefixes.computed, solver.calls) == (1, 2)
    used = engine.pool.used
    engine.close(engine.open(a_voice(PREFILLED)))
    engine.close(first)
    engine.close(engine.open(a_voice(PREFILLED)))
    assert (engine.prefixes.computed, solver.calls) == (1, 2)
    assert used == 5 + RESERVED


def test_equal_content_is_one_voice(parts: Parts) -> None:
    engine = parts.incremental()
    voice = a_voice(28)
    copy = Voice(
        list(voice.prompt_tokens),
        voice.prompt_mel.astype(np.float64),
        voice.speaker_embedding.copy(),
    )
    handles = [engine.open(voice), engine.open(copy)]
    assert (engine.prefixes.computed, engine.prefixes.referenced, len(engine.prefixes)) == (1, 1, 1)
    for handle in handles:
        engine.close(handle)
    assert engine.prefixes.referenced == 0


@pytest.mark.parametrize("changed", ["prompt_tokens", "prompt_mel", "speaker_embedding"])
def test_voices_that_differ_anywhere_are_not_shared(parts: Parts, changed: str) -> None:
    engine = parts.incremental()
    arrays = {
        name: getattr(a_voice(28), name).copy()
        for name in ("prompt_tokens", "prompt_mel", "speaker_embedding")
    }
    arrays[changed].flat[-1] += 1 if arrays[changed].flat[-1] < 1 else -1
    other = Voice(**arrays)
    for voice in (a_voice(28), other):
        mel = flow_mel(parts, engine, [some_tokens(30)], voice)
        assert off(mel, parts.whole(some_tokens(30), voice)) <= MEL
    assert engine.prefixes.computed == 2


def test_voice_opened_by_20_threads_is_computed_once(parts: Parts) -> None:
    solver = CountingSolver()
    engine = parts.incremental(solver=solver)
    start = threading.Barrier(20)

    def open_stream(_: int) -> int:
        start.wait(timeout=PATIENCE_SECONDS)
        return engine.open(a_voice(28))

    with ThreadPoolExecutor(20) as threads:
        handles = list(threads.map(open_stream, range(20)))
    assert (engine.prefixes.computed, solver.calls, engine.open_streams) == (1, 1, 20)
    for handle in handles:
        engine.close(handle)
    assert (engine.prefixes.referenced, engine.pool.used) == (0, 1)


def test_voice_that_failed_can_be_tried_again(parts: Parts) -> None:
    def fail(call: int) -> None:
        if call == 2:  # the second part of the prompt
            raise RuntimeError("it broke")

    engine = parts.incremental(solver=CountingSolver(fail))
    with pytest.raises(RuntimeError, match="it broke"):
        engine.open(a_voice(PREFILLED))
    assert (engine.pool.used, len(engine.prefixes), engine.open_streams) == (0, 0, 0)
    mel = flow_mel(parts, engine, [some_tokens(30)], a_voice(PREFILLED))
    assert off(mel, parts.whole(some_tokens(30), a_voice(PREFILLED))) <= MEL
