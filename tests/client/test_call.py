"""Call of an utterance: latencies, silent servers, violations of the protocol, the requests of
another attempt, and parameters that a request may lack.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from testkit.rigs.fake_triton import response
from token2wav_client import (
    ClientVoice,
    InputError,
    ProtocolError,
    TokenError,
    UtteranceClosedError,
)
from token2wav_client.audio import AudioChunk
from token2wav_client.call import Call
from token2wav_client.tokens import as_tokens
from token2wav_client.wire import Opening, build_request, read_response

SAMPLES = np.arange(960 * 12, dtype=np.int16)
NUMBERS = ("chunk_index", "sample_rate", "samples_per_token", "samples_trimmed", "end_reason")


@pytest.fixture
def call(voice_arrays: dict[str, Any]) -> Call:
    """A call that keeps its first request open, and may be tried again."""
    return Call("token2wav", Opening(ClientVoice(**voice_arrays), "int16"), repeatable=True)


@pytest.fixture
def answered() -> Call:
    """Call with a first request that is answered as soon as its tokens are consumed."""
    return Call("token2wav", Opening("anna", "int16", keep_open=False), repeatable=False)


def message(request: int | str, audio: npt.NDArray[Any], *, last: bool, **outputs: Any) -> Any:
    numbers = {name: np.array([outputs[name]], np.int32) for name in NUMBERS if name in outputs}
    arrays = {"audio": audio, "final": np.array([outputs.get("final", False)])}
    return response(str(request), arrays | numbers, last=last)


def tokens_in(message: Any) -> list[int]:
    return list(np.frombuffer(message.raw_input_contents[0], np.int32))


def answer(request: int) -> Any:
    return response(str(request), {}, last=True)


def audio(
    request: int | str,
    index: int,
    tokens: int,
    *,
    last: bool = False,
    short: int = 0,
    **outputs: Any,
) -> Any:
    return message(
        request, SAMPLES[: 960 * tokens - short], last=last, chunk_index=index, **outputs
    )


def part(index: int, begin: int, end: int, *, final: bool = False) -> Any:
    """Returns tokens `begin` to `end` as samples with values that give their positions."""
    return message(0, SAMPLES[960 * begin : 960 * end], last=final, chunk_index=index, final=final)


def take(call: Call, message: Any, now: float) -> AudioChunk:
    [chunk] = call.accept(message, now)
    return chunk


def request(call: Call, values: npt.ArrayLike, now: float, *, end: bool) -> Any:
    """Adds tokens that are sent at once, in a request of their own."""
    call.add(values, now, end=end)
    return call.next_request()


def sending(call: Call, *requests: tuple[float, int], end: float | None = None) -> Call:
    for now, tokens in requests:
        request(call, [1] * tokens, now, end=False)
    if end is not None:
        request(call, [], end, end=True)
    return call


@pytest.mark.parametrize(
    ("answered_request", "latency_s"),
    [(0, 1.5), (2, 0.5)],  # token 6 left at 11.0; with look-ahead, request 2 made it possible
)
def test_latency_from_the_request_that_made_the_audio_possible(
    answered: Call, answered_request: int, latency_s: float
) -> None:
    sending(answered, (10.0, 5), (11.0, 5), (12.0, 5))
    chunk = take(answered, audio(answered_request, 0, 6), 12.5)
    assert chunk.arrival_s == pytest.approx(2.5)
    assert chunk.latency_s == pytest.approx(latency_s)
    assert chunk.gap_s is None


def test_no_shorter_latency_from_unknown_or_done_requests(answered: Call) -> None:
    sending(answered, (10.0, 5), (11.0, 5))
    answered.accept(answer(1), 11.5)
    assert take(answered, audio(1, 0, 5), 12.0).latency_s == pytest.approx(2.0)
    assert take(answered, audio("", 1, 0), 12.0).index == 1


def test_time_starts_with_the_first_tokens_not_with_the_voice(answered: Call) -> None:
    sending(answered, (10.0, 0), (15.0, 5))
    chunks = [take(answered, audio(1, index, 1), 16.0 + index) for index in range(2)]
    assert [chunk.arrival_s for chunk in chunks] == pytest.approx([1.0, 2.0])
    assert chunks[1].gap_s == pytest.approx(1.0)


def test_nothing_is_owed_while_tokens_are_waited_for(call: Call) -> None:
    sending(call, (0.0, 5))
    assert call.owed_since is None  # only the first request, which stays open
    request(call, [1] * 5, 1.0, end=False)
    assert call.owed_since == 1.0
    call.accept(answer(1), 1.5)
    assert call.owed_since is None


def test_later_requests_do_not_excuse_a_silent_server(answered: Call) -> None:
    sending(answered, (0.0, 5), (1.0, 5), (2.0, 5))
    assert answered.owed_since == 0.0
    answered.accept(answer(0), 2.5)
    assert answered.owed_since == 2.5  # an answer arrives, two answers are still missing


def test_the_first_request_is_owed_once_the_last_is_sent(call: Call) -> None:
    sending(call, (0.0, 5), end=3.0)
    assert call.owed_since == 3.0
    take(call, audio(1, 0, 5, final=True, last=True), 3.1)
    assert call.owed_since == pytest.approx(3.3)  # after 0.2 s of audio


def stereo(index: int, samples: int, **outputs: Any) -> Any:
    both = np.stack((SAMPLES[:samples],) * 2, axis=1)
    return message(0, both, last=False, chunk_index=index, **outputs)


# Moment of the answers after 10 tokens, the answers, and the error about the last answer.
AT_ONCE, AFTER_THE_END = 0, 1
RATES: dict[str, Any] = {"sample_rate": 16_000, "samples_per_token": 480}
VIOLATIONS: list[tuple[int, list[Any], str]] = [
    (AT_ONCE, [audio(0, 0, 1), audio(0, 0, 1)], "chunk_index: the server sent chunk 0 twice"),
    (AT_ONCE, [audio(1, 2, 1), audio(0, 2, 1)], "chunk_index: the server sent chunk 2 twice"),
    (
        AFTER_THE_END,
        [audio(0, 0, 1, last=True), audio(1, 2, 9, last=True)],
        "chunk_index: the server sent 2, expected 1",
    ),
    (AFTER_THE_END, [audio(0, 0, 9, final=True)], "samples for 10 tokens, expected 9600"),
    (AFTER_THE_END, [audio(0, 0, 10, final=True, short=1)], "for 10 tokens, expected 9600"),
    (AFTER_THE_END, [audio(0, 0, 11, final=True)], "samples for 10 tokens, expected 9600"),
    (AFTER_THE_END, [audio(1, 0, 10, final=True), audio(1, 1, 0)], "1 after the final chunk"),
    (AFTER_THE_END, [answer(0), answer(1)], "after 0 chunks and marked no chunk as final"),
    (AT_ONCE, [audio(0, 0, 11)], "sent 10560 samples for 10 tokens, expected 9600"),
    (AT_ONCE, [audio(0, 0, 10, final=True)], "before its last request"),
    (AT_ONCE, [audio(0, 0, 11, final=True, end_reason=1)], "expected 9600"),
    (AT_ONCE, [audio(0, 0, 10, final=True, end_reason=3)], "end_reason: the server sent 3, expec"),
    (
        AT_ONCE,
        [audio(0, 0, 1, **RATES), audio(0, 1, 1)],
        "sent (24000, 960, 1), but (16000, 480, 1) in earlier chunks",
    ),
    (
        AT_ONCE,
        [audio(0, 0, 1), stereo(1, 960)],
        "sent (24000, 960, 2), but (24000, 960, 1) in earlier chunks",
    ),
]


@pytest.mark.parametrize(("moment", "messages", "error"), VIOLATIONS)
def test_violations_of_the_protocol_are_refused_at_once(
    answered: Call, moment: int, messages: list[Any], error: str
) -> None:
    sending(answered, (0.0, 10), end=1.0 if moment == AFTER_THE_END else None)
    answered_before = messages[:-1]
    for message in answered_before:
        answered.accept(message, 2.0)
    with pytest.raises(ProtocolError, match=re.escape(error)):
        answered.accept(messages[-1], 2.0)


def test_chunks_of_different_requests_may_arrive_in_another_order(answered: Call) -> None:
    sending(answered, (0.0, 4), (1.0, 6), end=1.0)
    [first] = answered.accept(audio(0, 0, 1), 2.0)
    assert answered.accept(audio(1, 3, 4, last=True, final=True), 3.0) == []
    assert answered.accept(audio(0, 2, 3), 4.0) == []
    rest = answered.accept(audio(0, 1, 2, last=True), 5.0)
    assert [(chunk.index, chunk.first_token, chunk.token_count) for chunk in (first, *rest)] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 3, 3),
        (3, 6, 4),
    ]
    assert [chunk.arrival_s for chunk in rest] == [5.0, 5.0, 5.0]
    assert answered.complete


def test_tokens_that_wait_to_be_sent_have_no_audio(answered: Call) -> None:
    sending(answered, (1.0, 2))
    answered.add([1], 2.0, end=False)
    with pytest.raises(ProtocolError, match="sent 2880 samples for 2 tokens, expected 1920"):
        answered.accept(audio(0, 0, 3), 3.0)


@pytest.mark.parametrize(("code", "reason"), [(1, "repeats"), (2, "silence")])
def test_a_limit_of_the_server_ends_the_utterance_before_its_last_tokens(
    answered: Call, code: int, reason: str
) -> None:
    sending(answered, (0.0, 10))
    answered.add([1] * 5, 0.5, end=False)  # waits to be sent
    chunk = take(answered, audio(0, 0, 7, final=True, short=100, end_reason=code), 1.0)
    assert (chunk.end_reason, len(chunk.audio), chunk.token_count) == (reason, 6620, 7)
    assert (answered.complete, answered.end_reason) == (True, reason)
    assert answered.next_request() is None
    with pytest.raises(
        UtteranceClosedError, match=f"^the server has ended the utterance because of {reason}, so"
    ):
        answered.add([1], 2.0, end=True)


def test_another_attempt_may_end_at_a_limit_again(call: Call) -> None:
    sending(call, (0.0, 10))
    take(call, audio(0, 0, 4), 1.0)
    call.again(2.0)
    sent = call.next_request()
    assert tokens_in(sent) == [1] * 10
    chunk = take(call, audio(0, 0, 6, final=True, end_reason=1), 3.0)
    assert (len(chunk.audio), chunk.final, chunk.end_reason) == (960 * 2, True, "repeats")


def test_samples_of_two_channels_are_counted_once(answered: Call) -> None:
    request(answered, [1] * 4, 10.0, end=True)
    last = stereo(1, 960 - 1, final=True, samples_trimmed=1)
    chunks = [take(answered, stereo(0, 2880), 11.0), take(answered, last, 12.0)]
    assert [chunk.audio.shape for chunk in chunks] == [(2880, 2), (959, 2)]
    assert [(chunk.first_token, chunk.token_count) for chunk in chunks] == [(0, 3), (3, 1)]
    assert answered.complete


def test_silence_that_was_trimmed_is_missing_in_the_sum(answered: Call) -> None:
    request(answered, [1] * 4, 10.0, end=False)
    request(answered, [1], 11.0, end=True)
    chunk = take(answered, audio(0, 0, 3, samples_trimmed=960), 12.0)
    assert (chunk.samples_trimmed, chunk.latency_s) == (960, 2.0)
    assert (chunk.first_token, chunk.token_count) == (1, 3)  # the first token was trimmed
    with pytest.raises(
        ProtocolError, match="the server sent 3840 samples for 5 tokens, expected 3839"
    ):
        answered.accept(audio(1, 1, 1, samples_trimmed=961), 13.0)


@pytest.mark.parametrize(
    ("missing", "error"), [(0, ""), (479, ""), (961, "audio: "), (-1, "audio: ")]
)
def test_samples_at_another_speed(missing: int, error: str) -> None:
    """At a speed of 5/4 a token has 768 samples. The last mel frame may be incomplete."""
    call = Call("m", Opening("anna", "int16", keep_open=False, speed=1.25), repeatable=False)
    sending(call, (0.0, 4), (1.0, 6), end=2.0)
    first = take(call, message(0, SAMPLES[: 768 * 4 + 1], last=True, chunk_index=0), 2.5)
    assert (first.first_token, first.token_count, first.latency_s) == (0, 5, 1.5)
    rest = message(1, SAMPLES[: 768 * 6 - 1 - missing], last=True, chunk_index=1, final=True)
    if error:
        with pytest.raises(ProtocolError, match=f"{error}.* for 10 tokens, expected 7680"):
            call.accept(rest, 3.0)
        return
    last = take(call, rest, 3.0)
    assert (last.first_token, last.token_count) == (4, 6)


def test_audio_that_was_delivered_is_not_delivered_again(call: Call) -> None:
    """Another attempt delivers only new audio, even if the next server cuts other chunks."""
    request(call, np.arange(10), 100.0, end=True)
    first = [take(call, part(index, index, index + 1), 101.0) for index in range(4)]
    call.interrupt()
    call.again(105.0)
    call.next_request()
    assert call.accept(part(0, 0, 3), 106.0) == []
    rest = [take(call, part(1, 3, 6), 107.0), take(call, part(2, 6, 10, final=True), 108.0)]
    assert np.array_equal(
        np.concatenate([chunk.audio for chunk in first + rest]), SAMPLES[: 10 * 960]
    )
    assert [chunk.index for chunk in first + rest] == [0, 1, 2, 3, 4, 5]
    assert [len(chunk.audio) for chunk in rest] == [2 * 960, 4 * 960]
    assert [chunk.arrival_s for chunk in rest] == [7.0, 8.0]  # since the first tokens of all
    assert [chunk.gap_s for chunk in rest] == [6.0, 1.0]
    assert call.complete


def test_a_final_chunk_is_delivered_even_without_new_audio(call: Call) -> None:
    request(call, [1, 2], 0.0, end=False)
    call.accept(part(0, 0, 2), 1.0)
    call.again(2.0)
    request(call, [], 3.0, end=True)
    assert call.next_request() is None
    last = take(call, part(0, 0, 2, final=True), 4.0)
    assert (len(last.audio), last.final) == (0, True)


def test_another_attempt_sends_the_same_tokens_under_another_id(call: Call) -> None:
    before = [request(call, tokens, 0.0, end=False) for tokens in ([], [1, 2], [3])]
    call.interrupt()
    call.add([4], 1.0, end=True)  # meanwhile
    call.again(2.0)
    after = call.next_request()
    assert tokens_in(after) == [1, 2, 3, 4]
    assert (after.id, after.parameters["sequence_end"].bool_param) == ("0", True)
    # The voice is sent again.
    assert list(after.inputs)[1:] == list(before[0].inputs)[1:]
    ids = {message.parameters["sequence_id"].string_param for message in (*before, after)}
    assert len(ids) == 2
    assert after.parameters["sequence_id"].string_param == call.id
    with pytest.raises(UtteranceClosedError):
        call.add([5], 3.0, end=False)


def test_tokens_that_wait_to_be_sent_share_a_request(answered: Call) -> None:
    answered.add([], 1.0, end=False)
    for token in range(5):
        answered.add([token], 2.0 + token, end=False)
    first = answered.next_request()
    assert answered.next_request() is None
    answered.add([5], 8.0, end=False)
    answered.add([], 9.0, end=True)
    last = answered.next_request()
    assert [tokens_in(message) for message in (first, last)] == [[0, 1, 2, 3, 4], [5]]
    assert [message.parameters["sequence_end"].bool_param for message in (first, last)] == [
        False,
        True,
    ]
    # Token 4 was added at 6.0. Request 1 answers first with the `add` at 8.0.
    assert take(answered, audio(0, 0, 5), 10.0).latency_s == pytest.approx(4.0)
    assert take(answered, audio(1, 1, 1, final=True, last=True), 10.0).latency_s == 2.0
    assert answered.complete


def test_a_server_may_be_silent_while_the_listener_has_audio(answered: Call) -> None:
    """A busy server computes a stream with audio to spare later than other streams."""
    sending(answered, (0.0, 12), (1.0, 12))
    take(answered, audio(0, 0, 12), 2.0)  # 0.48 s of audio
    assert answered.owed_since == pytest.approx(2.48)
    answered.accept(answer(0), 5.0)
    assert answered.owed_since == 5.0


def test_all_requests_of_latents_have_one_type(call: Call) -> None:
    """Also one without latents, and one of latents that happen to be whole numbers."""
    values: list[Any] = [[[0.5, 1.5]], [[0, 1]], []]
    for number, latents in enumerate(values):
        sent = request(call, latents, float(number), end=not latents).inputs[0]
        tensor = ("latents", "FP32", [len(latents), 2])
        assert (sent.name, sent.datatype, list(sent.shape)) == tensor


def test_latents_after_codes_are_refused(call: Call) -> None:
    request(call, [[3, 4]], 1.0, end=False)
    with pytest.raises(TokenError, match="latents, but this utterance began with integers"):
        request(call, [[0.5, 1.5]], 2.0, end=False)


def test_nothing_is_owed_between_attempts(call: Call) -> None:
    request(call, [1], 1.0, end=False)
    call.interrupt()
    assert call.owed_since is None
    request(call, [2], 2.0, end=True)
    assert call.owed_since is None
    call.again(5.0)
    assert call.owed_since == 5.0


def chunk(**changes: npt.NDArray[Any]) -> Any:
    outputs: dict[str, npt.NDArray[Any]] = {
        "audio": np.array([0.5, -0.5], np.float32),
        "chunk_index": np.array([2], np.int32),
        "final": np.array([True]),
    }
    return response("3", outputs | changes)


@pytest.mark.parametrize(
    ("name", "value", "sent"),
    [
        ("decoder_noise", None, False),
        ("decoder_noise", False, True),
        ("decoder_noise", True, True),
        ("speed", 1, False),
        ("speed", 1.25, True),
    ],
)
def test_a_parameter_is_sent_if_it_is_needed(name: str, value: Any, sent: bool) -> None:
    """Servers of earlier versions refuse these parameters."""
    opening = Opening("anna", **{name: value})
    parameters = build_request("m", "s", "0", as_tokens([7]), opening=opening).parameters
    assert (name in parameters) == sent
    if sent:
        parameter = parameters[name]
        assert getattr(parameter, parameter.WhichOneof("parameter_choice")) == value


def test_the_first_request_stays_open_and_asks_for_the_end_of_its_answers() -> None:
    opening = Opening("anna", keep_open=True)
    parameters = build_request("m", "s", "0", as_tokens([7]), opening=opening).parameters
    assert parameters["keep_open"].bool_param
    assert parameters["triton_enable_empty_final_response"].bool_param


@pytest.mark.parametrize("speed", [0.4, 2.5, float("nan")])
def test_an_impossible_speed_is_refused(speed: float) -> None:
    with pytest.raises(InputError, match=r"speed: .* is not from 0\.5 to 2"):
        Opening("anna", speed=speed)


def test_audio_may_be_written_to() -> None:
    answer = read_response(chunk(), "float32")
    assert answer.chunk is not None
    assert answer.chunk.audio.flags.writeable


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (chunk(audio=np.zeros(3, np.int16)), "audio: the server sent int16, expected float32"),
        (chunk(audio=np.zeros((3, 1), np.float32)), r"audio: the server sent shape \(3, 1\)"),
        (chunk(audio=np.zeros((1, 3, 2), np.float32)), r"the server sent shape \(1, 3, 2\), expec"),
        (chunk(chunk_index=np.array([1], np.int64)), "chunk_index: the server sent int64"),
        (chunk(final=np.array([True, False])), "final: the server sent 1 and 2 values"),
        (
            chunk(samples_trimmed=np.array([-1], np.int32)),
            r"samples_trimmed: the server sent \[-1\], expected one number of",
        ),
        (response("3", {"audio": np.zeros(3, np.float32)}), "chunk_index: missing"),
    ],
)
def test_responses_that_violate_the_protocol_are_refused(message: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        read_response(message, "float32")


def test_a_tensor_shorter_than_its_shape_is_refused() -> None:
    message = chunk()
    message.infer_response.raw_output_contents[0] = b"\x00" * 4
    with pytest.raises(ProtocolError, match="audio: the server sent an unreadable tensor"):
        read_response(message, "float32")
