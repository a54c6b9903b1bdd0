"""Limits that end a stream: where they end it, the audio before the end, and what a client gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from testkit.models.tiny_model import TINY, FaultyVocoder, demo_tokens
from testkit.patience import until
from testkit.replies import FIRST, LIMITS, GatedReply, Hanging, Make, refused, send
from testkit.utterances import joined
from token2wav import (
    AudioChunk,
    StreamClosedError,
    StreamConfig,
    Token2Wav,
    UtteranceOptions,
    Voice,
)
from token2wav.families.cosyvoice3 import CosyVoice3Config
from token2wav.serving import end_limits
from token2wav.serving.audio_output import AudioFormat, AudioOutput
from token2wav.serving.end_limits import EndReason, RepeatLimit, SilenceLimit

CONFIG = CosyVoice3Config.read(TINY)
REPEATS = 8
SILENCE_S = 1.5
ENDED_BY_REPEATS = (
    "stream: 8 equal tokens in a row (end_after_repeats) ended it, so it accepts no more tokens"
)
ENDED_BY_SILENCE = (
    "stream: 1.5 s of silence (end_after_silence_s) ended it, so it accepts no more tokens"
)
GUARDED = UtteranceOptions(end_after_repeats=REPEATS)
SILENCED = UtteranceOptions(end_after_silence_s=SILENCE_S)


def runaway(count: int) -> NDArray[np.int32]:
    """Returns a token stream that says something, and then repeats its last token for ever."""
    return np.concatenate((demo_tokens(count), np.full(200, demo_tokens(count)[-1], np.int32)))


@pytest.fixture
def all_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts all audio of the tiny model as silence."""
    monkeypatch.setattr(end_limits, "_AUDIBLE", 10.0)


# The limits alone.


@pytest.mark.parametrize("rate", [1, 48, 1200])
def test_audio_of_any_rate_has_windows(rate: int) -> None:
    assert SilenceLimit(1.0, rate, 1).end(np.zeros(2 * rate, np.float32)) == rate


@given(
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40),
    repeats=st.integers(2, 6),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    codebooks=st.integers(0, 3),
)
@settings(max_examples=100)
def test_repeats_end_at_the_first_run_however_tokens_are_portioned(
    tokens: list[int], repeats: int, cuts: list[int], codebooks: int
) -> None:
    runs = [
        end for end in range(repeats, len(tokens) + 1) if len(set(tokens[end - repeats : end])) == 1
    ]
    rows = np.array(tokens, np.int32)
    if codebooks:  # only the last code differs
        rows = np.stack([np.zeros_like(rows)] * (codebooks - 1) + [rows], axis=1)
    limit, taken, end = RepeatLimit(repeats), 0, None
    for portion in np.split(rows, sorted(min(cut, len(tokens)) for cut in cuts)):
        if end is None and (count := limit.end(portion)) is not None:
            end = taken + count
        taken += len(portion)
    assert end == (runs[0] if runs else None)


@given(
    silent=st.lists(st.booleans(), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60 * 240), max_size=6),
    channels=st.sampled_from([1, 2]),
)
@settings(max_examples=100)
def test_silence_ends_after_its_seconds_however_audio_is_portioned(
    silent: list[bool], cuts: list[int], channels: int
) -> None:
    windows = 12
    audio = np.repeat(np.where(silent, 0.001, 0.01).astype(np.float32), 240)
    if channels == 2:  # a sound in one channel is enough
        audio = np.stack((np.zeros_like(audio), audio), axis=1)
    expected = next(
        (end for end in range(windows, len(silent) + 1) if all(silent[end - windows : end])), None
    )
    limit, taken, end = SilenceLimit(0.12, 24_000, channels), 0, None
    for portion in np.split(audio, sorted(min(cut, len(audio)) for cut in cuts)):
        if end is None and (count := limit.end(portion)) is not None:
            end = taken + count
        taken += len(portion)
    assert end == (None if expected is None else expected * 240)


