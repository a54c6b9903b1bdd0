"""Bad input: an error on that stream that names field and bound; the next stream works; nothing is
left behind.
"""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Connection, Rig, voice_inputs
from tests.served.conftest import IDLE_SECONDS, STREAM_SECONDS
from token2wav import Voice
from token2wav.serving.door.sequences import CLIENT_HEADER

Inputs = dict[str, NDArray[Any]]

CLIENT_LIMIT = "the most that one client may have (limits.streams_per_client); try again later"
IDLE = f"stream: no tokens for {IDLE_SECONDS} s, so it was closed"
AFTER_THE_END = "stream: it has ended, so it accepts no more tokens"


def changed(golden: GoldenSet, **arrays: NDArray[Any]) -> Inputs:
    return voice_inputs(golden.voice) | arrays


def without(golden: GoldenSet, name: str) -> Inputs:
    return {key: array for key, array in voice_inputs(golden.voice).items() if key != name}


def mel_with(value: float) -> NDArray[np.float32]:
    mel = np.zeros((60, 80), np.float32)
    mel[7, 3] = value
    return mel


def the_next_stream_works(connection: Connection, golden: GoldenSet) -> None:
    connection.send(golden.tokens[:2], golden.voice, "next", start=True, end=True)
    answers = connection.answers()
    assert not answers.errors
    assert answers.audio.shape == (2 * 960,)


BAD_TOKENS: list[tuple[Any, str]] = [
    ([5, -1], "tokens: -1 at index 1 is outside the vocabulary 0 to 6560"),
    ([6561], "tokens: 6561 at index 0 is outside the vocabulary 0 to 6560"),
    ([], "tokens: 0 sent; an utterance needs at least 1"),
    (np.array([5], np.int64), "inference input 'tokens' data-type is 'INT64'"),
    (np.zeros((1, 2), np.int32), "unexpected shape for input 'tokens'"),
]


@pytest.mark.parametrize(("tokens", "message"), BAD_TOKENS)
def test_bad_tokens(rig: Rig, golden: GoldenSet, tokens: Any, message: str) -> None:
    with rig.connect() as connection:
        connection.send(tokens, golden.voice, "bad", start=True, end=True)
        [error] = connection.answers().errors
        assert message in error
        the_next_stream_works(connection, golden)


# tests/test_voice.py has every fault of a voice; here is one of each place that refuses it.
BAD_VOICES: list[tuple[str, NDArray[Any], str]] = [
    ("prompt_tokens", np.full(30, 7000, np.int32), "7000 at index 0 is outside the vocabulary"),
    (
        "prompt_mel",
        np.zeros((59, 80), np.float32),
        "shape (59, 80), expected (60, 80): 2 frames",
    ),
    ("prompt_mel", mel_with(np.nan), "holds NaN or infinite values"),
    ("prompt_mel", mel_with(1e30), "1e+30 at index 7, 3 is outside -100 to 100"),
    ("speaker_embedding", np.zeros(192, np.float32), "all values are 0"),
]
BAD_TENSORS: list[tuple[str, NDArray[Any], str]] = [
    ("prompt_mel", np.zeros((60, 100), np.float32), "unexpected shape for input 'prompt_mel'"),
    ("prompt_mel", np.zeros((60, 80)), "inference input 'prompt_mel' data-type is 'FP64'"),
    ("speaker_embedding", np.ones(191, np.float32), "shape for input 'speaker_embedding'"),
]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [*((name, array, f"{name}: {words}") for name, array, words in BAD_VOICES), *BAD_TENSORS],
)
def test_bad_voice(
    rig: Rig, golden: GoldenSet, name: str, array: NDArray[Any], message: str
) -> None:
    with rig.connect() as connection:
        connection.send([1, 2], changed(golden, **{name: array}), "bad", start=True, end=True)
        [error] = connection.answers().errors
        assert message in error
        the_next_stream_works(connection, golden)


@pytest.mark.parametrize("name", ["prompt_tokens", "prompt_mel", "speaker_embedding"])
def test_missing_part_of_the_voice(rig: Rig, golden: GoldenSet, name: str) -> None:
    with rig.connect() as connection:
        connection.send([1], without(golden, name), "bad", start=True)
        [error] = connection.answers().errors
        assert (
            f"{name}: missing; the first request of an utterance needs it, or a voice_id" in error
        )
        the_next_stream_works(connection, golden)


