"""Streams of the library: audio, accepted and refused tokens, their end, and failures."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from testkit.models.golden import snr_db
from testkit.models.tiny_model import ODE_STEPS, TINY, FaultyVocoder, demo_tokens, one_line
from testkit.patience import run_elsewhere
from testkit.replies import Expected, Make, speak
from testkit.utterances import joined
from token2wav import (
    AudioChunk,
    BackendError,
    InputError,
    RuntimeConfig,
    StreamClosedError,
    StreamConfig,
    Token2Wav,
    Voice,
)
from token2wav.serving.pipeline import Pipeline
from token2wav.serving.utterance import Utterance

HOP = 25  # of the first chunk, with the prompt of the fixture `voice`
FIRST = HOP + 3  # tokens until it runs
HELD_BACK = 4 * 480 + 4  # samples, by the vocoder
SAME_DB = 55  # phase integrates the float rounding of the mel


# Lengths and portions.


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


# Around the first early piece, and around the ends of blocks, with and without the look-ahead.
LENGTHS = [(1, 2, 3, 7, 8, 9, 11, 15), (22, 24, 25, 26, 28, 29), (47, 49, 50, 51, 53, 60)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_an_utterance_whose_tokens_come_at_once_is_not_spoken_early(
    make: Make, voice: Voice, lengths: tuple[int, ...]
) -> None:
    """Else its audio would have early pieces, 2 dB from the audio of the whole mel."""
    stream = StreamConfig(steps=(ODE_STEPS,))
    model = Token2Wav.load(TINY, stream=stream, runtime=RuntimeConfig(device="cpu"))
    with model.stream(voice) as early:
        assert early.push(demo_tokens(15)), "more tokens could follow"
    workers = make(model)
    for count in lengths:
        tokens = demo_tokens(count)
        expected = model.vocode(model.mel(tokens, voice))
        with model.stream(voice) as finished:
            in_one_call = joined(finished.finish(tokens))
        in_one_request = joined(speak(workers, voice, count).succeeded())
        for audio in (model.synthesize(tokens, voice), in_one_call, in_one_request):
            assert audio.shape == expected.shape
            assert snr_db(audio, expected) > SAME_DB, f"{count} tokens"


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

BAD_TOKENS: list[tuple[Any, str]] = [
    ([*range(100), 7000], "7000 at index 100 is outside the vocabulary 0 to 6560"),
    ([3, -1], "-1 at index 1 is outside the vocabulary 0 to 6560"),
    ([[1, 2], [3]], "rows of different lengths"),
    (torch.ones(2, requires_grad=True), "not an array"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_TOKENS)
def test_refused_tokens_leave_the_stream_as_it_was(
    model: Token2Wav, voice: Voice, expected: Expected, bad: Any, words: str
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
    assert words in message
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


def test_a_voice_that_does_not_fit_opens_nothing(model: Token2Wav, voice: Voice) -> None:
    short = Voice(voice.prompt_tokens, voice.prompt_mel[:-1], voice.speaker_embedding)
    for use in (
        model.stream,
        lambda bad: model.synthesize([1], bad),
        lambda bad: model.mel([1], bad),
    ):
        with pytest.raises(InputError, match=r"^prompt_mel: shape \(49, 80\), expected 50 frames"):
            use(short)
    assert model.pipeline.open_streams == 0


# Lifetime.


@pytest.mark.parametrize(
    ("how", "message"), [("finish", "it has ended, "), ("cancel", "it was cancelled$")]
)
def test_nothing_is_taken_after_the_end(
    model: Token2Wav, voice: Voice, how: str, message: str
) -> None:
    stream = model.stream(voice)
    stream.push(demo_tokens(30))
    getattr(stream, how)()
    assert model.pipeline.open_streams == 0
    for _ in range(2):  # a cancellation changes neither end
        for call in (lambda: stream.push([1]), lambda: stream.push([]), stream.finish):
            with pytest.raises(StreamClosedError, match=f"^stream: {message}"):
                call()
        stream.cancel()


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
    store = vocoder.store
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
        (float("nan"), "NaN or infinite"),
        (float("inf"), "NaN or infinite"),
    ],
    ids=["RuntimeError", "NaN", "infinity"],
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


# Dropped streams, and errors of the pipeline.


def an_open_utterance(pipeline: Pipeline, voice: Voice) -> Utterance:
    """Opens an utterance whose last tokens have arrived."""
    utterance = pipeline.utterance(voice)
    pipeline.open(utterance)
    utterance.chunker.push(demo_tokens(4), end=True)
    return utterance


def test_a_dropped_request_is_closed_by_the_next_call(model: Token2Wav, voice: Voice) -> None:
    pipeline = model.pipeline
    dropped, utterance = (an_open_utterance(pipeline, voice) for _ in range(2))
    pipeline.close(pipeline.utterance(voice))  # an utterance that was never opened
    pipeline.drop(dropped)
    assert dropped.handles  # the garbage collector must never wait for a stage
    pipeline.advance([utterance])
    assert not dropped.handles
    pipeline.drop(utterance)
    assert pipeline.open_streams == 0


def test_a_dropped_stream_closed_by_another_thread(model: Token2Wav, voice: Voice) -> None:
    pipeline = model.pipeline

    class Contended(deque[Any]):
        def popleft(self) -> Any:
            if len(self) == 1:
                run_elsewhere(super().popleft)
            return super().popleft()

    dropped, pipeline._dropped = pipeline._dropped, Contended([pipeline.utterance(voice)])
    try:
        with model.stream(voice) as stream:
            assert len(joined(stream.finish([1]))) == 960
    finally:
        pipeline._dropped = dropped


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_errors_of_torch_become_one_short_sentence(
    model: Token2Wav, error: type[Exception]
) -> None:
    with pytest.raises(BackendError) as caught, model.pipeline.running():
        raise error("out\n  of memory" + 500 * "!")
    assert str(caught.value) == "backend: out of memory" + 287 * "!"
    with pytest.raises(ValueError, match="a bug"), model.pipeline.running():
        raise ValueError("a bug")
