"""StreamFlow before BigVGAN through the real server, by its model folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.streamflow_model import SAMPLE_RATE, SAMPLES_PER_TOKEN, a_voice, write_model
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from token2wav import RuntimeConfig, Token2Wav, Voice
from token2wav_client import Client, ClientVoice, ServerError

AUDIO = 1e-4
TOKENS = np.random.default_rng(4).integers(0, 6561, 130).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "streamflow")


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig.start(folder, tmp_path_factory.mktemp("rig"), models=BOTH_MODELS) as rig:
        yield rig


@pytest.fixture(scope="module")
def local(folder: Path) -> Token2Wav:
    return Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))


def spoken(
    url: str, name: str, tokens: NDArray[np.int32], voice: Voice, parts: int
) -> NDArray[np.float32]:
    with Client(url, model=name) as client:
        sent = ClientVoice(voice.prompt_tokens, voice.prompt_mel, voice.speaker_embedding)
        chunks = list(client.synthesize(np.array_split(tokens, parts), sent))
    assert {(chunk.sample_rate, chunk.samples_per_token) for chunk in chunks} == {
        (SAMPLE_RATE, SAMPLES_PER_TOKEN)
    }
    return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])


def test_streams_side_by_side_equal_the_library(served: Rig, name: str, local: Token2Wav) -> None:
    cases = [(TOKENS[: 130 - 23 * seed], a_voice(seed), 1 + 6 * seed) for seed in range(4)]
    with ThreadPoolExecutor(len(cases)) as threads:
        heard = [threads.submit(spoken, served.server.grpc_url, name, *case) for case in cases]
        for (tokens, voice, _), future in zip(cases, heard, strict=True):
            audio = future.result()
            assert len(audio) == len(tokens) * SAMPLES_PER_TOKEN
            assert np.abs(audio - local.synthesize(tokens, voice)).max() <= AUDIO
    served.wait_until_empty()


def test_health_and_refusals(served: Rig, name: str) -> None:
    voice = ClientVoice(
        np.arange(5, dtype=np.int32), np.zeros((20, 80), np.float32), np.ones(192, np.float32)
    )
    with Client(served.server.grpc_url, model=name) as client:
        assert client.health(timeout_s=PATIENCE_SECONDS).first_audio_s is not None
        with pytest.raises(ServerError, match="prompt_tokens: 5 tokens, expected 0"):
            list(client.synthesize([TOKENS], voice))
    served.wait_until_empty()