def test_voice_in_the_middle(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send([1], golden.voice, "twice", start=True)
        assert not connection.answers().errors
        connection.send([1], golden.voice, "twice")
        assert connection.answers().errors == [
            "prompt_tokens: only the first request of an utterance may have this field"
        ]
        the_next_stream_works(connection, golden)


def test_bad_token_in_the_middle_ends_that_stream_only(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send(golden.tokens[:50], golden.voice, "good", start=True)
        connection.send([1], golden.voice, "bad", start=True)
        answers = connection.answers(requests=2)
        connection.send([9999], None, "bad")
        [wrong] = connection.answers().errors
        connection.send([2], None, "bad")
        [unknown] = connection.answers().errors
        assert wrong == "tokens: 9999 at index 0 is outside the vocabulary 0 to 6560"
        assert unknown == f"stream: it failed: {wrong}"
        connection.send([], None, "good", end=True)
        rest = connection.answers()
        assert not rest.errors
        assert len(answers.audio) + len(rest.audio) == 50 * 960


def triton_failures(rig: Rig) -> list[str]:
    return re.findall(r"^nv_inference_request_failure\{.*\} \S+$", rig.metrics(), re.M)


def test_tokens_before_a_bad_one_are_spoken(rig: Rig, golden: GoldenSet) -> None:
    before, failures = rig.ended(), triton_failures(rig)
    with rig.connect() as connection:
        connection.send([*golden.tokens[:50], 6561], golden.voice, "good", start=True, end=True)
        answers = connection.answers()
        assert answers.errors == ["tokens: 6561 at index 50 is outside the vocabulary 0 to 6560"]
        assert len(answers.audio) == 50 * 960
    rig.wait_until_empty()
    assert rig.ended() - before == {"InputError": 1}
    counted = re.search(r'^token2wav_refused_total\{what="tokens"\} (\S+)$', rig.metrics(), re.M)
    assert counted is not None
    assert float(counted[1]) >= 1
    assert triton_failures(rig) == failures  # Triton does not count streams that a model refuses


def test_a_failure_also_ends_the_request_that_was_kept_open(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send([1], golden.voice, "kept", start=True, parameters={"keep_open": True})
        connection.send([-5], None, "kept")
        assert (
            connection.answers(requests=2).errors
            == ["tokens: -5 at index 0 is outside the vocabulary 0 to 6560"] * 2
        )


def test_requests_after_the_end_do_not_cost_any_audio(rig: Rig, golden: GoldenSet) -> None:
    # seconds of work, of which the requests below see the first moments
    tokens = np.tile(golden.tokens, 8)[:1000]
    with rig.connect() as connection:
        connection.send(tokens, golden.voice, "over", start=True, end=True)
        for late, voice in (([1], None), ([-1], None), ([], golden.voice)):
            connection.send(late, voice, "over")
        answers = connection.answers(requests=4)
        assert answers.errors == [AFTER_THE_END] * 3
        assert answers.audio.shape == (960 * len(tokens),)
        connection.send([1], None, "over")
        assert connection.answers().errors == [AFTER_THE_END]
        the_next_stream_works(connection, golden)


def test_unknown_sequence(rig: Rig) -> None:
    with rig.connect() as connection:
        connection.send([1], None, "nobody")
        [error] = connection.answers().errors
        assert "sequence_id: 'nobody' is no open stream" in error


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"audio_format": "mp3"}, "audio_format: 'mp3' is not one of float32, int16, mulaw, alaw"),
        ({"keep_open": "yes"}, "keep_open: 'yes' is not a boolean"),
        (
            {"samplerate": 8000},
            "parameters: 'samplerate' is not a request parameter; expected one of audio_format, "
            "sample_rate, keep_open, steps, decoder_noise, delays, end_after_repeats, "
            "end_after_silence_s, speed, voice, stream_key",
        ),
        ({CLIENT_HEADER: "x" * 129}, f"{CLIENT_HEADER}: not a text of at most 128 characters"),
    ],
)
def test_bad_parameter(
    rig: Rig, golden: GoldenSet, parameters: dict[str, Any], message: str
) -> None:
    with rig.connect() as connection:
        connection.send([1], golden.voice, "bad", start=True, parameters=parameters)
        assert connection.answers().errors == [message]
        the_next_stream_works(connection, golden)


