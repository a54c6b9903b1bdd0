from __future__ import annotations

import pytest

from tests.support.golden import TINY, GoldenSet
from token2wav import Token2Wav
from token2wav_client import ClientVoice


@pytest.fixture(scope="session")
def golden() -> GoldenSet:
    return GoldenSet(TINY)


@pytest.fixture(scope="session")
def model() -> Token2Wav:
    """The library, to compare what was heard with."""
    return Token2Wav.load(TINY)


@pytest.fixture(scope="session")
def voice(golden: GoldenSet) -> ClientVoice:
    spoken = golden.voice
    return ClientVoice(spoken.prompt_tokens, spoken.prompt_mel, spoken.speaker_embedding)