@pytest.mark.parametrize("trim_ms", [0, 100])
@pytest.mark.parametrize("rate", [24_000, 16_000])
def test_output_up_to_the_silence_is_that_without_a_limit(rate: int, trim_ms: int) -> None:
    speech = (0.1 * np.random.default_rng(0).standard_normal(960 * 10)).astype(np.float32)
    audio = np.concatenate((np.zeros(2400), speech, np.zeros(960 * 10), speech)).astype(np.float32)
    chunks, complete = [], []
    limited = AudioOutput(CONFIG, AudioFormat("float32", rate), trim_ms, 0.3)
    unlimited = AudioOutput(CONFIG, AudioFormat("float32", rate), trim_ms)
    for portion in np.split(audio, [5000, 10_000, 15_000]):
        if not limited.ended:
            chunks.append(limited.take(portion, last=False))
        complete.append(unlimited.take(portion, last=False))
    sent = np.concatenate([chunk.audio for chunk in chunks if chunk])
    end = (2400 + len(speech) + 7200) * rate // 24_000 - trim_ms * rate // 1000
    assert len(sent) == end
    [final] = [chunk for chunk in chunks if chunk and chunk.final]
    assert final.end_reason is EndReason.SILENCE
    assert final.samples_trimmed == trim_ms * rate // 1000
    assert final.first_token + final.token_count == -(-(end + final.samples_trimmed) * 25 // rate)
    whole = np.concatenate([chunk.audio for chunk in complete if chunk])
    if rate == 24_000:
        assert np.array_equal(sent, whole[:end])
    else:  # the last samples of a resampler depend on the silence that follows
        assert np.abs(sent - whole[:end]).max() < 1e-3


# Streams of the library.


@pytest.mark.parametrize("portion", [1, 7, 300])
def test_a_run_of_tokens_ends_a_stream(model: Token2Wav, voice: Voice, portion: int) -> None:
    tokens, end = runaway(40), 40 + REPEATS - 1
    with model.stream(voice, GUARDED) as stream:
        chunks: list[AudioChunk] = []
        for start in range(0, len(tokens), portion):
            if chunks and chunks[-1].final:
                break
            chunks += stream.push(tokens[start : start + portion])
        with pytest.raises(StreamClosedError) as caught:
            stream.push([1])
    assert str(caught.value) == ENDED_BY_REPEATS
    assert model.pipeline.open_streams == 0
    assert [chunk.end_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        EndReason.REPEATS
    ]
    assert chunks[-1].first_token + chunks[-1].token_count == end
    # The audio is that of an utterance that ends there, and all chunks before the last one are
    # those of a stream without the limit.
    assert np.array_equal(joined(chunks), model.synthesize(tokens[:end], voice))
    with model.stream(voice) as stream:
        unlimited = joined(stream.push(tokens))
    sent = joined(chunks[:-1])
    assert len(sent)
    assert np.array_equal(sent, unlimited[: len(sent)])


def test_silence_ends_a_stream(model: Token2Wav, voice: Voice, all_silent: None) -> None:
    tokens = demo_tokens(200)
    with model.stream(voice, SILENCED) as stream:
        chunks = stream.push(tokens)
        assert model.pipeline.open_streams == 0
        with pytest.raises(StreamClosedError) as caught:
            stream.finish()
    assert str(caught.value) == ENDED_BY_SILENCE
    assert chunks[-1].final
    assert chunks[-1].end_reason is EndReason.SILENCE
    samples = round(SILENCE_S * CONFIG.sample_rate)
    assert np.array_equal(joined(chunks), model.synthesize(tokens, voice)[:samples])


def test_settings_are_the_default_and_a_request_may_choose(voice: Voice) -> None:
    stream = StreamConfig(first_tokens=0, end_after_repeats=REPEATS, end_after_silence_s=60)
    model, tokens = Token2Wav.load(TINY, stream=stream), runaway(20)
    lengths = [
        len(model.synthesize(tokens, voice, options)) // 960
        for options in (
            UtteranceOptions(),
            UtteranceOptions(end_after_repeats=20),
            UtteranceOptions(end_after_repeats=0),
        )
    ]
    assert lengths == [20 + REPEATS - 1, 20 + 20 - 1, len(tokens)]


# Requests of a server.


@pytest.mark.parametrize("end", [False, True])
def test_requests_before_the_last_audio_are_answered_without_an_error(
    make: Make, voice: Voice, end: bool
) -> None:
    workers = make()
    utterance = workers.utterances.open(voice, options=GUARDED)
    gated = GatedReply()
    send(workers, utterance, demo_tokens(FIRST), gated)
    gated.sending.wait_until_called()
    ended = send(workers, utterance, np.full(REPEATS, 1, np.int32))
    # These clients cannot know of the end yet. Their tokens are dropped, not checked.
    late = [send(workers, utterance, [999_999])]
    late.append(send(workers, utterance, demo_tokens(LIMITS.stream_tokens), end=end))
    gated.sending.gate.set()
    chunks = gated.succeeded() + ended.succeeded()
    assert [reply.succeeded() for reply in late] == [[], []]
    assert chunks[-1].end_reason is EndReason.REPEATS
    assert len(joined(chunks)) == 960 * (FIRST + REPEATS)


def test_repeats_are_counted_in_the_tokens_that_a_stream_may_have(
    make: Make, voice: Voice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of millions of tokens is refused without work on each of them."""
    counted = list[int]()
    monkeypatch.setattr(RepeatLimit, "end", lambda _, tokens: counted.append(len(tokens)))
    workers = make()
    utterance = workers.utterances.open(voice, options=GUARDED)
    send(workers, utterance, demo_tokens(5)).succeeded()
    refused(workers, utterance, np.arange(10 * LIMITS.stream_tokens) % 9)
    assert counted == [5, LIMITS.stream_tokens - 5 + 1]


def test_dropped_tokens_do_not_count_for_the_limit_of_tokens(make: Make, voice: Voice) -> None:
    workers = make()
    utterance = workers.utterances.open(voice, options=GUARDED)
    tokens = np.full(LIMITS.stream_tokens + 1, 1, np.int32)
    reply = send(workers, utterance, tokens, end=True)
    assert len(joined(reply.succeeded())) == 960 * REPEATS


def test_repeats_that_arrive_while_silence_ends_the_audio_change_nothing(
    make: Make,
    faulty: tuple[Token2Wav, FaultyVocoder],
    voice: Voice,
    all_silent: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, vocoder = faulty
    workers, options = make(model), UtteranceOptions(end_after_repeats=8, end_after_silence_s=0.5)
    utterance = workers.utterances.open(voice, options=options)
    vocoder.meanwhile["advance"] = computing = Hanging()
    silent = send(workers, utterance, demo_tokens(FIRST))
    computing.wait_until_called()
    count_repeats = utterance._repeats.end

    def end(tokens: NDArray[np.int32]) -> int | None:
        computing.gate.set()
        until(lambda: utterance.output.ended)
        return count_repeats(tokens)

    monkeypatch.setattr(utterance._repeats, "end", end)
    repeating = send(workers, utterance, np.full(REPEATS, 1, np.int32))
    chunks = silent.succeeded() + repeating.succeeded()
    assert [chunk.end_reason for chunk in chunks] == [EndReason.SILENCE]
    assert str(refused(workers, utterance, [1])).startswith("stream: 0.5 s of silence")
