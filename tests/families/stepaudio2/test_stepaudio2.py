"""Step-Audio2 in the library: the public mel, the published window, and refused files.

tests/families/test_streams.py tests its streams.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from testkit.batches import WHOLE_BLOCKS
from testkit.models.family_golden import FamilyGolden
from testkit.models.stepaudio2_model import write_model, write_yaml
from testkit.tables import table
from testkit.utterances import a_voice, off, some_tokens, streamed_mels
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, Voice
from token2wav.errors import ConfigError
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


def test_tokens_after_a_prompt_do_not_change_it(model: Token2Wav) -> None:
    flow, voice = model.pipeline.flow, a_voice(33, seed=5)
    before = flow.usage()
    with model.stream(voice), model.stream(voice):
        assert flow.usage().prompt_hits == before.prompt_hits + 1
        assert flow.usage().shared == before.shared + 2
    assert model.pipeline.open_streams == 0


def test_the_published_vocoder_needs_no_description(tmp_path: Path) -> None:
    config = read(write_yaml(tmp_path, FamilyGolden("stepaudio2", "tiny"), hift=False).parent)
    assert (config.vocoder.base_channels, config.vocoder.f0_channels, config.samples_per_token) == (
        512,
        512,
        960,
    )
    # the state holds the context before a chunk
    assert config.lookahead_tokens == 3


REFUSED = table(
    r"""
mlp_ratio: 4.0 | mlp_ratio: 2.0 | flow.decoder.estimator.mlp_ratio: 2.0, but only 4.0 is supported
in_channels: 320 | in_channels: 240 | flow.decoder.estimator.in_channels: 240, but only 320
depth: 1 | depth: 0 | flow.decoder.estimator.depth: 0 is not between 1 and 256
vocab_size: 6561 | vocab: 6561 | flow.vocab_size: missing
decoder_dit.DiT | decoder.UNet | flow.decoder.estimator: expected '!new:...DiT'
output_type: 'mel' | output_typ: 'mel' | flow.output_typ: unknown key
key_bias: true | key_bias: false | flow.encoder.key_bias: False, but only True is supported
up_scale_factor: 2 | up_scale_factor: 3 | flow.encoder.up_scale_factor: 3.0, but only 2.0 is
dropout_rate: 0.1\n        pos | droprate: 0.1\n        pos | flow.encoder.droprate: unknown key
inference_cfg_rate: 0.7 | inference_cfg_rate: 0.7\n        sway: 1 | flow.decoder.sway: unknown key
mlp_ratio: 4.0 | mlp_ratio: 4.0\n            rope: 1 | flow.decoder.estimator.rope: unknown key
audio_limit: 0.99 | audio_limit: 0.99\n    pad: 1 | hift.pad: unknown key
hop_len: 4 | hop_len: 4\n        window: hann | hift.istft_params.window: unknown key
num_class: 1 | num_class: 2 | hift.f0_predictor.num_class: 2, but only 1 is supported
num_class: 1 | classes: 1 | hift.f0_predictor.classes: unknown key
"""
)


@pytest.mark.parametrize(("published", "other", "message"), REFUSED)
def test_other_files_are_refused(published: str, other: str, message: str, tmp_path: Path) -> None:
    path = write_yaml(tmp_path, FamilyGolden("stepaudio2", "tiny"))
    text = path.read_text()
    assert published in text
    path.write_text(text.replace(published, other))
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    assert f"{path}: {message}" in str(error.value)
