"""The stages as models of their own, on a real server: the same audio, many streams in a batch,
nothing left behind.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from testkit.models.golden import TINY, GoldenSet, snr_db
from testkit.rigs.server_rig import Connection, Rig, voice_inputs
from testkit.utterances import random_portions
from tests.families.cosyvoice3.tolerances import SNR_DB
from tests.served.takeover import ATTACKS, IDENTITIES, Attack, Identity, attempt
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav.serving.door.sequences import CLIENT_HEADER
from token2wav_client import Client, ClientVoice
from token2wav_server.launcher.supervisor import Canary

MODEL = "token2wav_ensemble"
IDLE_SECONDS = 20.0
IN = f"in ensemble '{MODEL}', "  # how Triton begins messages of inner models


@pytest.fixture(scope="module")
def ensemble(golden: GoldenSet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    settings = (
        "limits: {streams: 10, stream_tokens: 200, streams_per_client: 1, "
        # so that no hop is cut short
        f"idle_seconds: {IDLE_SECONDS}, player_buffer_seconds: 60}}\n"
        "voices: [anna.safetensors]"
    )
    folder = tmp_path_factory.mktemp("ensemble")
    save_file(voice_inputs(golden.voice), folder / "anna.safetensors")
    with Rig.start(TINY, folder, settings, models=(MODEL,)) as rig:
        yield rig


@pytest.fixture
def connection(ensemble: Rig) -> Iterator[Connection]:
    with ensemble.connect(MODEL) as connection:
        yield connection


@pytest.fixture(autouse=True)
def _nothing_is_left(ensemble: Rig) -> Iterator[None]:
    yield
    ensemble.wait_until_empty()


@pytest.fixture(scope="module")
def whole(model: Token2Wav, golden: GoldenSet) -> NDArray[np.float32]:
    return model.synthesize(golden.tokens, golden.voice)


def batches(ensemble: Rig, stage: str) -> tuple[int, int]:
    """Returns the number of batches that a stage has run, and of batches with one stream only."""
    text = ensemble.metrics()
    [alone] = re.findall(rf'token2wav_batch_streams_bucket{{le="1.0",model="{stage}"}} (\d+)', text)
    [count] = re.findall(rf'token2wav_batch_streams_count{{model="{stage}"}} (\d+)', text)
    return int(count), int(alone)


def test_the_canary_of_the_supervisor_can_speak_with_it(ensemble: Rig) -> None:
    canary = Canary(60.0, 60.0, ensemble.server.models)
    assert canary.start(ensemble.server.grpc_url).result() is None


def test_one_stream(connection: Connection, golden: GoldenSet, whole: NDArray[np.float32]) -> None:
    connection.send(golden.tokens[:10], golden.voice, "one", start=True)
    assert not connection.answers().chunks  # finished, although nothing could run yet
    connection.send(golden.tokens[10:60], None, "one")
    first = connection.answers()
    assert [(index, final) for index, final, _ in first.chunks] == [(0, False)]
    connection.send(golden.tokens[60:], None, "one", end=True)
    rest = connection.answers()
    assert [(index, final) for index, final, _ in rest.chunks] == [(1, False), (2, True)]
    audio = np.concatenate((first.audio, rest.audio))
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY


def test_eight_streams_share_batches(
    ensemble: Rig, golden: GoldenSet, voice: ClientVoice, whole: NDArray[np.float32]
) -> None:
    def synthesize(seed: int) -> list[tuple[int, bool, NDArray[np.generic]]]:
        with Client(ensemble.server.grpc_url, model=MODEL) as client:
            portions = random_portions(golden.tokens, seed)
            return [
                (chunk.index, chunk.final, chunk.audio)
                for chunk in client.synthesize(portions, voice)
            ]

    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(synthesize, range(8)))
    reference = np.concatenate(
        [golden.chunk(index, "audio").numpy() for index in range(len(golden.chunks) - 1)]
    )
    for chunks in streams:
        assert [(index, final) for index, final, _ in chunks] == [(0, False), (1, False), (2, True)]
        audio = np.concatenate([audio for _, _, audio in chunks])
        assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY
        assert snr_db(audio[: len(reference)], reference) > SNR_DB
    for stage in ("flow", "vocoder"):
        count, alone = batches(ensemble, stage)
        assert alone < count


def test_all_chunks_of_an_utterance_at_once_and_sixteen_bits(
    connection: Connection, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    """Both stages get all chunks of one stream together."""
    connection.send(golden.tokens, golden.voice, parameters={"audio_format": "int16"})
    answers = connection.answers()
    assert [(index, final) for index, final, _ in answers.chunks] == [
        (0, False),
        (1, False),
        (2, True),
    ]
    assert answers.audio.dtype == np.int16
    assert np.abs(answers.audio / 32767 - whole).max() <= 0.5 / 32767 + SERVER_EQUALS_LIBRARY


def test_named_voice(connection: Connection, golden: GoldenSet, whole: NDArray[np.float32]) -> None:
    connection.send(golden.tokens[:1], golden.voice)
    assert not connection.answers().errors
    name = np.frombuffer(bytes.fromhex(golden.voice.content_hash), np.uint8)
    connection.send(golden.tokens, {"voice_id": name})
    assert np.abs(connection.answers().audio - whole).max() <= SERVER_EQUALS_LIBRARY


def test_a_voice_of_the_settings(
    ensemble: Rig, connection: Connection, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    with Client(ensemble.server.grpc_url, model=MODEL) as client:
        audio = np.concatenate(
            [chunk.audio for chunk in client.synthesize([golden.tokens], "anna")]
        )
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY
    connection.send([1], parameters={"voice": "eve"})
    assert connection.answers().errors == [
        f"{IN}voice: 'eve' is unknown; this server has the voices anna"
    ]


def test_abandoned_streams_are_freed_in_all_stages(ensemble: Rig, golden: GoldenSet) -> None:
    with ensemble.connect(MODEL) as connection:
        connection.send(golden.tokens[:60], golden.voice, "abandoned", start=True)
        assert len(connection.answers().chunks) == 1
        assert ensemble.open_streams() == {"scheduler": 1, "engine": 1, "flow": 1, "vocoder": 1}
        connection.send(golden.tokens, golden.voice)  # and leaves while this is computed
    with ensemble.connect(MODEL) as connection:
        connection.send([1], golden.voice, "silent", start=True)
        while not (errors := connection.answers().errors):
            time.sleep(0.2)
            connection.send([], None, "silent")  # an empty message does not count as activity
        assert errors == [f"{IN}stream: no tokens for {IDLE_SECONDS:g} s, so it was closed"]
    ensemble.wait_until_empty()
    with ensemble.connect(MODEL) as connection:
        connection.send(golden.tokens[60:], None, "abandoned", end=True)
        [error] = connection.answers().errors
        assert error == f"{IN}stream: no tokens for {IDLE_SECONDS:g} s, so it was closed"
        # free again
        connection.send(golden.tokens[:1], golden.voice, "abandoned", start=True, end=True)
        assert connection.answers().audio.shape == (960,)


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_a_stream_cannot_be_taken_over(
    attack: Attack, ensemble: Rig, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    """The errors equal the one-process model's, after Triton's prefix that names the ensemble."""
    for name, identities in IDENTITIES.items():
        outcome = attempt(ensemble, golden, attack, identities, sequence=21, model=MODEL)
        assert not outcome.errors, name
        assert np.abs(outcome.audio - whole).max() <= SERVER_EQUALS_LIBRARY, name
        assert not outcome.stolen, name
        assert len(outcome.refusals) == len(attack.tokens), name
        assert all("an open stream of another client" in refusal for refusal in outcome.refusals), (
            name
        )


def test_two_nameless_clients_with_one_id(
    ensemble: Rig, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    outcome = attempt(
        ensemble, golden, ATTACKS[0], (Identity(), Identity()), sequence=21, model=MODEL
    )
    assert np.abs(outcome.audio - whole[: len(outcome.audio)]).max() <= SERVER_EQUALS_LIBRARY
    assert not outcome.stolen
    for errors in (outcome.errors, outcome.refusals):
        assert errors
        assert all(
            "'21' was started a second time while its stream was open" in error for error in errors
        )


def test_an_unknown_parameter_is_refused(connection: Connection, golden: GoldenSet) -> None:
    connection.send([1], golden.voice, parameters={"samplerate": 8000})
    [error] = connection.answers().errors
    assert error.startswith(
        f"{IN}parameters: 'samplerate' is not a request parameter; expected one of audio_format, "
        f"sample_rate"
    )


def test_a_bad_token_frees_all_stages_of_its_stream_only(
    ensemble: Rig, connection: Connection, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    with ensemble.connect(MODEL) as other:
        connection.send(golden.tokens[:60], golden.voice, "good", start=True)
        not_idle_before = time.monotonic() + IDLE_SECONDS
        other.send(golden.tokens[:60], golden.voice, "bad", start=True)
        first = connection.answers()
        assert len(other.answers().chunks) == 1
        other.send([5, 6561], None, "bad", end=True)
        connection.send(golden.tokens[60:], None, "good", end=True)
        assert other.answers().errors == [
            f"{IN}tokens: 6561 at index 1 is outside the vocabulary 0 to 6560"
        ]
    audio = np.concatenate((first.audio, connection.answers().audio))
    assert np.abs(audio - whole).max() <= SERVER_EQUALS_LIBRARY
    ensemble.wait_until_empty(not_idle_before - time.monotonic())


def test_a_client_with_a_name_gets_its_share(
    ensemble: Rig, connection: Connection, golden: GoldenSet
) -> None:
    connection.send(golden.tokens[:1], golden.voice, "unnamed", start=True)
    assert not connection.answers().errors
    with ensemble.connect(MODEL, headers={CLIENT_HEADER: "alice"}) as named:
        named.send(golden.tokens[:1], golden.voice, "one", start=True)
        assert not named.answers().errors
        named.send(golden.tokens[:1], golden.voice, "another", start=True)
        [error] = named.answers().errors
        assert error.startswith(f"{IN}streams: client 'alice' has 1 open, ")
        named.send([], None, "one", end=True)
        assert named.answers().audio.shape == (960,)
    connection.send([], None, "unnamed", end=True)
    assert connection.answers().audio.shape == (960,)


def test_malformed_requests_are_refused(connection: Connection, golden: GoldenSet) -> None:
    connection.send([1], None, "voiceless", start=True)
    connection.send([-1], golden.voice, "negative", start=True)
    connection.send([], golden.voice)
    connection.send([1] * 201, golden.voice)
    connection.send([1], golden.voice, parameters={"audio_format": "mp3"})
    errors = connection.answers(requests=5).errors
    assert sorted(error.removeprefix(IN) for error in errors) == [
        "audio_format: 'mp3' is not one of float32, int16, mulaw, alaw",
        "prompt_tokens: missing; the first request of an utterance needs it, or a voice_id",
        "tokens: -1 at index 0 is outside the vocabulary 0 to 6560",
        "tokens: 0 sent; an utterance needs at least 1",
        "tokens: the utterance would exceed 200 tokens, the limit of one stream",
    ]
    connection.send(golden.tokens[:2], golden.voice)
    assert connection.answers().audio.shape == (2 * 960,)
