"""Qwen2.5-Omni through the real server, with the voices of its folder by their names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.family_golden import FamilyGolden
from testkit.models.qwen25_omni_model import SPEAKERS, a_voice, write_model
from testkit.rigs.server_rig import Rig
from token2wav import RuntimeConfig, Token2Wav
from token2wav.families.qwen25_omni.voices import write_voices
from token2wav_client import Client

AUDIO = 1e-4  # batches sum in another order than single streams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("omni"), FamilyGolden("qwen25_omni", "tiny"))


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    voices = tmp_path_factory.mktemp("voices")
    paths = ", ".join(map(str, write_voices(folder, voices)))
    with Rig.start(folder, tmp_path_factory.mktemp("rig"), f"voices: [{paths}]") as rig:
        yield rig


def test_named_voices_equal_the_library(served: Rig, folder: Path) -> None:
    local = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    random, size = np.random.default_rng(4), local.config.tokens.codebook_sizes[0]
    cases = [
        (random.integers(0, size, 40 + 9 * seed).astype(np.int32), SPEAKERS[seed % 2], 1 + 4 * seed)
        for seed in range(4)
    ]

    def spoken(tokens: NDArray[np.int32], voice: str, parts: int) -> NDArray[np.float32]:
        with Client(served.server.grpc_url) as client:
            chunks = list(client.synthesize(np.array_split(tokens, parts), voice))
        return np.concatenate([np.asarray(chunk.audio, np.float32) for chunk in chunks])

    with ThreadPoolExecutor(len(cases)) as threads:
        heard = [threads.submit(spoken, *case) for case in cases]
        for (tokens, name, _), future in zip(cases, heard, strict=True):
            whole = local.synthesize(tokens, a_voice(folder, name))
            audio = future.result()
            assert audio.shape == whole.shape
            assert np.abs(audio - whole).max() <= AUDIO
    served.wait_until_empty()
