"""Protocol state of an utterance: latencies as defined, silence measured fairly, a server held to the protocol."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from token2wav_client.audio import SAMPLES_PER_TOKEN, AudioChunk
from token2wav_client.errors import ProtocolError
from token2wav_client.protocol_state import ProtocolState
from token2wav_client.wire import ReceivedChunk, Response


def answer(request: int, *, last: bool = True) -> Response:
    return Response(str(request), None, last)


def audio(
    request: int, index: int, tokens: int, *, final: bool = False, last: bool = False, short: int = 0
) -> Response:
    samples = np.zeros(SAMPLES_PER_TOKEN * tokens - short, np.float32)
    return Response(str(request), ReceivedChunk(samples, index, final), last)


def take(state: ProtocolState, response: Response, now: float) -> AudioChunk:
    chunk = state.received(response, now)
    assert chunk is not None
    return chunk


def sending(state: ProtocolState, *requests: tuple[float, int], end: float | None = None) -> ProtocolState:
    for now, tokens in requests:
        state.sent(tokens, now, end=False)
    if end is not None:
        state.sent(0, end, end=True)
    return state


def test_latency_counts_from_the_request_with_the_last_token_heard() -> None:
    state = sending(ProtocolState(keep_open=False), (10.0, 5), (11.0, 5), (12.0, 5))
    chunk = take(state, audio(0, 0, 6), 12.5)
    assert chunk.arrival_s == pytest.approx(2.5)
    assert chunk.latency_s == pytest.approx(1.5)  # token 6 left at 11.0
    assert chunk.gap_s is None


def test_latency_counts_from_a_later_request_if_the_server_answers_that_one() -> None:
    state = sending(ProtocolState(keep_open=False), (10.0, 5), (11.0, 5), (12.0, 5))
    chunk = take(state, audio(2, 0, 6), 12.5)  # look-ahead: request 2 made it possible
    assert chunk.latency_s == pytest.approx(0.5)


def test_a_request_that_is_unknown_or_done_does_not_shorten_a_latency() -> None:
    state = sending(ProtocolState(keep_open=False), (10.0, 5), (11.0, 5))
    state.received(answer(1), 11.5)
    assert take(state, audio(1, 0, 5), 12.0).latency_s == pytest.approx(2.0)
    assert take(state, Response("", ReceivedChunk(np.zeros(0, np.float32), 1, False), False), 12.0).index == 1


def test_time_starts_with_the_first_tokens_not_with_the_voice() -> None:
    state = sending(ProtocolState(keep_open=False), (10.0, 0), (15.0, 5))
    chunks = [take(state, audio(1, index, 1), 16.0 + index) for index in range(2)]
    assert [chunk.arrival_s for chunk in chunks] == pytest.approx([1.0, 2.0])
    assert chunks[1].gap_s == pytest.approx(1.0)


def test_a_whole_utterance_completes() -> None:
    state = sending(ProtocolState(keep_open=True), (0.0, 25), (1.0, 3), end=2.0)
    take(state, audio(1, 0, 25), 1.1)
    state.received(answer(1), 1.1)
    assert not state.complete
    assert take(state, audio(2, 1, 3, final=True, last=True), 2.1).final
    assert state.complete
    state.received(answer(0), 2.1)
    assert state.owed_since is None


def test_nothing_is_owed_while_tokens_are_waited_for() -> None:
    state = sending(ProtocolState(keep_open=True), (0.0, 5))
    assert state.owed_since is None  # only the first request, which stays open
    state.sent(5, 1.0, end=False)
    assert state.owed_since == 1.0
    state.received(answer(1), 1.5)
    assert state.owed_since is None


def test_later_requests_do_not_excuse_a_silent_server() -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 5), (1.0, 5), (2.0, 5))
    assert state.owed_since == 0.0
    state.received(answer(0), 2.5)
    assert state.owed_since == 2.5  # a sign of life, two answers still owed


def test_the_first_request_is_owed_once_the_last_is_sent() -> None:
    state = sending(ProtocolState(keep_open=True), (0.0, 5), end=3.0)
    assert state.owed_since == 3.0
    take(state, audio(1, 0, 5, final=True, last=True), 3.1)
    assert state.owed_since == 3.1


def test_chunks_must_be_contiguous() -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 10))
    take(state, audio(0, 0, 1), 1.0)
    with pytest.raises(ProtocolError, match="chunk_index: the server sent 2, expected 1"):
        state.received(audio(0, 2, 1), 2.0)


@pytest.mark.parametrize(("tokens", "short"), [(9, 0), (10, 1), (11, 0)])
def test_the_final_chunk_must_complete_960_samples_per_token(tokens: int, short: int) -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 10), end=1.0)
    with pytest.raises(ProtocolError, match=r"samples for 10 tokens, expected 9600"):
        state.received(audio(0, 0, tokens, final=True, short=short), 2.0)


def test_audio_for_tokens_never_sent_is_refused_at_once() -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 10))
    with pytest.raises(ProtocolError, match="expected 9600"):
        state.received(audio(0, 0, 11), 1.0)


def test_a_chunk_after_the_final_one_is_refused() -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 10), end=1.0)
    take(state, audio(1, 0, 10, final=True), 2.0)
    with pytest.raises(ProtocolError, match="chunk 1 after the final one"):
        state.received(audio(1, 1, 0), 2.1)


def test_a_final_chunk_before_the_last_request_is_refused() -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 10))
    with pytest.raises(ProtocolError, match="before its last request"):
        state.received(audio(0, 0, 10, final=True), 1.0)


def test_an_end_without_a_final_chunk_is_refused() -> None:
    state = sending(ProtocolState(keep_open=False), (0.0, 10), end=1.0)
    state.received(answer(0), 1.1)
    with pytest.raises(ProtocolError, match="after 0 chunks, none of them final"):
        state.received(answer(1), 1.2)


def test_rates_are_those_of_the_answers_and_never_change() -> None:
    state = ProtocolState(keep_open=False)
    state.sent(4, 10.0, end=True)
    audio = np.zeros(4 * 480, np.float32)
    first = ReceivedChunk(audio[:960], 0, False, 16_000, 480)
    chunk = state.received(Response("0", first, False), 11.0)
    assert chunk is not None
    assert (chunk.sample_rate, chunk.samples_per_token, chunk.duration_s) == (16_000, 480, 0.06)
    with pytest.raises(ProtocolError, match=r"the server sent \(24000, 960\) after \(16000, 480\)"):
        state.received(Response("0", ReceivedChunk(audio[960:], 1, True), False), 12.0)


def test_silence_that_was_trimmed_is_missing_in_the_sum() -> None:
    state = ProtocolState(keep_open=False)
    state.sent(4, 10.0, end=False)
    state.sent(1, 11.0, end=True)
    trimmed = ReceivedChunk(np.zeros(3 * 960, np.float32), 0, False, samples_trimmed=960)
    chunk = state.received(Response("0", trimmed, False), 12.0)
    assert chunk is not None
    assert (chunk.samples_trimmed, chunk.latency_s) == (960, 2.0)
    with pytest.raises(ProtocolError, match="the server sent 3840 samples for 5 tokens, expected 3839"):
        state.received(Response("1", replace(trimmed, index=1, audio=np.zeros(960), samples_trimmed=961), False), 13.0)
