"""Step-Audio2 in the library: the public mel, and the published window.

tests/families/test_streams.py tests its streams.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.family_golden import FamilyGolden
from testkit.models.stepaudio2_model import write_model, write_yaml
from testkit.utterances import a_voice, off, some_tokens, streamed_mels
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.families.stepaudio2.config import read

MEL = 2e-5  # tolerance between float32 results with values up to 7
AUDIO = 1e-4
SNR_DB = 40  # end to end, because F0 turns rounding of the mel into phase
CPU = RuntimeConfig(device="cpu", cache_mib=400)
ALL = StreamConfig(left_blocks=-1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return write_model(tmp_path_factory.mktemp("stepaudio2"), FamilyGolden("stepaudio2", "tiny"))


@pytest.fixture(scope="session")
def model(folder: Path) -> Token2Wav:
    """Model as published, with a window of two blocks."""
    return Token2Wav.load(folder, stream=WHOLE_BLOCKS, runtime=CPU)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_public_mel(size: str, tmp_path: Path) -> None:
    """The whole mel, and chunks after the public caches, equal the public results.

    The mask counts its blocks from the end of the prompt.
    """
    golden = FamilyGolden("stepaudio2", size)
    model = Token2Wav.load(write_model(tmp_path, golden), stream=ALL, runtime=CPU)
    voice = Voice(
        golden["prompt_token"].numpy(), golden["prompt_feat"].numpy(), golden["embedding"].numpy()
    )
    tokens = golden["token"].numpy().astype(np.int32)
    assert off(model.mel(tokens, voice, streaming=False), golden["mel_full"].numpy()) <= MEL
    assert off(model.mel(tokens, voice), golden["mel_streaming"].numpy()) <= MEL
    [mel] = streamed_mels(model, (tokens, voice))
    assert off(mel, golden["mel_streaming"].numpy()) <= MEL


def test_the_published_window(folder: Path, model: Token2Wav) -> None:
    """Frames attend to the prompt and to the two blocks before their own.

    The first block that misses a block is the fourth.
    """
    voice, tokens = a_voice(30), some_tokens(125)
    mel, unbounded = (
        model.mel(tokens, voice),
        Token2Wav.load(folder, stream=ALL, runtime=CPU).mel(tokens, voice),
    )
    assert off(mel[:, :150], unbounded[:, :150]) <= MEL
    assert off(mel[:, 150:], unbounded[:, 150:]) > 0.01
    with model.stream(voice) as stream:
        stream.push(some_tokens(50))
        pages = model.pipeline.flow.usage().used
        stream.push(some_tokens(500))
        assert model.pipeline.flow.usage().used == pages


def test_the_published_vocoder_needs_no_description(tmp_path: Path) -> None:
    config = read(write_yaml(tmp_path, FamilyGolden("stepaudio2", "tiny"), hift=False).parent)
    assert (config.vocoder.base_channels, config.vocoder.f0_channels, config.samples_per_token) == (
        512,
        512,
        960,
    )
    # the state holds the context before a chunk
    assert config.lookahead_tokens == 3
