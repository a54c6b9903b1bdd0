"""The main job on a real server: tokens in, audio out, while tokens are still being sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet, snr_db
from testkit.rigs.server_rig import Rig, voice_inputs
from testkit.utterances import random_portions
from tests.families.cosyvoice3.tolerances import SNR_DB
from token2wav import Token2Wav, Voice
from token2wav_client import Client, ClientVoice

# Where chunks end depends on when tokens came, so sums have another order, which F0 takes into the
# phase: 1.2e-4 seen.
SERVER_EQUALS_LIBRARY = 1e-3


@pytest.fixture(scope="module")
def whole(model: Token2Wav, golden: GoldenSet) -> NDArray[np.float32]:
    return model.synthesize(golden.tokens, golden.voice)


def test_eight_streams_at_once_in_random_portions(
    rig: Rig, golden: GoldenSet, voice: ClientVoice, whole: NDArray[np.float32]
) -> None:
    def synthesize(seed: int) -> list[NDArray[np.generic]]:
        with Client(rig.server.grpc_url) as client:
            return [
                chunk.audio
                for chunk in client.synthesize(random_portions(golden.tokens, seed), voice)
            ]

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(synthesize, range(8)))
    reference = np.concatenate(
        [golden.chunk(index, "audio").numpy() for index in range(len(golden.chunks) - 1)]
    )
    for chunks in streams:
        audio = np.concatenate(chunks)
        assert len(audio) == 960 * len(golden.tokens)
        assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY
        assert snr_db(audio[: len(reference)], reference) > SNR_DB


def test_many_utterances_share_one_grpc_stream(
    rig: Rig, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    with rig.connect() as connection:
        for sequence in ("a", "b"):
            connection.send(golden.tokens[:100], golden.voice, sequence, start=True)
        for sequence in ("a", "b"):
            connection.send(golden.tokens[100:], None, sequence, end=True)
        answers = connection.answers(requests=4)
    assert not answers.errors
    assert sorted(index for index, _, _ in answers.chunks) == [0, 0, 1, 1, 2, 2]
    chunks = {index: audio for index, _, audio in answers.chunks}
    assert (
        np.abs(np.concatenate([chunks[index] for index in range(3)]) - whole).max()
        <= SERVER_EQUALS_LIBRARY
    )


@pytest.mark.parametrize(("start", "end"), [(False, False), (True, True), (True, False)])
def test_a_request_without_sequence_id_is_a_whole_utterance(
    rig: Rig, golden: GoldenSet, whole: NDArray[np.float32], start: bool, end: bool
) -> None:
    with rig.connect() as connection:
        connection.send(golden.tokens, golden.voice, start=start, end=end)
        answers = connection.answers()
    assert not answers.errors
    assert [(index, final) for index, final, _ in answers.chunks] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert np.abs(answers.audio - whole).max() <= SERVER_EQUALS_LIBRARY


def test_one_request_with_both_flags_and_an_integer_id(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send(golden.tokens[:1], golden.voice, 2**62, start=True, end=True)
        answers = connection.answers()
    assert not answers.errors
    assert answers.audio.shape == (960,)


def test_requests_finish_when_their_tokens_are_consumed(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send(golden.tokens[:10], golden.voice, "patient", start=True)
        assert not connection.answers().chunks  # finished, although nothing could run yet
        connection.send(golden.tokens[10:60], None, "patient")
        assert [index for index, _, _ in connection.answers().chunks] == [0]
        connection.send([], None, "patient", end=True)
        assert [final for _, final, _ in connection.answers().chunks] == [True]


def test_first_request_may_stay_open_to_the_end(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send(
            golden.tokens[:60], golden.voice, "kept", start=True, parameters={"keep_open": True}
        )
        connection.send(golden.tokens[60:70], None, "kept")
        assert len(connection.answers().chunks) == 1  # the second request finished
        connection.send([], None, "kept", end=True)
        assert len(connection.answers(requests=2).chunks) == 1


def test_sixteen_bit_audio(rig: Rig, golden: GoldenSet, whole: NDArray[np.float32]) -> None:
    with rig.connect() as connection:
        connection.send(golden.tokens, golden.voice, parameters={"audio_format": "int16"})
        audio = connection.answers().audio
    assert audio.dtype == np.int16
    assert np.abs(audio / 32767 - whole).max() <= 0.5 / 32767 + SERVER_EQUALS_LIBRARY


def test_an_id_is_free_again_after_the_end(rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        for _ in range(2):
            connection.send(golden.tokens[:5], golden.voice, "again", start=True, end=True)
            assert connection.answers().audio.shape == (5 * 960,)


def test_speaker_without_a_recording(rig: Rig, golden: GoldenSet, model: Token2Wav) -> None:
    voice = Voice([], np.zeros((0, 80)), golden.voice.speaker_embedding)
    with rig.connect() as connection:
        connection.send(golden.tokens, voice)
        audio = connection.answers().audio
    assert np.abs(audio - model.synthesize(golden.tokens, voice)).max() <= SERVER_EQUALS_LIBRARY


def test_ready_live_and_metadata(rig: Rig) -> None:
    with rig.connect() as connection:
        client = connection.client
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("token2wav")
        metadata = client.get_model_metadata("token2wav", as_json=True)
    inputs = {item["name"]: (item["datatype"], item["shape"]) for item in metadata["inputs"]}
    assert inputs == {
        "tokens": ("INT32", ["-1"]),
        "prompt_tokens": ("INT32", ["-1"]),
        "prompt_mel": ("FP32", ["-1", "80"]),
        "speaker_embedding": ("FP32", ["192"]),
        "voice_id": ("UINT8", ["32"]),
    }
    assert {item["name"] for item in metadata["outputs"]} == {
        "audio",
        "chunk_index",
        "final",
        "sample_rate",
        "samples_per_token",
        "samples_trimmed",
        "first_token",
        "token_count",
        "end_reason",
    }


def test_voice_inputs_arrive_unchanged(
    rig: Rig, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    """The server reads arrays with strides of their own; a transposed view must not arrive
    transposed.
    """
    inputs = voice_inputs(golden.voice)
    inputs["prompt_mel"] = np.asfortranarray(inputs["prompt_mel"])
    with rig.connect() as connection:
        connection.send(golden.tokens, inputs)
        answers = connection.answers()
    assert np.abs(answers.audio - whole).max() <= SERVER_EQUALS_LIBRARY
    sent = 0
    for (_, _, audio), (first, count) in zip(answers.chunks, answers.spoken, strict=True):
        assert first == sent // 960
        sent += len(audio)
        assert first + count == -(-sent // 960)
    assert first + count == len(golden.tokens)
