"""A flow whose tokens have several codes, on a real server, chosen by the model folder alone.
`tests/serving/door/test_models.py` has all families.
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from safetensors.numpy import save_file

from testkit.models.codebook_model import (
    SAMPLES_PER_TOKEN,
    VOCABULARY,
    a_voice,
    some_codes,
    write_model,
)
from testkit.models.golden import snr_db
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import BOTH_MODELS, Rig, voice_inputs
from testkit.utterances import random_portions
from tests.families.cosyvoice3.tolerances import SNR_DB
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice, ServerError, TokenError

CODES = some_codes(75)
STREAMS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "codes")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig.start(folder, tmp_path_factory.mktemp("rig"), models=BOTH_MODELS) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Rig) -> Iterator[None]:
    yield
    served.wait_until_empty()


@pytest.fixture(scope="module")
def whole(folder: Path) -> NDArray[np.float32]:
    model = Token2Wav.load(folder)
    return model.vocode(model.mel(CODES, a_voice()))


@pytest.fixture(scope="module")
def voice() -> ClientVoice:
    spoken = a_voice()
    return ClientVoice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)


def test_streams_at_once_in_random_portions(
    served: Rig, name: str, voice: ClientVoice, whole: NDArray[np.float32]
) -> None:
    """Every second stream names the voice that another one has sent."""

    def synthesize(seed: int) -> NDArray[np.float32]:
        with Client(served.server.grpc_url, model=name) as client:
            speaker = voice.id if seed % 2 else voice
            chunks = list(client.synthesize(random_portions(CODES, seed), speaker))
        assert {chunk.samples_per_token for chunk in chunks} == {SAMPLES_PER_TOKEN}
        return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])

    synthesize(0)
    with ThreadPoolExecutor(STREAMS) as pool:
        for audio in pool.map(synthesize, range(STREAMS)):
            assert len(audio) == SAMPLES_PER_TOKEN * len(CODES)
            assert snr_db(audio, whole) >= SNR_DB
    with Client(served.server.grpc_url, model=name) as client:
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None


def test_the_server_undoes_a_delay_pattern(
    served: Rig, name: str, whole: NDArray[np.float32]
) -> None:
    delays = (0, 2, 1, 3)
    rows = np.full((len(CODES) + 5, 4), VOCABULARY, np.int32)  # marks
    for k, delay in enumerate(delays):
        rows[1 + delay : 1 + delay + len(CODES), k] = CODES[:, k]
    with served.connect(name) as connection:
        parameters = {"delays": "0,2,1,3"}
        connection.send(rows[:30], a_voice(), "a", start=True, parameters=parameters)
        connection.send(rows[30:], None, "a", end=True)
        answers = connection.answers(2)
        assert not answers.errors
        assert snr_db(answers.audio, whole) >= SNR_DB
        assert sum(answers.spoken[-1]) == len(CODES)
        for options, message in (
            ({"delays": "0,1"}, "delays: 2 given, but the model has 4 codebooks"),
            ({"decoder_noise": False}, "decoder_noise: given, but the decoder of this model adds"),
        ):
            connection.send(rows, a_voice(), "b", start=True, end=True, parameters=options)
            [error] = connection.answers().errors
            assert message in error


def test_the_command_takes_them_from_a_file_and_a_pipe(
    served: Rig, name: str, whole: NDArray[np.float32], tmp_path: Path
) -> None:
    np.save(tmp_path / "codes.npy", CODES)
    save_file(voice_inputs(a_voice()), tmp_path / "voice.safetensors")
    text = io.StringIO()
    np.savetxt(text, CODES, fmt="%d")
    for source in (["--tokens", "codes.npy"], ["--tokens", "-", "--codebooks", "4"]):
        arguments = [f"--model={name}", *source, "--voice=voice.safetensors", "--out=out.wav"]
        command = synth(served.server.grpc_url, *arguments, "--audio-format=float32", "--json")
        done = subprocess.run(
            command,
            cwd=tmp_path,
            input=text.getvalue(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        assert json.loads(done.stdout)["audio_s"] == pytest.approx(len(CODES) / 12.5)
        heard = soundfile.read(tmp_path / "out.wav", dtype="float32")[0]
        assert snr_db(heard, whole) >= SNR_DB


def test_invalid_codes_are_refused(served: Rig, name: str, voice: ClientVoice) -> None:
    wrong = CODES.copy()
    wrong[3, 2] = 50
    with Client(served.server.grpc_url, model=name) as client:
        for codes, message in (
            (wrong, "tokens: 50 at index 3, codebook 2, is outside the vocabulary 0 to 49"),
            (CODES[:, :3], r"^tokens: shape \(75, 3\), expected 2 dimensions, dimension 2 of len"),
        ):
            with pytest.raises(ServerError, match=message):
                list(client.synthesize([codes], voice))
        with client.open(voice) as utterance:
            utterance.push(CODES)
            with pytest.raises(TokenError, match=r"tokens: shape \(75,\), but earlier tokens"):
                utterance.push(CODES[:, 0])


def test_codes_through_the_gateway(
    served: Rig, voice: ClientVoice, whole: NDArray[np.float32], tmp_path: Path
) -> None:
    with (
        GatewayRig.start(
            tmp_path,
            grpc_url=served.server.grpc_url,
            language_model_url="http://127.0.0.1:9",  # not used, because the client sends codes
            voice=voice,
        ) as gateway,
        gateway.http() as http,
    ):
        sent = {"codes": CODES.tolist(), "voice": VOICE, "response_format": "pcm"}
        answer = http.post("/v1/stage/run", json=sent)
    assert answer.status_code == 200, answer.text
    assert snr_db(np.frombuffer(answer.content, np.int16) / np.float32(32767), whole) >= SNR_DB
