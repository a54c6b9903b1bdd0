"""Tokens of several codes through the real server, chosen by the model folder alone."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
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
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from tests.families.cosyvoice3.tolerances import SNR_DB
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice, ServerError, TokenError

CODES = some_codes(75)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "codes")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig.start(folder, tmp_path_factory.mktemp("rig"), models=BOTH_MODELS) as rig:
        yield rig


@pytest.fixture(scope="module")
def voice() -> ClientVoice:
    spoken = a_voice()
    return ClientVoice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)


def test_a_stream_is_the_whole(served: Rig, name: str, folder: Path, voice: ClientVoice) -> None:
    model = Token2Wav.load(folder)
    whole = model.vocode(model.mel(CODES, a_voice()))
    with Client(served.server.grpc_url, model=name) as client:
        for speaker in (voice, voice.id):  # named, too, once it was sent
            chunks = list(client.synthesize(np.array_split(CODES, 9), speaker))
            assert len(chunks) > 2
            audio = np.concatenate([chunk.audio for chunk in chunks])
            assert len(audio) == SAMPLES_PER_TOKEN * len(CODES)
            assert snr_db(audio, whole) >= SNR_DB
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
    served.wait_until_empty()


def test_the_server_undoes_a_delay_pattern(served: Rig, name: str, folder: Path) -> None:
    model, voice, delays = Token2Wav.load(folder), a_voice(), (0, 2, 1, 3)
    whole = model.vocode(model.mel(CODES, voice))
    rows = np.full((len(CODES) + 5, 4), VOCABULARY, np.int32)  # marks
    for k, delay in enumerate(delays):
        rows[1 + delay : 1 + delay + len(CODES), k] = CODES[:, k]
    parameters = {"delays": "0,2,1,3"}
    with served.connect(name) as connection:
        connection.send(rows[:30], voice, "a", start=True, parameters=parameters)
        connection.send(rows[30:], None, "a", end=True)
        answers = connection.answers(2)
        assert not answers.errors
        assert snr_db(answers.audio, whole) >= SNR_DB
        assert sum(answers.spoken[-1]) == len(CODES)
        connection.send(rows, voice, "b", start=True, end=True, parameters={"delays": "0,1"})
        [error] = connection.answers().errors
        assert "delays: 2 given, but the model has 4 codebooks" in error
        options = {"decoder_noise": False}
        connection.send(rows, voice, "c", start=True, end=True, parameters=options)
        [error] = connection.answers().errors
        assert "decoder_noise: given, but the decoder of this model adds no noise" in error
    served.wait_until_empty()


def test_the_command_takes_them_from_a_file_and_a_pipe(
    served: Rig, name: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "codes.npy", CODES)
    spoken = a_voice()
    arrays = {
        field: getattr(spoken, field)
        for field in ("prompt_tokens", "prompt_mel", "speaker_embedding")
    }
    save_file(arrays, tmp_path / "voice.safetensors")
    text = io.StringIO()
    np.savetxt(text, CODES, fmt="%d")
    heard = []
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
        heard.append(soundfile.read(tmp_path / "out.wav", dtype="float32")[0])
    assert snr_db(heard[1], heard[0]) >= SNR_DB


def test_invalid_codes_are_refused(served: Rig, name: str, voice: ClientVoice) -> None:
    wrong = CODES.copy()
    wrong[3, 2] = 50
    with Client(served.server.grpc_url, model=name) as client:
        with pytest.raises(
            ServerError,
            match="tokens: 50 at index 3, codebook 2, is outside the vocabulary 0 to 49",
        ):
            list(client.synthesize([wrong], voice))
        with pytest.raises(
            ServerError,
            match=r"^tokens: shape \(75, 3\), expected 2 dimensions, dimension 2 of length 4 for",
        ):
            list(client.synthesize([CODES[:, :3]], voice))
        with client.open(voice) as utterance:
            utterance.push(CODES)
            with pytest.raises(TokenError, match=r"tokens: shape \(75,\), but earlier tokens"):
                utterance.push(CODES[:, 0])
    served.wait_until_empty()
