"""CosyVoice2's model files: the values that are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.models.cosyvoice2_model import write_moss_speech_yaml, write_yaml
from testkit.models.family_golden import FamilyGolden
from testkit.models.yaml_edits import edit_text
from token2wav import StreamConfig
from token2wav.errors import CheckpointError, ConfigError
from token2wav.families.cosyvoice2 import read
from token2wav.published.checkpoint_files import weights_file
from token2wav.published.registry import read_config
from token2wav.published.sizes import ConformerConfig, UNetConfig

TINY = FamilyGolden("cosyvoice2", "tiny")


def test_values_of_the_configuration(tmp_path: Path) -> None:
    write_yaml(tmp_path, TINY)
    config = read(tmp_path)
    assert config.flow.encoder == ConformerConfig(size=32, heads=2, units=64, layers=2, up_layers=2)
    assert config.flow.estimator == UNetConfig(
        channels=32, heads=2, dim_head=16, mid_blocks=1, layers=1
    )
    assert (config.block_tokens, config.lookahead_tokens) == (25, 3)
    assert (config.sample_rate, config.samples_per_token, config.mel_bands) == (24000, 960, 80)
    assert not config.vocoder.causal


def test_files_of_the_first_release(tmp_path: Path) -> None:
    new, old = write_yaml(tmp_path / "new", TINY), write_yaml(tmp_path / "old", TINY)
    edit_text(
        old,
        ("CausalConditionalDecoder", "ConditionalDecoder\n            causal: True"),
        ("static_chunk_size: !ref <chunk_size>\n", "\n"),
        ("static_chunk_size: !ref <chunk_size> * <token_mel_ratio>\n", "\n"),
        name="cosyvoice.yaml",
    )
    assert read(old.parent) == read(new.parent)


def test_a_folder_of_moss_speech(tmp_path: Path) -> None:
    write_moss_speech_yaml(tmp_path, TINY)
    for name in ("flow.pt", "flow-chunk-25.pt", "flow-chunk-5.pt"):
        (tmp_path / name).touch()
    config = read_config(tmp_path)
    assert (config.block_tokens, config.lookahead_tokens, config.token_mel_ratio) == (5, 3, 4)
    assert (config.token_frame_rate, config.samples_per_token) == (12.5, 1920)
    assert weights_file(tmp_path, config.weights_names("flow")).name == "flow-chunk-5.pt"
    assert config.hops(StreamConfig()) == (10, 50)
    longer = config.with_stream_settings(StreamConfig(block_tokens=25))
    assert weights_file(tmp_path, longer.weights_names("flow")).name == "flow-chunk-25.pt"
    assert (longer.block_tokens, longer.hops(StreamConfig())) == (25, (25, 50))
    with pytest.raises(
        ConfigError,
        match=r"^stream\.block_tokens: 10, but the folder has weights for blocks of 5, 25 tokens",
    ):
        config.with_stream_settings(StreamConfig(block_tokens=10))
    (tmp_path / "flow-chunk-5.pt").unlink()
    with pytest.raises(
        CheckpointError, match=r"contains none of flow-chunk-5.safetensors, flow-chunk-5.pt$"
    ):
        weights_file(tmp_path, config.weights_names("flow"))
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"contains none of cosyvoice2\.yaml, .*config\.yaml$"):
        read_config(tmp_path)
