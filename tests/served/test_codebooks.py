"""A flow whose tokens have several codes, on a real server, chosen by the model folder alone.
`tests/serving/door/test_models.py` has all families.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.codebook_model import (
    SAMPLES_PER_TOKEN,
    a_voice,
    some_codes,
    write_model,
)
from testkit.models.golden import snr_db
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.server_rig import BOTH_MODELS, Rig
from testkit.utterances import random_portions
from tests.families.cosyvoice3.tolerances import SNR_DB
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice

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
