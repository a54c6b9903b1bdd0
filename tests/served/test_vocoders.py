"""Models with a BigVGAN, named by their folder alone, through the real server: other rates, the
same exactness.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from safetensors.numpy import save_file

from testkit.models.bigvgan_model import SAMPLE_RATE, SAMPLES_PER_TOKEN, a_voice, write_model
from testkit.models.golden import GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import synth
from testkit.rigs.server_rig import Rig
from token2wav import Token2Wav, Voice
from token2wav_client import Client, ClientVoice

AUDIO = 1e-4
TOKENS = np.random.default_rng(2).integers(0, 6561, 120).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "bigvgan16k")


# test_streamflow.py streams audio of a BigVGAN through both models.
@pytest.fixture(
    scope="module", params=["token2wav", pytest.param("token2wav_ensemble", marks=pytest.mark.slow)]
)
def name(request: pytest.FixtureRequest) -> str:
    """Name of the only model on the server."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(name: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig.start(folder, tmp_path_factory.mktemp("rig"), models=(name,)) as rig:
        yield rig


def client_voice(voice: Voice) -> ClientVoice:
    return ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)


def test_a_stream_is_the_whole_at_the_rates_of_the_folder(
    served: Rig, name: str, folder: Path
) -> None:
    model, voice = Token2Wav.load(folder), a_voice()
    with Client(served.server.grpc_url, model=name) as client:
        chunks = list(client.synthesize(np.array_split(TOKENS, 7), client_voice(voice)))
        # in a voice of the model's sizes
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
    assert len(chunks) > 2
    assert {(chunk.sample_rate, chunk.samples_per_token) for chunk in chunks} == {
        (SAMPLE_RATE, SAMPLES_PER_TOKEN)
    }
    assert sum(chunk.duration_s for chunk in chunks) == pytest.approx(
        len(TOKENS) * SAMPLES_PER_TOKEN / SAMPLE_RATE
    )
    audio = np.concatenate([chunk.audio for chunk in chunks])
    assert np.abs(audio - model.vocode(model.mel(TOKENS, voice))).max() <= AUDIO
    served.wait_until_empty()


def test_the_wav_and_the_report_have_the_rate_of_the_answers(
    served: Rig, name: str, tmp_path: Path
) -> None:
    voice = a_voice()
    np.save(tmp_path / "tokens.npy", TOKENS)
    arrays = {
        field: getattr(voice, field)
        for field in ("prompt_tokens", "prompt_mel", "speaker_embedding")
    }
    save_file(arrays, tmp_path / "voice.safetensors")
    arguments = [f"--model={name}", "--tokens=tokens.npy", "--voice=voice.safetensors"]
    command = synth(served.server.grpc_url, *arguments, "--out=out.wav", "--json")
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    report = json.loads(done.stdout)
    seconds = len(TOKENS) * SAMPLES_PER_TOKEN / SAMPLE_RATE
    assert report["audio_s"] == pytest.approx(seconds)
    assert {chunk["sample_rate"] for chunk in report["chunks"]} == {SAMPLE_RATE}
    header = soundfile.info(tmp_path / "out.wav")
    assert (header.samplerate, header.frames) == (SAMPLE_RATE, len(TOKENS) * SAMPLES_PER_TOKEN)


def test_voices_of_another_model_are_refused_with_the_shape(
    served: Rig, name: str, golden: GoldenSet
) -> None:
    with served.connect(name) as connection:
        connection.send(TOKENS, golden.voice)
        [message] = connection.answers().errors
    assert "unexpected shape for input 'prompt_mel'" in message
    assert "20" in message
