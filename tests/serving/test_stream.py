"""Streams of the library: audio, accepted and refused tokens, their end, and failures."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit.models.tiny_model import TINY, FaultyVocoder, demo_tokens, demo_voice, one_line
from testkit.patience import run_elsewhere
from testkit.replies import Expected
from testkit.utterances import joined
from token2wav import (
    AudioChunk,
    BackendError,
    InputError,
    RuntimeConfig,
    StreamClosedError,
    Token2Wav,
    Voice,
)

HOP = 25  # of the first chunk, with the prompt of the fixture `voice`
FIRST = HOP + 3  # tokens until it runs
HELD_BACK = 4 * 480 + 4  # samples, by the vocoder


# Lengths and portions.


@pytest.mark.parametrize("prompt", [1, 2, 3, 27, 28, 30])
def test_lengths_hold_for_prompts_on_and_off_the_block_grid(model: Token2Wav, prompt: int) -> None:
    with model.stream(demo_voice(prompt)) as stream:
        chunks = stream.push(demo_tokens(60))
        assert len(chunks) == 1
        assert len(joined(chunks + stream.finish())) == 960 * 60


def test_chunks_come_as_soon_as_their_lookahead_is_there(model: Token2Wav, voice: Voice) -> None:
    tokens = demo_tokens(FIRST + 50)
    with model.stream(voice) as stream:
        assert stream.push(tokens[: FIRST - 1]) == []
        [first] = stream.push(tokens[FIRST - 1 : FIRST])
        assert (first.index, first.final) == (0, False)
        assert len(first.audio) == 960 * HOP - HELD_BACK
        assert stream.push(tokens[FIRST:-1]) == []
        [second] = stream.push(tokens[-1:])
        assert (second.index, second.final) == (1, False)
        assert len(second.audio) == 960 * 50
        [last] = stream.finish()
        assert (last.index, last.final) == (2, True)
        assert len(last.audio) == 960 * 3 + HELD_BACK


@given(cuts=st.lists(st.integers(0, 110), max_size=8))
@settings(max_examples=5)
def test_audio_does_not_depend_on_portions(
    loaded_model: Token2Wav, voice: Voice, expected: Expected, cuts: list[int]
) -> None:
    chunks: list[AudioChunk] = []
    with loaded_model.stream(voice) as stream:
        for portion in np.split(demo_tokens(110), sorted(cuts)):
            chunks += stream.push(portion)
        chunks += stream.finish()
    assert np.array_equal(joined(chunks), expected(110))
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_audio_does_not_depend_on_others_in_between(
    model: Token2Wav, voice: Voice, expected: Expected
) -> None:
    other = demo_voice(30)
    chunks: list[AudioChunk] = []
    with model.stream(voice) as stream, model.stream(other) as disturbing:
        for portion in np.split(demo_tokens(110), 5):
            disturbing.push(demo_tokens(40)[::-1])
            chunks += stream.push(portion)
        chunks += stream.finish()
    assert np.array_equal(joined(chunks), expected(110))


# Tokens that are taken.


def test_pushed_tokens_are_copied(model: Token2Wav, voice: Voice, expected: Expected) -> None:
    buffer = demo_tokens(4)
    with model.stream(voice) as stream:
        stream.push(buffer)
        buffer[:] = 0
        assert np.array_equal(joined(stream.finish()), expected(4))


@pytest.mark.parametrize(
    "empty", [[], (), np.zeros(0, np.int32), np.zeros(0, np.float32), torch.zeros(0)]
)
def test_an_empty_push_is_fine(model: Token2Wav, voice: Voice, empty: Any) -> None:
    with model.stream(voice) as stream:
        assert stream.push(empty) == []
        stream.push([7])
        assert stream.push(empty) == []
        assert len(joined(stream.finish())) == 960


# Bad tokens: refused with the field and the bound, and then as if they had never been pushed.

BAD_TOKENS: list[tuple[Any, list[str]]] = [
    ([3, -1], ["-1 at index 1", "0 to 6560"]),
    ([6561], ["6561 at index 0", "0 to 6560"]),
    ([*range(100), 7000], ["7000 at index 100"]),
    ([1 << 40], ["32 bits", str(1 << 40)]),
    (np.array([(1 << 32) + 5]), ["32 bits"]),  # wraps around to a good one
    ([1 << 70], ["32 bits", str(1 << 70)]),
    ([[1, 2], [3, 4]], ["(2, 2)", "one dimension"]),
    (np.zeros((1, 5), np.int32), ["(1, 5)", "one dimension"]),
    (5, ["()", "one dimension"]),
    ([[1, 2], [3]], ["rows of different lengths"]),
    (np.array([1.0, 2.0], np.float32), ["float32", "integers"]),
    ([float("nan")], ["integers"]),
    ([True, False], ["bool", "integers"]),
    ("123", ["one dimension"]),
    (["1", "2"], ["integers"]),
    (None, ["one dimension"]),
    (torch.ones(2, requires_grad=True), ["not an array"]),
]


@pytest.mark.parametrize(("bad", "words"), BAD_TOKENS)
def test_refused_tokens_leave_the_stream_as_it_was(
    model: Token2Wav, voice: Voice, expected: Expected, bad: Any, words: list[str]
) -> None:
    tokens = demo_tokens(6)
    with model.stream(voice) as stream:
        stream.push(tokens[:2])
        with pytest.raises(InputError) as caught:
            stream.push(bad)
        stream.push(tokens[2:])
        audio = joined(stream.finish())
    assert np.array_equal(audio, expected(6))
    message = str(caught.value)
    assert caught.value.field == "tokens"
    assert message.startswith("tokens: ")
    assert one_line(caught.value) == message
    for word in words:
        assert word in message
    for whole in (model.synthesize, model.mel):
        with pytest.raises(InputError) as again:
            whole(bad, voice)
        assert str(again.value) == message


def test_an_utterance_without_tokens_is_an_error(model: Token2Wav, voice: Voice) -> None:
    stream = model.stream(voice)
    stream.push([])
    assert model.pipeline.open_streams == 1
    with pytest.raises(InputError, match=r"^tokens: .*at least 1"):
        stream.finish()
    assert model.pipeline.open_streams == 0
    with pytest.raises(StreamClosedError):
        stream.push([1])
    for whole in (model.synthesize, model.mel):
        with pytest.raises(InputError, match=r"^tokens: .*at least 1"):
            whole([], voice)


# Lifetime.


def test_nothing_is_taken_after_the_end(model: Token2Wav, voice: Voice) -> None:
    stream = model.stream(voice)
    stream.push([1])
    stream.finish()
    assert model.pipeline.open_streams == 0
    for call in (lambda: stream.push([1]), lambda: stream.push([]), stream.finish):
        with pytest.raises(StreamClosedError, match=r"^stream: it has ended, "):
            call()
    stream.cancel()
    # it did not turn into a cancelled one
    with pytest.raises(StreamClosedError, match=r"^stream: it has ended, "):
        stream.push([1])


def test_nothing_is_taken_after_a_cancellation(model: Token2Wav, voice: Voice) -> None:
    stream = model.stream(voice)
    stream.push(demo_tokens(30))
    stream.cancel()
    assert model.pipeline.open_streams == 0
    stream.cancel()
    for call in (lambda: stream.push([1]), stream.finish):
        with pytest.raises(StreamClosedError, match=r"^stream: it was cancelled$"):
            call()


def test_a_dropped_stream_frees_its_state(model: Token2Wav, voice: Voice) -> None:
    def drop() -> None:
        model.stream(voice).push(demo_tokens(30))
        assert model.pipeline.open_streams <= 1

    for _ in range(3):
        drop()
    gc.collect()
    assert model.pipeline.open_streams == 0


def test_the_context_manager_frees_on_every_way_out(model: Token2Wav, voice: Voice) -> None:
    def interrupted() -> None:
        with model.stream(voice) as stream:
            stream.push([1])
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert model.pipeline.open_streams == 0
    with model.stream(voice) as stream:
        stream.push([1])
    with pytest.raises(StreamClosedError):
        stream.push([1])
    assert model.pipeline.open_streams == 0
    with model.stream(voice) as stream:
        stream.push([1])
        stream.finish()
    assert model.pipeline.open_streams == 0


def test_a_voice_that_does_not_fit_opens_nothing(model: Token2Wav, voice: Voice) -> None:
    short = Voice(voice.prompt_tokens, voice.prompt_mel[:-1], voice.speaker_embedding)
    for use in (
        model.stream,
        lambda bad: model.synthesize([1], bad),
        lambda bad: model.mel([1], bad),
    ):
        with pytest.raises(InputError, match=r"^prompt_mel: shape \(49, 80\), expected \(50, 80\)"):
            use(short)
    assert model.pipeline.open_streams == 0


def test_streams_of_several_threads_do_not_touch_each_other(model: Token2Wav) -> None:
    voices = [demo_voice(count) for count in (4, 25, 30)]
    expected = [model.synthesize(demo_tokens(20), voice) for voice in voices]
    outputs: list[NDArray[np.float32] | None] = [None] * len(voices)

    def speak(index: int) -> None:
        with model.stream(voices[index]) as stream:
            chunks = [chunk for token in demo_tokens(20) for chunk in stream.push([token])]
            outputs[index] = joined(chunks + stream.finish())

    threads = [threading.Thread(target=speak, args=(index,)) for index in range(len(voices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for audio, reference in zip(outputs, expected, strict=True):
        assert audio is not None
        assert np.array_equal(audio, reference)


# Cancellations by other threads, which come while the engines work.


@pytest.mark.parametrize("call", ["push", "finish"])
def test_cancellation_during_a_call_frees_the_stream(
    faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, call: str
) -> None:
    model, vocoder = faulty
    stream, held = model.stream(voice), list[int]()

    def cancel() -> None:
        run_elsewhere(stream.cancel)
        held.append(model.pipeline.open_streams)

    vocoder.meanwhile["advance"] = cancel
    with pytest.raises(StreamClosedError, match=r"^stream: it was cancelled$"):
        getattr(stream, call)(demo_tokens(FIRST + 50))
    assert held == [1]
    assert model.pipeline.open_streams == 0
    with pytest.raises(StreamClosedError, match=r"^stream: it was cancelled$"):
        stream.push([1])


@pytest.mark.parametrize("call", ["push", "finish"])
def test_a_call_during_that_of_another_thread_is_refused(
    faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice, expected: Expected, call: str
) -> None:
    model, vocoder = faulty
    stream, refusals = model.stream(voice), list[InputError]()

    def intrude() -> None:
        with pytest.raises(InputError, match=r"^stream: push or finish runs in another") as caught:
            getattr(stream, call)([1, 2])
        refusals.append(caught.value)

    vocoder.meanwhile["advance"] = lambda: run_elsewhere(intrude)
    chunks = stream.push(demo_tokens(30))
    assert len(refusals) == 1
    assert np.array_equal(joined(chunks + stream.finish()), expected(30))


def test_a_cancelled_stream_spares_the_state_of_the_next(
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one opens, and speaks, just before the state of the cancelled one is written."""
    model, vocoder = faulty
    store = vocoder._stage.store
    write, streams, heard = store.write, [model.stream(voice)], list[AudioChunk]()

    def barge_in() -> None:
        streams[0].cancel()
        streams.append(model.stream(voice))
        heard.extend(streams[1].push(demo_tokens(30)))

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(store, "write", write)
        run_elsewhere(barge_in)
        write(*arguments)

    monkeypatch.setattr(store, "write", interrupted)
    with pytest.raises(StreamClosedError):
        streams[0].push(demo_tokens(40)[::-1])
    assert np.array_equal(joined(heard + streams[1].finish()), expected(30))


