"""cosyvoice3.yaml: the public layout is read, and nothing in it is executed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from testkit.models.tiny_model import FULL_SIZE, TINY
from token2wav import ConfigError, Token2Wav
from token2wav.assembly import check_folder
from token2wav.families.cosyvoice3 import CosyVoice3Config, FlowConfig
from token2wav.published.registry import read_config
from token2wav.published.sizes import EstimatorConfig, HiFTConfig

FULL_FLOW = FlowConfig(
    vocab_size=6561,
    input_size=80,
    spk_embed_dim=192,
    token_mel_ratio=2,
    pre_lookahead_len=3,
    pre_lookahead_channels=1024,
    inference_cfg_rate=0.7,
    estimator=EstimatorConfig(
        dim=1024,
        depth=22,
        heads=16,
        dim_head=64,
        ff_mult=2,
        mel_dim=80,
        mu_dim=80,
        spk_dim=80,
        out_channels=80,
        static_chunk_size=50,
    ),
    n_timesteps=10,
    lookbehind_len=2,
)
DILATIONS = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
FULL_HIFT = HiFTConfig(
    in_channels=80,
    base_channels=512,
    nb_harmonics=8,
    sampling_rate=24000,
    nsf_alpha=0.1,
    nsf_sigma=0.003,
    nsf_voiced_threshold=10.0,
    upsample_rates=(8, 5, 3),
    upsample_kernel_sizes=(16, 11, 7),
    n_fft=16,
    hop_len=4,
    resblock_kernel_sizes=(3, 7, 11),
    resblock_dilation_sizes=DILATIONS,
    source_resblock_kernel_sizes=(7, 7, 11),
    source_resblock_dilation_sizes=DILATIONS,
    lrelu_slope=0.1,
    audio_limit=0.99,
    conv_pre_look_right=4,
    f0_channels=512,
    causal=True,
)


def test_a_full_file_of_the_public_layout_is_read_in_full() -> None:
    assert CosyVoice3Config.read(FULL_SIZE) == CosyVoice3Config.of(
        FULL_FLOW, FULL_HIFT, token_frame_rate=25
    )


def test_the_tiny_model_differs_in_sizes_only() -> None:
    tiny, full = CosyVoice3Config.read(TINY), CosyVoice3Config.read(FULL_SIZE)
    estimator = dataclasses.replace(full.flow.estimator, dim=64, depth=2, heads=2, dim_head=32)
    flow = dataclasses.replace(full.flow, pre_lookahead_channels=64, estimator=estimator)
    hift = dataclasses.replace(full.vocoder, base_channels=32, f0_channels=32)
    assert tiny == CosyVoice3Config.of(flow, hift, 25)


@pytest.mark.parametrize(("value", "expected"), [("True", True), ("False", None)])
def test_a_long_skip_connection(value: str, expected: bool | None, tmp_path: Path) -> None:
    text = (TINY / "cosyvoice3.yaml").read_text()
    key = f"            long_skip_connection: {value}\n            depth: 2"
    (tmp_path / "cosyvoice3.yaml").write_text(text.replace("            depth: 2", key))
    assert CosyVoice3Config.read(tmp_path).flow.estimator.long_skip_connection is expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("!apply:random.seed [1986]", '!apply:os.system ["touch {bait}"]'),
        ("generator: !ref <hift>", 'generator: !new:subprocess.Popen [["touch", "{bait}"]]'),
        ("generator: !ref <hift>", "generator: !ref <nowhere>"),
        ("output_type: 'mel'", "output_type: !apply:os.system ['touch {bait}']"),
        ("depth: 2", "depth: 2.0"),
        ("inference_cfg_rate: 0.7", "inference_cfg_rate: 7e-1"),
        ("cosyvoice.flow.DiT.dit.DiT", "another.home.of.DiT"),
    ],
)
def test_unused_entries_may_be_anything_and_are_not_executed(
    tmp_path: Path, old: str, new: str
) -> None:
    bait = tmp_path / "executed"
    text = (TINY / "cosyvoice3.yaml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "cosyvoice3.yaml").write_text(
        text.replace(old, new.format(bait=bait)), encoding="utf-8"
    )
    assert CosyVoice3Config.read(tmp_path) == CosyVoice3Config.read(TINY)
    assert not bait.exists()


def test_a_folder_that_is_no_model_folder_is_named(tmp_path: Path) -> None:
    for read in (read_config, check_folder, Token2Wav.load):
        with pytest.raises(ConfigError, match="no such model folder"):
            read(tmp_path / "nowhere")
    with pytest.raises(
        ConfigError,
        match=r"not a model folder; it contains none of .*cosyvoice3\.yaml, .*streamflow\.yaml",
    ):
        read_config(tmp_path)
    shutil.copy(TINY / "cosyvoice3.yaml", tmp_path / "file")
    with pytest.raises(ConfigError, match="no such model folder"):
        read_config(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cosyvoice3.yaml", ""),
        ("config.json", '{"model_type": "mimi"}'),
        ("config.json", '{"vq_strides": [1], "decoder_rates": [2]}'),
    ],
)
def test_a_folder_above_a_model_folder_names_the_model_folder(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_text(content)
    with pytest.raises(
        ConfigError, match=rf"{tmp_path}: .* its subfolder model is one; use {tmp_path / 'model'}$"
    ):
        read_config(tmp_path)
