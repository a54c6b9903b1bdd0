"""The demo codec: its size, its copy of a recording, its encoder, and the demo with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("piper", reason="the recipe's tools are in the extra 'demo'")
pytest.importorskip("pocketsphinx", reason="the recipe's dictionary is in the extra 'demo'")

from examples import demo
from examples.demo_codec.codes import Encoder, features
from examples.demo_codec.encode import CodecEncoder
from examples.demo_voice.recordings import SENTENCE
from token2wav import Token2Wav
from token2wav.families.nanocodec import NanoCodecSizes
from token2wav.layers.scalar_codes import ScalarCodes
from token2wav_voice import Recording
from token2wav_voice.features import prompt_mel

MAX_BYTES = 8_000_000
# Mean distance between the log-mels of the decoded audio and of the recording. It is 2 between
# unlike sentences.
BANDS_APART = 0.6


@pytest.fixture(scope="module")
def codec() -> Token2Wav:
    return Token2Wav.load(demo.CODEC)


@pytest.fixture(scope="module")
def recording() -> Recording:
    return Recording.load(SENTENCE)


def test_the_model_is_small() -> None:
    assert sum(path.stat().st_size for path in demo.CODEC.iterdir()) < MAX_BYTES


def test_decoded_audio_resembles_the_recording(codec: Token2Wav, recording: Recording) -> None:
    codes = CodecEncoder(demo.CODEC)(recording.samples)
    recording_mel, decoded_mel = prompt_mel(recording.samples), prompt_mel(codec.synthesize(codes))
    frames = min(len(recording_mel), len(decoded_mel))
    recording_mel, decoded_mel = recording_mel[:frames], decoded_mel[:frames]
    assert np.abs(decoded_mel - recording_mel).mean() < BANDS_APART
    assert np.abs(decoded_mel[::-1] - recording_mel).mean() > 2 * BANDS_APART


@pytest.mark.parametrize("levels", [(8, 7, 6, 6), (3,), (2, 5)])
def test_codes_are_those_of_the_rounded_values(levels: tuple[int, ...]) -> None:
    """The decoder's table gives back each value that the encoder rounded."""
    config = NanoCodecSizes(
        sample_rate=16000, num_groups=2, num_levels_per_group=levels, input_dim=2 * len(levels)
    )
    torch.manual_seed(0)
    encoder = Encoder(config)
    torch.nn.init.normal_(encoder.values.weight)
    heard = features(3 * torch.randn(1, 40, 80) - 6, 100 + 50 * torch.rand(1, 40))
    with torch.no_grad():
        rounded, codes = encoder(heard).round(), encoder.codes(heard)
    assert codes.shape == (1, 2, 20)
    assert len(codes.unique()) > 2
    torch.testing.assert_close(ScalarCodes(levels)(codes) * encoder.middle, rounded)
