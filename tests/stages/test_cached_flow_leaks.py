"""Release of a stream's pages, slots and prompt, in every way in which the stream can end."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from testkit.stages import two_stages
from testkit.utterances import a_voice, some_tokens
from tests.stages.rig import (
    RESERVED,
    CheapSolver,
    CountingSolver,
    Parts,
    unreferenced_evicted,
)
from token2wav import BackendError, InputError, Stream, StreamConfig, Token2Wav
from token2wav.cache.block_pool import StreamBlocks
from token2wav.stages.cached_flow import CachedFlow
from token2wav.stages.waveform import WaveformStage

Ending = Callable[[Stream], None]


def runs_to_its_end(stream: Stream) -> None:
    stream.push(some_tokens(90))
    stream.finish()


def is_cancelled(stream: Stream) -> None:
    stream.push(some_tokens(90))
    stream.cancel()


def is_dropped(stream: Stream) -> None:
    stream.push(some_tokens(90))


def is_dropped_untouched(stream: Stream) -> None:
    pass


def ends_without_tokens(stream: Stream) -> None:
    with pytest.raises(InputError):
        stream.finish()


def raises_inside_with(stream: Stream) -> None:
    with pytest.raises(InputError), stream:
        stream.push([-1])


FIXED = StreamConfig(first_tokens=0, max_hop_tokens=25)

ENDINGS = [
    runs_to_its_end,
    is_cancelled,
    is_dropped,
    is_dropped_untouched,
    ends_without_tokens,
    raises_inside_with,
]


def held(model: Token2Wav, engine: CachedFlow) -> list[int]:
    """Returns open utterances, voices in use, pages of streams, and slots."""
    return [
        model.pipeline.open_streams,
        engine.open_streams,
        engine._recompute.open_streams,
        engine.prefixes.referenced,
        unreferenced_evicted(engine),
        engine.states.used,
    ]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
@pytest.mark.parametrize("pages", [64, 4], ids=["room", "full-pool"])
def test_computing_streams_leave_nothing(parts: Parts, ending: Ending, pages: int) -> None:
    engine = parts.incremental(pages=pages)
    model = parts.model(engine, FIXED).model
    for seed in range(4):
        ending(model.stream(a_voice(41, seed)))
    assert held(model, engine) == [0, 0, 0, 0, 0, 0]


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
    model = parts.model(engine, FIXED).model
    # References to failed streams are kept, so only the failure can free their pages and slots.
    streams: list[Stream] = []

    def run() -> int:
        streams.append(model.stream(a_voice(41)))
        return sum(
            len(chunk.audio) for chunk in streams[-1].push(some_tokens(100)) + streams[-1].finish()
        )

    with pytest.raises(BackendError, match="it broke"):
        run()
    assert held(model, engine) == [0, 0, 0, 0, 0, 0]
    assert run() == 100 * 960


STEPS = {
    "the prompt's encoding": lambda engine: (engine._encoder, "encode"),
    "the speaker": lambda engine: (engine._encoder, "speaker"),
    "the prompt's blocks": lambda engine: (engine._runners[engine._default_steps], "run"),
    "the stream's blocks": lambda engine: (StreamBlocks, "__init__"),
    "the slot": lambda engine: (engine.states, "take"),
    "the copy of the prompt's states": lambda engine: (engine.states, "copy"),
    "the handle": lambda engine: (engine, "register"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("known", [False, True], ids=["new-voice", "known-voice"])
def test_an_open_that_fails_at_any_step_leaves_nothing(
    parts: Parts, step: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = parts.incremental()
    model, voice = parts.model(engine, FIXED).model, a_voice(53)
    if known:
        model.stream(voice).cancel()

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("it broke")

    with monkeypatch.context() as patch:
        patch.setattr(*STEPS[step](engine), fail)
        for _ in range(3):
            if known and step in ("the prompt's encoding", "the speaker", "the prompt's blocks"):
                model.stream(voice).cancel()  # the voice is known, so this stage ran before
                continue
            with pytest.raises(BackendError, match="it broke"):
                model.stream(voice)
    assert engine.pool.used == engine.prefixes.idle_pages
    assert held(model, engine) == [0, 0, 0, 0, 0, 0]
    assert len(model.synthesize(some_tokens(30), voice)) == 30 * 960


def test_a_vocoder_that_cannot_open_leaves_nothing(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, vocoder = parts.incremental(), WaveformStage(parts.hift, parts.source_noise)
    model = Token2Wav(parts.config, two_stages(engine, vocoder), FIXED)

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("it broke")

    with monkeypatch.context() as patch:
        for owner, name in ((vocoder.store, "take"), (torch, "empty")):
            model.stream(a_voice(41)).cancel()
            patch.setattr(owner, name, fail)
            with pytest.raises(BackendError, match="it broke"):
                model.stream(a_voice(41))
            patch.undo()
    assert (vocoder.store.used, vocoder.open_streams) == (0, 0)
    assert held(model, engine) == [0, 0, 0, 0, 0, 0]


def test_streams_in_reference_cycles_leave_nothing(parts: Parts) -> None:
    engine = parts.incremental(pages=3 * RESERVED, solver=CheapSolver())
    model = parts.model(engine).model
    for _ in range(3):
        ring: list[object] = [model.stream(a_voice(0))]
        ring.append(ring)
        del ring
    gc.collect()
    assert held(model, engine) == [0, 0, 0, 0, 0, 0]