class TestLimits:
    def test_stream_too_long(self, limited: Rig, golden: GoldenSet) -> None:
        exceeded = "tokens: the utterance would exceed 60 tokens, the limit of one stream"
        with limited.connect() as connection:
            connection.send(np.resize(golden.tokens, 61), golden.voice)
            assert connection.answers().errors == [exceeded]
            connection.send(golden.tokens[:40], golden.voice, "long", start=True)
            assert not connection.answers().errors
            connection.send(golden.tokens[:21], None, "long")
            assert connection.answers().errors == [exceeded]
            the_next_stream_works(connection, golden)

    def test_prompt_too_long(self, limited: Rig, golden: GoldenSet) -> None:
        long_prompt = changed(
            golden,
            prompt_tokens=np.zeros(751, np.int32),
            prompt_mel=np.zeros((1502, 80), np.float32),
        )
        with limited.connect() as connection:
            connection.send([1], long_prompt)
            assert connection.answers().errors == [
                "prompt_tokens: 751 tokens; at most 750 are allowed"
            ]
            the_next_stream_works(connection, golden)

    def test_too_many_streams(self, limited: Rig, golden: GoldenSet) -> None:
        with limited.connect() as connection:
            for sequence in ("first", "second"):
                connection.send([1], golden.voice, sequence, start=True)
            assert not connection.answers(requests=2).errors
            voice = changed(golden, speaker_embedding=np.full(192, 0.25, np.float32))
            connection.send([1], voice, "third", start=True)
            assert connection.answers().errors == ["streams: all 2 are in use; try again later"]
            digest = bytes.fromhex(Voice(**voice).content_hash)
            connection.send([], None, "first", end=True)
            assert connection.answers().audio.shape == (960,)
            the_next_stream_works(connection, golden)
            connection.send([], None, "second", end=True)
            connection.answers()
            # The voice of a client that was refused pushes no voice of another client out.
            connection.send([1], {"voice_id": np.frombuffer(digest, np.uint8)})
            [error] = connection.answers().errors
            assert "is not registered here" in error

    def test_idle_streams_are_dropped(self, limited: Rig, golden: GoldenSet) -> None:
        with limited.connect() as connection:
            connection.send([1], golden.voice, "kept", start=True, parameters={"keep_open": True})
            assert connection.answers().errors == [IDLE]
            connection.send([1], golden.voice, "idle", start=True)
            assert not connection.answers().errors
            limited.wait_until_empty()
            connection.send([1], None, "idle")
            assert connection.answers().errors == [IDLE]

    def test_empty_requests_and_a_trickle_reach_a_limit(
        self, limited: Rig, golden: GoldenSet
    ) -> None:
        before = limited.ended()
        with limited.connect() as connection:
            for sequence in ("silent", "trickle"):
                connection.send([1], golden.voice, sequence, start=True)
            assert not connection.answers(requests=2).errors
            ends: dict[str, list[str]] = {"silent": [], "trickle": []}
            while not all(ends.values()):
                for sequence, tokens in (("silent", []), ("trickle", [1])):
                    if not ends[sequence]:
                        connection.send(tokens, None, sequence)
                        ends[sequence] = connection.answers().errors
                time.sleep(0.2)
        assert ends == {
            "silent": [IDLE],
            "trickle": [
                f"stream: open for {STREAM_SECONDS} s, the limit of one stream, so it was closed"
            ],
        }
        assert limited.ended() - before == {"IdleError": 1, "ExpiredError": 1}

    def test_one_client_takes_half_of_the_streams(self, limited: Rig, golden: GoldenSet) -> None:
        """A client takes half of the streams under the name in the header that the balancer sets,
        even if its requests give another name.
        """
        alice, bob = {CLIENT_HEADER: "alice"}, {CLIENT_HEADER: "bob"}
        with limited.connect(headers=alice) as one, limited.connect(headers=alice) as two:
            one.send([1], golden.voice, "first", start=True)
            assert not one.answers().errors
            for parameters in (None, bob):
                two.send([1], golden.voice, "second", start=True, parameters=parameters)
                [error] = two.answers().errors
                assert error == f"streams: client 'alice' has 1 open, {CLIENT_LIMIT}"
            with limited.connect(headers=bob) as other:
                other.send([1], golden.voice, "other", start=True, end=True)
                assert not other.answers().errors
            one.send([], None, "first", end=True)
            assert not one.answers().errors
            two.send([1], golden.voice, "second", start=True, end=True)
            assert not two.answers().errors
