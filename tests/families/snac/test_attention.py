"""SNAC with attention (32 and 44.1 kHz): published sizes, and steps of whole windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.models.codec_models import drawn_tokens
from testkit.models.family_golden import FamilyGolden
from testkit.models.snac_model import SNAC_44KHZ, config_of, write_snac
from token2wav import ConfigError, RuntimeConfig, StreamConfig, Token2Wav
from token2wav.assembly import family_for
from token2wav.stages.stage import FrameChunk
from token2wav.stages.waveform import WaveformStage


@pytest.mark.parametrize(("rate", "tokens"), [(44100, 14.36), (32000, 10.42)])
def test_published_sizes(rate: int, tokens: float, tmp_path: Path) -> None:
    config = config_of(tmp_path, {**SNAC_44KHZ, "sampling_rate": rate})
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert config.tokens.shape == (15,)
    assert config.token_frame_rate == pytest.approx(tokens, abs=0.01)
    assert config.samples_per_token == network.frame_samples == 3072
    assert network.output_delay == 5519
    assert network.lookahead_frames == config.reach_frames == 2
    # Chunks end one token after a window of 4 tokens.
    assert (config.block_tokens, config.tokens_past_window) == (4, 1)
    assert config.grid(0).first_boundary == 1
    assert config.hops(StreamConfig()) == (4, 16)
    layer = network.decoder.attention
    assert (layer.heads, layer.window) == (24, 32)


def test_a_step_that_ends_inside_a_window_is_refused(tmp_path: Path) -> None:
    folder = write_snac(tmp_path, FamilyGolden("snac_attention", "tiny"))
    model = Token2Wav.load(folder, runtime=RuntimeConfig(device="cpu"))
    [decoder] = model.pipeline.stages.values()
    stage = WaveformStage(decoder._frames._net)  # type: ignore[attr-defined]
    frames = torch.from_numpy(drawn_tokens(model.config, 12)).T
    with pytest.raises(ValueError, match="step of 48 latents: it ends inside a window of 8"):
        stage.advance([(stage.open(), FrameChunk(frames, False))])


def test_early_audio_is_refused(tmp_path: Path) -> None:
    folder = write_snac(tmp_path, FamilyGolden("snac_attention", "tiny"))
    with pytest.raises(
        ConfigError, match=r"stream\.lookahead_frames: 1, expected 0; this model holds"
    ):
        Token2Wav.load(folder, stream=StreamConfig(lookahead_frames=1))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attn_window_size", 36, "attn_window_size: 36 is no multiple of 8, the latents of a"),
        ("attn_window_size", 1 << 20, "attn_window_size: 1048576 is not between 1 and 1024"),
        ("attn_window_size", 0, "attn_window_size: 0 is not between 1 and 1024"),
        ("attn_window_size", "32", "attn_window_size: expected"),
        ("decoder_dim", 1520, "decoder_dim: 1520 is no multiple of 64, the channels of an"),
    ],
)
def test_values_that_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        config_of(tmp_path, {**SNAC_44KHZ, key: value})
