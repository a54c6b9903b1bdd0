"""A full cache refuses new streams and never hurts running ones."""

from __future__ import annotations

import numpy as np
import pytest

from testkit.models.golden import TINY
from testkit.models.tiny_model import ODE_STEPS
from testkit.utterances import a_voice, off, portions, some_tokens
from tests.stages.rig import (
    AUDIO,
    MEL,
    RESERVED,
    CountingSolver,
    FlowStream,
    Parts,
    flow_mel,
    unreferenced_evicted,
)
from token2wav import LimitError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.stages.cached_flow import page_needs

FIXED = StreamConfig(first_tokens=0, max_hop_tokens=25)


def test_new_stream_is_refused_while_others_run(parts: Parts) -> None:
    engine = parts.incremental(pages=3 * RESERVED - 1)
    streams = [FlowStream(engine, a_voice(0), parts.config) for _ in range(2)]
    with pytest.raises(LimitError, match=r"cache.*try again"):
        engine.open(a_voice(0))
    assert (engine.open_streams, engine.pool.used) == (2, 2 * RESERVED)
    streams[0].close()
    engine.close(engine.open(a_voice(0)))


def test_voice_that_does_not_fit_is_refused_and_leaves_nothing(parts: Parts) -> None:
    engine = parts.incremental(pages=3)
    for prompt in (78, 128):  # 3 pages of prompt leave none for a stream; 5 do not fit at all
        with pytest.raises(LimitError, match="cache"):
            engine.open(a_voice(prompt))
    assert (engine.open_streams, engine.prefixes.referenced, unreferenced_evicted(engine)) == (
        0,
        0,
        0,
    )
    engine.close(engine.open(a_voice(0)))


