"""Bad input over the wire: an error on that stream that names field and bound; the next stream
works; nothing is left behind. `tests/serving` has every refusal of the model, and this file one of
each place that refuses, in both models.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from testkit.door import named
from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import BOTH_MODELS, Connection, Rig, voice_inputs
from tests.served.conftest import ANNA
from token2wav.serving.door.sequences import CLIENT_HEADER

UNKNOWN = "0" * 64
VOICELESS: dict[str, Any] = dict.fromkeys(("prompt_tokens", "prompt_mel", "speaker_embedding"))


def the_next_stream_works(connection: Connection, golden: GoldenSet) -> None:
    connection.send(golden.tokens[:2], golden.voice, "next", start=True, end=True)
    answers = connection.answers()
    assert not answers.errors
    assert answers.audio.shape == (2 * 960,)


# Tokens, changed inputs of the voice (None removes one), parameters, and the message.
Refusal = tuple[Any, dict[str, Any], dict[str, Any], str]
OURS: list[Refusal] = [
    ([-1], {}, {}, "tokens: -1 at index 0 is outside the vocabulary 0 to 6560"),
    ([], {}, {}, "tokens: 0 sent; an utterance needs at least 1"),
    ([1] * 15_001, {}, {}, "tokens: the utterance would exceed 15000 tokens, the limit of one str"),
    ([1], {"prompt_mel": np.zeros((59, 80), np.float32)}, {}, "prompt_mel: shape (59, 80), expec"),
    ([1], {"speaker_embedding": np.zeros(192, np.float32)}, {}, "speaker_embedding: all values a"),
    ([1], {"prompt_mel": None}, {}, "prompt_mel: missing; the first request of an utterance nee"),
    ([1], VOICELESS | named(UNKNOWN), {}, f"voice_id: '{UNKNOWN}' is not registered here; send "),
    ([1], named(UNKNOWN), {}, "voice_id: sent together with a voice; send only one of them"),
    ([1], VOICELESS, {"voice": 'Änne "b'}, "voice: 'Änne .b' is unknown; this server has the vo"),
    ([1], {}, {"voice": ANNA}, "voice: sent together with a voice; send only one of them"),
    ([1], VOICELESS, {"voice": 7}, "voice: 7 is not a valid voice name"),
    ([1], {}, {"audio_format": "mp3"}, "audio_format: 'mp3' is not one of float32, int16, mulaw"),
    ([1], {}, {"sample_rate": True}, "sample_rate: True is not one of 8000, 16000, 22050"),
    ([1], {}, {"steps": 4}, "steps: 4 is not one of 10, 1"),
    ([1], {}, {"keep_open": "yes"}, "keep_open: 'yes' is not a boolean"),
    ([1], {}, {"stream_key": ""}, "stream_key: not a text of 1 to 128 characters"),
    ([1], {}, {CLIENT_HEADER: "x" * 129}, f"{CLIENT_HEADER}: not a text of at most 128 charact"),
    ([1], {}, {"samplerate": 8000}, "parameters: 'samplerate' is not a request parameter; expec"),
]
# Triton checks types and shapes.
OF_TRITON: list[Refusal] = [
    (np.array([5], np.int64), {}, {}, "inference input 'tokens' data-type is 'INT64'"),
    (np.zeros((1, 2), np.int32), {}, {}, "unexpected shape for input 'tokens'"),
    ([1], {"prompt_mel": np.zeros((60, 100), np.float32)}, {}, "unexpected shape for input 'prom"),
    ([1], {"prompt_mel": np.zeros((60, 80))}, {}, "input 'prompt_mel' data-type is 'FP64'"),
    ([1], {"speaker_embedding": np.ones(191, np.float32)}, {}, "shape for input 'speaker_embeddi"),
    ([1], {"voice_id": np.zeros(2, np.uint8)}, {}, "unexpected shape for input 'voice_id'"),
]


@pytest.mark.parametrize("model", BOTH_MODELS)
@pytest.mark.parametrize("refusals", [OURS, OF_TRITON], ids=["ours", "Triton's"])
def test_a_bad_request_gets_one_sentence(
    rig: Rig, golden: GoldenSet, model: str, refusals: list[Refusal]
) -> None:
    with rig.connect(model) as connection:
        for tokens, changes, parameters, message in refusals:
            inputs: dict[str, Any] = voice_inputs(golden.voice) | changes
            present = {name: array for name, array in inputs.items() if array is not None}
            connection.send(tokens, present, "bad", start=True, end=True, parameters=parameters)
            [error] = connection.answers().errors
            if refusals is OF_TRITON:
                assert message in error
            else:
                assert re.match(re.escape(message).replace(r"\.", "."), error), error
            the_next_stream_works(connection, golden)


def test_an_id_as_a_string_does_not_kill_the_process(rig: Rig, golden: GoldenSet) -> None:
    string = triton.InferInput("voice_id", [1], "BYTES")
    string.set_data_from_numpy(np.array([UNKNOWN.encode()], np.object_))
    with rig.connect() as connection:
        connection.client.async_stream_infer("token2wav", [string])
        [error] = connection.answers().errors
        assert "data-type is 'BYTES'" in error
        the_next_stream_works(connection, golden)


def test_a_bad_token_in_the_middle_ends_that_stream_only(
    rig: Rig, name: str, golden: GoldenSet
) -> None:
    """In the ensemble, the flow and the vocoder close the stream too."""
    with rig.connect(name) as connection:
        for sequence in ("good", "bad"):
            connection.send(golden.tokens[:60], golden.voice, sequence, start=True)
        first = connection.answers(requests=2)
        connection.send([5, 9999], None, "bad", end=True)
        [wrong] = connection.answers().errors
        connection.send([2], None, "bad")
        [late] = connection.answers().errors
        assert "tokens: 9999 at index 1 is outside the vocabulary 0 to 6560" in wrong
        assert "stream: it failed: tokens: 9999" in late
        connection.send(golden.tokens[60:], None, "good", end=True)
        rest = connection.answers()
        assert not first.errors + rest.errors
        alone = len(first.audio) // 2
        assert alone + len(rest.audio) == 960 * len(golden.tokens)


def triton_failures(rig: Rig) -> dict[str, float]:
    name = "nv_inference_request_failure"
    return {key: value for key, value in rig.metrics().items() if key.startswith(name)}


def test_tokens_before_a_bad_one_are_spoken(rig: Rig, golden: GoldenSet) -> None:
    before, failures = rig.ended(), triton_failures(rig)
    with rig.connect() as connection:
        connection.send([*golden.tokens[:50], 6561], golden.voice, "good", start=True, end=True)
        answers = connection.answers()
        assert answers.errors == ["tokens: 6561 at index 50 is outside the vocabulary 0 to 6560"]
        assert len(answers.audio) == 50 * 960
    rig.wait_until_empty()
    assert rig.ended() - before == {"InputError": 1}
    assert triton_failures(rig) == failures  # Triton does not count streams that a model refuses


def test_one_client_takes_half_of_the_streams(limited: Rig, name: str, golden: GoldenSet) -> None:
    """A client takes half of the streams under the name in the header that the balancer sets, even
    if its requests give another name. A client without a name is not limited.
    """
    alice, bob = {CLIENT_HEADER: "alice"}, {CLIENT_HEADER: "bob"}
    with limited.connect(name, alice) as one, limited.connect(name, alice) as two:
        one.send([1], golden.voice, "first", start=True)
        assert not one.answers().errors
        for parameters in (None, bob):
            two.send([1], golden.voice, "second", start=True, parameters=parameters)
            [error] = two.answers().errors
            assert "streams: client 'alice' has 1 open, the most that one client may have" in error
        with limited.connect(name) as unnamed, limited.connect(name, bob) as third:
            unnamed.send([1], golden.voice, "unnamed", start=True)
            assert not unnamed.answers().errors
            third.send([1], golden.voice, "third", start=True)
            [error] = third.answers().errors
            assert error.endswith("streams: all 2 are in use; try again later")
            unnamed.send([], None, "unnamed", end=True)
            assert unnamed.answers().audio.shape == (960,)
        one.send([], None, "first", end=True)
        assert not one.answers().errors
        the_next_stream_works(two, golden)
