"""Flow with a cache: rounding of the stored values, bounded memory, and failed streams.

`tests/families/test_streams.py` compares streams with the whole, and
`tests/serving/test_random_operations.py` ends them in every other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from testkit.utterances import Mel, a_voice, off, portions, some_tokens
from tests.stages.rig import (
    MEL,
    RESERVED,
    CountingSolver,
    FlowStream,
    Parts,
    flow_mel,
    unreferenced_evicted,
)
from token2wav import BackendError, LimitError, Stream, StreamConfig, Token2Wav
from token2wav.cache.block_pool import StreamBlocks
from token2wav.cache.paged_kv_cache import Storage
from token2wav.stages.cached_flow import CachedFlow, page_needs
from token2wav.stages.waveform import WaveformStage

FIXED = StreamConfig(first_tokens=0, max_hop_tokens=25)
STORAGES: list[Storage] = ["float32", "float16", "int8", "float8"]
# Of the mel, relative to its deviation; measured 5.6e-5, 1.3e-3 and 7.0e-3.
ERROR = {"float32": 5e-6, "float16": 1.5e-4, "int8": 3e-3, "float8": 1.5e-2}
# Chunks of other lengths round sums differently, and a value beside a rounding step of the storage
# then moves by a whole step. In double precision the chunks make no difference (4e-15); measured in
# single 3e-6 and 3e-5.
CHUNKING = {"float32": 5e-6, "float16": 1e-5, "int8": 1e-4, "float8": 1e-3}
SECONDS = 40


def relative_rms(error: Mel, reference: Mel) -> float:
    return float(np.sqrt(np.square(error).mean()) / reference.std())


@pytest.mark.parametrize("storage", STORAGES)
def test_mel_is_close_and_hardly_depends_on_the_chunks(parts: Parts, storage: Storage) -> None:
    voice, tokens = a_voice(41), some_tokens(210)
    growing = flow_mel(parts, parts.incremental(storage=storage), [tokens], voice)
    fixed = flow_mel(parts, parts.incremental(storage=storage), portions(tokens, [9]), voice, FIXED)
    whole = parts.whole(tokens, voice)
    assert relative_rms(growing - whole, whole) <= ERROR[storage]
    assert relative_rms(growing - fixed, whole) <= CHUNKING[storage]


def test_prompt_stays_in_view(parts: Parts) -> None:
    """Without the prefix, a window of no blocks would limit every block to itself."""
    tokens = some_tokens(160)
    engine = parts.incremental(left_blocks=0)
    stream = StreamConfig(left_blocks=0)
    last = [
        flow_mel(parts, engine, [tokens], a_voice(28, seed), stream)[:, -40:] for seed in (0, 1)
    ]
    assert off(*last) > 1e-2


# Memory.


def test_a_prompt_is_evicted_once_its_streams_go_on_without_it(parts: Parts) -> None:
    engine, tokens = parts.incremental(pages=2 + RESERVED), some_tokens(120)
    utterance = FlowStream(engine, a_voice(53), parts.config, FIXED).push(tokens)
    assert (engine._recompute.open_streams, engine.pool.used) == (1, 2)
    assert (engine.prefixes.referenced, engine.prefixes.idle_pages) == (0, 2)
    engine.close(engine.open(a_voice(28)))  # 1 page of its prompt and 3 of its own: one prompt goes
    assert len(engine.prefixes) == 1
    assert off(utterance.finish().mel, parts.whole(tokens, a_voice(53))) <= MEL
    utterance.close()


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


def test_nothing_grows_in_40_seconds(parts: Parts) -> None:
    """With attention to a bounded past, the state of a stream stops growing."""
    config = StreamConfig(left_blocks=2, max_hop_tokens=25)
    engine = parts.incremental(pages=16, left_blocks=2, longest_hop=25)
    pipeline = parts.model(engine, config).pipeline
    request = pipeline.utterance(a_voice(41))
    pipeline.open(request)
    chunker, handles = request.chunker, request.handles
    assert handles is not None
    vocoder = pipeline.vocoder
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


# Failures.


def held(model: Token2Wav, engine: CachedFlow) -> list[int]:
    """Returns open utterances, voices in use, pages of streams, and slots."""
    return [
        model.pipeline.open_streams,
        engine.open_streams,
        engine._recompute.open_streams,
        engine.prefixes.referenced,
        unreferenced_evicted(engine),
        engine.states.used,
        model.pipeline.vocoder.store.used,
        model.pipeline.vocoder.open_streams,
    ]


NOTHING = [0] * 8


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_failing_engine_leaves_nothing(parts: Parts, fails_at: int) -> None:
    """A failure in any call of the solver frees everything.

    Call 1 computes the prompt, calls 2 and 3 chunks from the cache, and call 4 a chunk without the
    cache.
    """

    def fail(call: int) -> None:
        if call == fails_at:
            raise RuntimeError("it broke")

    engine = parts.incremental(pages=4, solver=CountingSolver(fail))
    model = parts.model(engine, FIXED)
    # References to failed streams are kept, so only the failure can free their pages and slots.
    streams: list[Stream] = []

    def run() -> int:
        streams.append(model.stream(a_voice(41)))
        return sum(
            len(chunk.audio) for chunk in streams[-1].push(some_tokens(100)) + streams[-1].finish()
        )

    with pytest.raises(BackendError, match="it broke"):
        run()
    assert held(model, engine) == NOTHING
    assert run() == 100 * 960


# Functions that fail while a stream opens. The first three run for a new voice only.
OF_A_NEW_VOICE: dict[str, Callable[[CachedFlow, Any], tuple[Any, str]]] = {
    "the prompt's encoding": lambda flow, _: (flow._encoder, "encode"),
    "the speaker": lambda flow, _: (flow._encoder, "speaker"),
    "the prompt's blocks": lambda flow, _: (flow._runners[flow._default_steps], "run"),
}
OF_ANY_VOICE: dict[str, Callable[[CachedFlow, Any], tuple[Any, str]]] = {
    "the stream's blocks": lambda flow, _: (StreamBlocks, "__init__"),
    "the slot": lambda flow, _: (flow.states, "take"),
    "the copy of the prompt's states": lambda flow, _: (flow.states, "copy"),
    "the handle": lambda flow, _: (flow, "register"),
    "the vocoder's slot": lambda _, vocoder: (vocoder.store, "take"),
    "the vocoder's memory": lambda _, vocoder: (torch, "empty"),
}


@pytest.mark.parametrize(
    ("step", "known"),
    [*((step, False) for step in OF_A_NEW_VOICE | OF_ANY_VOICE)]
    + [(step, True) for step in OF_ANY_VOICE],
)
def test_an_open_that_fails_at_any_step_leaves_nothing(
    parts: Parts, step: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = parts.incremental()
    model, voice = parts.model(engine, FIXED), a_voice(53)
    if known:
        model.stream(voice).cancel()

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("it broke")

    with monkeypatch.context() as patch:
        patch.setattr(*(OF_A_NEW_VOICE | OF_ANY_VOICE)[step](engine, model.pipeline.vocoder), fail)
        for _ in range(3):
            with pytest.raises(BackendError, match="it broke"):
                model.stream(voice)
    assert engine.pool.used == engine.prefixes.idle_pages
    assert held(model, engine) == NOTHING
    assert len(model.synthesize(some_tokens(30), voice)) == 30 * 960
