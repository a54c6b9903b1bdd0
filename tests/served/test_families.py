"""A flow other than CosyVoice3's on a real server, with attention blocks of the settings: audio as
from the library, and isolation of errors. `tests/serving/door/test_models.py` has all families.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from safetensors.numpy import save_file

from testkit.models.caching_families import write_family
from testkit.models.family_golden import FamilyGolden
from testkit.models.golden import ROOT, snr_db
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.gateway_rig import VOICE, GatewayRig
from testkit.rigs.server_rig import BOTH_MODELS, Rig, voice_inputs
from testkit.utterances import random_portions
from token2wav import StreamConfig, Token2Wav, Voice
from token2wav.config.model_config import ModelConfig
from token2wav_client import Client, ClientVoice

BLOCK_TOKENS = 10
AUDIO = 1e-3  # tolerance of 16-bit audio
# Batches sum in another order than single streams, and F0 turns rounding into phase; 75 dB seen.
SNR_DB = 60

# Text of a token from language models, by names of examples/llm_stream.py.
PRINTED = {
    "cosyvoice": "<|speech_{}|>",
    "stepaudio2": "<audio_{}>",
    "minicpmo": "{} ",
    "chatterbox": "{}, ",
}


@dataclass(frozen=True)
class Served:
    """Served model, with the library's audio of an utterance."""

    rig: Rig
    config: ModelConfig
    tokens: NDArray[np.int32]
    voice: Voice
    whole: NDArray[np.float32]

    @property
    def client_voice(self) -> ClientVoice:
        return ClientVoice(
            self.voice.prompt_tokens, self.voice.prompt_mel, self.voice.speaker_embedding
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Starts one server with both of the project's models."""
    settings = f"stream: {{first_tokens: 0, block_tokens: {BLOCK_TOKENS}}}"
    golden = FamilyGolden("cosyvoice2", "tiny")
    folder = write_family("cosyvoice2", tmp_path_factory.mktemp("model"))
    path, key = folder / "cosyvoice2.yaml", "        macaron_style: False\n"
    text = path.read_text()
    assert key in text
    path.write_text(text.replace(key, f"{key}        use_dynamic_chunk: True\n"))
    voice = Voice(
        golden["prompt_token"].numpy(), golden["prompt_feat"].numpy(), golden["embedding"].numpy()
    )
    tokens = np.tile(golden["token"].numpy(), 3)[:150].astype(np.int32)
    model = Token2Wav.load(folder, stream=StreamConfig(block_tokens=BLOCK_TOKENS))
    whole = model.synthesize(tokens, voice)
    server = tmp_path_factory.mktemp("server")
    with Rig.start(folder, server, settings, models=BOTH_MODELS) as rig:
        yield Served(rig, model.config, tokens, voice, whole)


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Served) -> Iterator[None]:
    yield
    served.rig.wait_until_empty()


def test_eight_streams_at_once_in_random_portions(name: str, served: Served) -> None:
    def synthesize(seed: int) -> NDArray[np.float32]:
        with Client(served.rig.server.grpc_url, model=name) as client:
            portions = random_portions(served.tokens, seed)
            audio = np.concatenate(
                [chunk.audio for chunk in client.synthesize(portions, served.client_voice)]
            )
            return audio.astype(np.float32)

    with ThreadPoolExecutor(8) as pool:
        for audio in pool.map(synthesize, range(8)):
            assert audio.shape == served.whole.shape
            assert snr_db(audio, served.whole) > SNR_DB


def test_errors_of_one_stream_do_not_affect_others(name: str, served: Served) -> None:
    """One stream gets a bad token, and its client abandons two others.

    One of the two abandoned streams is waiting, the other one is being computed.
    """
    [vocabulary] = served.config.tokens.codebook_sizes
    with served.rig.connect(name) as connection, served.rig.connect(name) as leaver:
        for sequence in ("good", "bad"):
            connection.send(served.tokens[:60], served.voice, sequence, start=True)
        if name == "token2wav":  # the ensemble cannot tell before the idle time-out
            leaver.send(served.tokens, served.voice, "left", start=True, end=True)
            leaver.send([1], served.voice, "waiting", start=True, parameters={"keep_open": True})
        connection.send([1, vocabulary], None, "bad", end=True)
        connection.send(served.tokens[60:], None, "good", end=True)
        leaver.client.stop_stream(cancel_requests=True)
        answers = connection.answers(requests=4)
    assert answers.errors
    for error in answers.errors:
        outside = f"is outside the vocabulary 0 to {vocabulary - 1}"
        assert f"tokens: {vocabulary} at index 1 {outside}" in error
    last = max(index for index, _, _ in answers.chunks)
    tail = next(audio for index, _, audio in answers.chunks if index == last)
    assert snr_db(tail, served.whole[-len(tail) :]) > SNR_DB


@pytest.mark.parametrize("family", PRINTED)
def test_speaking_the_output_of_a_language_model(
    served: Served, family: str, tmp_path: Path
) -> None:
    voice, out = tmp_path / "voice.safetensors", tmp_path / "out.wav"
    save_file(voice_inputs(served.voice), voice)
    command = [sys.executable, str(ROOT / "examples" / "llm_stream.py"), f"--family={family}"]
    command += [f"--voice={voice}", f"--out={out}", f"--url={served.rig.server.grpc_url}"]
    done = subprocess.run(
        command,
        input="Sure! " + "".join(map(PRINTED[family].format, served.tokens)),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    audio, _ = soundfile.read(out, dtype="float32")
    assert audio.shape == served.whole.shape
    assert np.abs(audio - served.whole).max() <= AUDIO


def test_codes_of_its_language_model_through_the_gateway(served: Served, tmp_path: Path) -> None:
    with (
        GatewayRig.start(
            tmp_path,
            grpc_url=served.rig.server.grpc_url,
            language_model_url="http://127.0.0.1:9",  # not used, because the client sends codes
            voice=served.client_voice,
        ) as gateway,
        gateway.http() as http,
    ):
        sent = {"codes": served.tokens.tolist(), "voice": VOICE, "response_format": "pcm"}
        answer = http.post("/v1/stage/run", json=sent)
    assert answer.status_code == 200, answer.text
    audio = np.frombuffer(answer.content, np.int16) / 32767
    assert audio.shape == served.whole.shape
    assert np.abs(audio - served.whole).max() <= AUDIO