# Failing engines.


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (RuntimeError("CUDA error:\n  out of memory"), "CUDA error: out of memory"),
        (MemoryError("no memory"), "no memory"),
        (float("nan"), "NaN or infinite"),
        (float("inf"), "NaN or infinite"),
    ],
    ids=["RuntimeError", "MemoryError", "NaN", "infinity"],
)
@pytest.mark.parametrize("when", ["push", "finish"])
def test_a_failing_engine_ends_its_stream_and_no_other(
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    expected: Expected,
    fault: BaseException | float,
    words: str,
    when: str,
) -> None:
    model, vocoder = faulty
    other = model.stream(voice)
    before = other.push(demo_tokens(30))

    stream = model.stream(voice)
    if when == "finish":
        stream.push([1])
    vocoder.fault = fault
    with pytest.raises(BackendError) as caught:
        stream.push(demo_tokens(30)) if when == "push" else stream.finish()
    assert words in one_line(caught.value)
    assert model.pipeline.open_streams == 1
    with pytest.raises(StreamClosedError, match=f"^stream: it failed: backend: .*{words}"):
        stream.push([1])
    assert np.array_equal(joined(before + other.finish()), expected(30))


def test_an_interrupted_call_frees_its_stream(
    faulty: tuple[Token2Wav, FaultyVocoder], voice: Voice
) -> None:
    model, vocoder = faulty
    stream = model.stream(voice)
    vocoder.fault = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        stream.push(demo_tokens(30))
    assert model.pipeline.open_streams == 0


def test_a_cancelled_stream_makes_room_for_early_audio(voice: Voice) -> None:
    model = Token2Wav.load(TINY, runtime=RuntimeConfig(device="cpu"))
    for _ in range(30):
        model.pipeline.load.record_batch(1, 0.04)  # so that only one stream can do so
    with model.stream(voice) as cancelled, model.stream(voice) as other:
        assert cancelled.push(demo_tokens(11))
        assert not other.push(demo_tokens(11))
        cancelled.cancel()
        assert other.push(demo_tokens(1))
