"""The main job on a real server: tokens in, audio out, while tokens are still being sent. The
model in one process and the ensemble keep the same contract.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet, snr_db
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.server_rig import Connection, Rig, voice_inputs
from testkit.utterances import random_portions
from tests.families.cosyvoice3.tolerances import SNR_DB
from tests.served.conftest import ANNA, FIRST, LOOKAHEAD, STEPS
from token2wav import Token2Wav
from token2wav.serving.clocks import SLOW_SECONDS
from token2wav_client import Client, ClientVoice, audio

# Where chunks end depends on when tokens came, so sums have another order, which F0 takes into the
# phase: 1.2e-4 seen.
SERVER_EQUALS_LIBRARY = 1e-3
SHORT = 16  # utterances of one token in a row

Speak = Callable[..., NDArray[np.float32]]


def lower_mean_delay(connection: Connection, golden: GoldenSet, attempt: int) -> float:
    """Speaks short utterances, and returns the mean seconds of one.

    A server sends no early audio while the mean delay of its chunks is long, as on a busy machine.
    Chunks of one token with few steps are the fastest ones.
    """
    started = time.monotonic()
    for index in range(SHORT):
        connection.send(
            golden.tokens[:1],
            golden.voice,
            f"short {attempt} {index}",
            start=True,
            end=True,
            parameters={"steps": STEPS[1]},
        )
        assert connection.answers().chunks
    return (time.monotonic() - started) / SHORT


@pytest.fixture
def speak(rig: Rig, name: str, golden: GoldenSet) -> Speak:
    """Speaks the golden tokens by a client, and returns the decoded audio."""

    def spoken(voice: ClientVoice | str, portions: Any = None, **options: Any) -> Any:
        with Client(rig.server.grpc_url, model=name) as client:
            chunks = list(client.synthesize(portions or [golden.tokens], voice, **options))
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        decoded = [audio.decoded(chunk.audio, chunk.audio_format) for chunk in chunks]
        samples = np.concatenate(decoded)
        return samples if samples.dtype == np.float32 else samples / np.float32(32767)

    return spoken


def test_eight_streams_at_once_in_random_portions(
    speak: Speak, golden: GoldenSet, voice: ClientVoice, whole: NDArray[np.float32]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        portions = [random_portions(golden.tokens, seed) for seed in range(8)]
        streams = list(pool.map(lambda parts: speak(voice, parts), portions))
    reference = np.concatenate(
        [golden.chunk(index, "audio").numpy() for index in range(len(golden.chunks) - 1)]
    )
    for heard in streams:
        assert heard.shape == whole.shape == (960 * len(golden.tokens),)
        assert np.abs(heard - whole).max() <= SERVER_EQUALS_LIBRARY
        assert snr_db(heard[: len(reference)], reference) > SNR_DB


def test_a_voice_is_sent_once_and_named_afterwards(
    speak: Speak, voice: ClientVoice, whole: NDArray[np.float32]
) -> None:
    """The server has the voice under a name too, from its settings."""
    for speaker in (voice, voice.id, ANNA):
        assert np.abs(speak(speaker) - whole).max() <= SERVER_EQUALS_LIBRARY


def test_requests_finish_when_their_tokens_are_consumed(
    rig: Rig, name: str, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    with rig.connect(name) as connection:
        connection.send(golden.tokens[:10], golden.voice, "patient", start=True)
        assert not connection.answers().chunks  # finished, although nothing could run yet
        connection.send(golden.tokens[10:60], None, "patient")
        first = connection.answers()
        assert [(index, final) for index, final, _ in first.chunks] == [(0, False)]
        connection.send(golden.tokens[60:], None, "patient", end=True)
        rest = connection.answers()
        assert [(index, final) for index, final, _ in rest.chunks] == [(1, False), (2, True)]
        connection.send([1], golden.voice, "patient", start=True, end=True)  # the id is free again
        assert connection.answers().audio.shape == (960,)
    assert np.abs(np.concatenate((first.audio, rest.audio)) - whole).max() <= SERVER_EQUALS_LIBRARY


def test_the_first_request_may_stay_open_to_the_end(rig: Rig, name: str, golden: GoldenSet) -> None:
    with rig.connect(name) as connection:
        kept = {"keep_open": True}
        connection.send(golden.tokens[:60], golden.voice, "kept", start=True, parameters=kept)
        connection.send(golden.tokens[60:70], None, "kept")
        assert len(connection.answers().chunks) == 1  # the second request finished
        connection.send([], None, "kept", end=True)
        assert len(connection.answers(requests=2).chunks) == 1


def test_a_whole_utterance_in_one_request(
    rig: Rig, name: str, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    """The server reads arrays with strides of their own; a transposed view must not arrive
    transposed.
    """
    inputs = voice_inputs(golden.voice)
    inputs["prompt_mel"] = np.asfortranarray(inputs["prompt_mel"])
    with rig.connect(name) as connection:
        connection.send(golden.tokens, inputs)
        answers = connection.answers()
    assert [(index, final) for index, final, _ in answers.chunks] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert np.abs(answers.audio - whole).max() <= SERVER_EQUALS_LIBRARY
    sent = 0
    for (_, _, samples), (first, count) in zip(answers.chunks, answers.spoken, strict=True):
        assert first == sent // 960
        sent += len(samples)
        assert first + count == -(-sent // 960)
    assert first + count == len(golden.tokens)


def test_provisional_audio_comes_with_the_token_that_completes_it(
    limited: Rig, name: str, golden: GoldenSet
) -> None:
    first, held_back = FIRST + LOOKAHEAD, 4 * 480 + 4
    with limited.connect(name) as connection:
        deadline = time.monotonic() + PATIENCE_SECONDS
        for attempt in itertools.count():
            seconds = lower_mean_delay(connection, golden, attempt)
            sequence = f"first audio {attempt}"
            connection.send(golden.tokens[: first - 1], golden.voice, sequence, start=True)
            assert not connection.answers().chunks
            connection.send(golden.tokens[first - 1 : first], None, sequence)
            early_audio = connection.answers()
            connection.send(golden.tokens[first:], None, sequence, end=True)
            rest = connection.answers()
            if early_audio.chunks or time.monotonic() > deadline:
                break
            assert not rest.errors + early_audio.errors
        if not early_audio.chunks and seconds > SLOW_SECONDS / 2:
            pytest.skip(
                f"one token takes {seconds:.2f} s; with chunks of {SLOW_SECONDS} s none is early"
            )
        [(index, _, early)] = early_audio.chunks
        assert (index, len(early)) == (0, 960 * FIRST - held_back)
    assert not rest.errors
    with Token2Wav.load(limited.server.model).stream(golden.voice) as stream:
        chunks = stream.push(golden.tokens[:first]) + stream.finish(golden.tokens[first:])
    expected = np.concatenate([chunk.audio for chunk in chunks])
    assert expected.shape == (960 * len(golden.tokens),)
    spoken = np.concatenate([early, rest.audio])
    assert np.abs(spoken - expected).max() <= SERVER_EQUALS_LIBRARY


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
