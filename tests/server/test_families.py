"""Models of other families on a real server: what the library speaks, and what goes wrong in one stream stays there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.server.rig import Rig
from tests.server.test_streaming import random_portions
from tests.support import chatterbox_model, cosyvoice2_model, stepaudio2_model
from tests.support.family_golden import FamilyGolden
from tests.support.golden import snr_db
from token2wav import Token2Wav, Voice
from token2wav_client import Client, ClientVoice

SNR_DB = 60  # batches sum in another order than single streams, and F0 takes such rounding into phase; 75 seen

WRITERS: dict[str, Callable[[Path, FamilyGolden], Path]] = {
    "cosyvoice2": cosyvoice2_model.write_model,
    "stepaudio2": stepaudio2_model.write_model,
    "chatterbox": chatterbox_model.write_model,
}


@dataclass(frozen=True)
class Served:
    """A served model, and what the library makes of an utterance."""

    rig: Rig
    tokens: NDArray[np.int32]
    voice: Voice
    whole: NDArray[np.float32]

    @property
    def client_voice(self) -> ClientVoice:
        return ClientVoice(self.voice.prompt_tokens, self.voice.prompt_mel, self.voice.speaker_embedding)


@pytest.fixture(scope="module", params=WRITERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    golden = FamilyGolden(request.param, "tiny")
    folder = WRITERS[request.param](tmp_path_factory.mktemp(request.param), golden)
    voice = Voice(golden["prompt_token"].numpy(), golden["prompt_feat"].numpy(), golden["embedding"].numpy())
    tokens = np.tile(golden["token"].numpy(), 3)[:150].astype(np.int32)
    whole = Token2Wav.load(folder).synthesize(tokens, voice)
    with Rig.start(folder, tmp_path_factory.mktemp("server")) as rig:
        yield Served(rig, tokens, voice, whole)


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Served) -> Iterator[None]:
    yield
    served.rig.wait_until_empty()


def test_eight_streams_at_once_in_random_portions(served: Served) -> None:
    def synthesize(seed: int) -> NDArray[np.float32]:
        with Client(served.rig.server.grpc_url) as client:
            portions = random_portions(served.tokens, seed)
            audio = np.concatenate([chunk.audio for chunk in client.synthesize(portions, served.client_voice)])
            return audio.astype(np.float32)

    with ThreadPoolExecutor(8) as pool:
        for audio in pool.map(synthesize, range(8)):
            assert audio.shape == served.whole.shape
            assert snr_db(audio, served.whole) > SNR_DB


def test_what_goes_wrong_in_one_stream_stays_there(served: Served) -> None:
    with served.rig.connect() as connection:
        for sequence in ("good", "bad", "left"):
            connection.send(served.tokens[:60], served.voice, sequence, start=True)
        connection.send([1, 6561], None, "bad", end=True)
        connection.send(served.tokens[60:], None, "good", end=True)
        answers = connection.answers(requests=5)
    assert answers.errors
    for error in answers.errors:
        assert "tokens: 6561 at index 1 is outside the vocabulary 0 to 6560" in error
    last = max(index for index, _, _ in answers.chunks)
    tail = next(audio for index, _, audio in answers.chunks if index == last)
    assert snr_db(tail, served.whole[-len(tail) :]) > SNR_DB


@pytest.mark.parametrize(("name", "shape"), [("prompt_mel", (7, 80)), ("speaker_embedding", (100,))])
def test_voices_that_do_not_fit(name: str, shape: tuple[int, ...], served: Served) -> None:
    voice = {
        "prompt_tokens": served.voice.prompt_tokens,
        "prompt_mel": served.voice.prompt_mel,
        "speaker_embedding": served.voice.speaker_embedding,
    }
    with served.rig.connect() as connection:
        connection.send(served.tokens, {**voice, name: np.ones(shape, np.float32)}, "a", start=True, end=True)
        [error] = connection.answers().errors
    assert name in error