def test_cache_size_of_the_configuration_is_the_limit(parts: Parts) -> None:
    stream = StreamConfig(steps=(ODE_STEPS,))
    model = Token2Wav.load(TINY, stream=stream, runtime=RuntimeConfig(cache_mib=10))
    pages = (10 << 20) // parts.layout().page_bytes
    with pytest.raises(LimitError, match=rf"of {pages} free; try again later"):
        model.stream(a_voice(25 * pages + 3))
    streams = [model.stream(a_voice(0)) for _ in range(pages // RESERVED)]
    with pytest.raises(LimitError, match="cache"):
        model.stream(a_voice(0))
    assert model.pipeline.open_streams == len(streams)


@pytest.mark.parametrize(("prompt", "pages"), [(0, 4), (0, 5), (26, 4), (41, 4), (75, 6)])
def test_stream_that_outgrows_the_cache_goes_on_without_it(
    parts: Parts, prompt: int, pages: int
) -> None:
    """It may do so at any chunk, also at the last one, which has the 3 look-ahead tokens only."""
    voice, tokens = a_voice(prompt), some_tokens(128)
    engine = parts.incremental(pages=pages)
    model = parts.model(engine, FIXED)
    audio, mel = model.run(portions(tokens, [11]), voice)
    assert off(mel, parts.whole(tokens, voice)) <= MEL
    assert off(audio, parts.vocode(mel)) <= AUDIO
    assert unreferenced_evicted(engine) == 0


def test_pages_are_released_when_a_stream_no_longer_sees_them(parts: Parts) -> None:
    engine = parts.incremental(pages=2 * RESERVED)
    first, second = (FlowStream(engine, a_voice(0), parts.config, FIXED) for _ in range(2))
    first.push(some_tokens(103))
    assert engine.pool.used == RESERVED  # pages of the second stream
    second.push(some_tokens(53, seed=1)).finish()
    first.push(some_tokens(30, seed=2)).finish()
    first_tokens = [some_tokens(103), some_tokens(30, seed=2)]
    assert off(first.mel, flow_mel(parts, parts.recompute(), first_tokens, a_voice(0))) <= MEL
    assert off(second.mel, parts.whole(some_tokens(53, seed=1), a_voice(0))) <= MEL
    first.close()
    second.close()
    assert (engine.pool.used, engine._recompute.open_streams) == (0, 0)


def test_a_prompt_is_evicted_once_its_streams_go_on_without_it(parts: Parts) -> None:
    engine, tokens = parts.incremental(pages=2 + RESERVED), some_tokens(120)
    utterance = FlowStream(engine, a_voice(53), parts.config, FIXED).push(tokens)
    assert (engine._recompute.open_streams, engine.pool.used) == (1, 2)
    assert (engine.prefixes.referenced, engine.prefixes.idle_pages) == (0, 2)
    engine.close(engine.open(a_voice(28)))  # 1 page of its prompt and 3 of its own: one prompt goes
    assert len(engine.prefixes) == 1
    assert off(utterance.finish().mel, parts.whole(tokens, a_voice(53))) <= MEL
    utterance.close()


@pytest.mark.parametrize("left_blocks", [0, 1, 3])
@pytest.mark.parametrize("longest_hop", [25, 100])
def test_bounded_streams_have_all_pages_from_the_start(
    parts: Parts, left_blocks: int, longest_hop: int
) -> None:
    """The pool may be empty after `open`, for any length of prompt and utterance.

    A prompt of 26 tokens and 50 further tokens make the longest first chunk.
    """
    stream = StreamConfig(max_hop_tokens=longest_hop, left_blocks=left_blocks)
    for prompt, length in ((26, 51), (26, 180), (41, 180)):
        engine = parts.incremental(left_blocks=left_blocks, longest_hop=longest_hop)
        utterance = FlowStream(engine, a_voice(prompt), parts.config, stream)
        engine.pool.acquire(engine.pool.free)
        utterance.push(some_tokens(length)).finish()
        assert engine._recompute.open_streams == 0, f"{prompt} + {length} tokens"
        whole = parts.whole(some_tokens(length), a_voice(prompt), left_blocks=left_blocks)
        assert off(utterance.mel, whole) <= MEL, f"{prompt} + {length} tokens"


def test_bounded_streams_share_the_pages_of_chunks(parts: Parts) -> None:
    """Three streams fit where two would fit if each owned the pages of its longest chunk. A chunk
    that fails returns its pages.
    """

    def fail(call: int) -> None:
        if call == 3:  # the first chunk of the third stream
            raise RuntimeError("it broke")

    needs = page_needs(parts.config, left_blocks := 1, 25)
    pages = 3 * needs.window + needs.chunk
    assert pages < 3 * (needs.window + needs.chunk)
    engine = parts.incremental(
        pages, left_blocks=left_blocks, longest_hop=25, solver=CountingSolver(fail)
    )
    engine.limit_chunks(1)
    stream = StreamConfig(first_tokens=0, max_hop_tokens=25, left_blocks=left_blocks)
    streams = [FlowStream(engine, a_voice(0), parts.config, stream) for _ in range(3)]
    with pytest.raises(LimitError, match=r"cache.*try again"):
        engine.open(a_voice(0))
    failing = streams.pop()
    for utterance in streams:
        utterance.push(some_tokens(30))
    with pytest.raises(RuntimeError, match="it broke"):
        failing.push(some_tokens(30))
    for utterance in streams:
        utterance.push(some_tokens(70, seed=1)).finish()
    tokens = np.concatenate((some_tokens(30), some_tokens(70, seed=1)))
    whole = parts.whole(tokens, a_voice(0), left_blocks=left_blocks)
    assert all(off(utterance.mel, whole) <= MEL for utterance in streams)
    for utterance in (failing, *streams):
        utterance.close()
    assert unreferenced_evicted(engine) == 0


def test_idle_voices_make_room(parts: Parts) -> None:
    solver = CountingSolver()
    engine = parts.incremental(pages=7, solver=solver)
    for prompt in (53, 54):  # 2 pages each
        engine.close(engine.open(a_voice(prompt)))
    assert (engine.pool.used, len(engine.prefixes)) == (4, 2)
    flow_mel(parts, engine, [some_tokens(100)], a_voice(0), FIXED)  # 4 pages
    # the older prompt was evicted; an empty one was added
    assert [len(engine.prefixes), engine.prefixes.computed] == [2, 3]
    calls = solver.calls
    engine.close(engine.open(a_voice(54)))
    assert solver.calls == calls
    engine.close(engine.open(a_voice(53)))
    assert solver.calls > calls
