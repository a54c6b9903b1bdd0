"""SNAC with attention (32 and 44.1 kHz): steps of whole windows."""

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


def test_published_windows(tmp_path: Path) -> None:
    """Chunks end one token after a window of 4 tokens."""
    config = config_of(tmp_path, SNAC_44KHZ)
    with torch.device("meta"):
        network: Any = family_for(config).network(config, "decoder")
    assert (config.block_tokens, config.tokens_past_window) == (4, 1)
    assert config.grid(0).first_boundary == 1
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
