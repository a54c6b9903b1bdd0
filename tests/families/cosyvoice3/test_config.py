"""cosyvoice3.yaml: the public layout is read; errors name each inconsistent value and its bound."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from testkit.models.tiny_model import FULL_SIZE, TINY, one_line
from testkit.tables import table
from token2wav import ConfigError
from token2wav.assembly import check_folder
from token2wav.families.cosyvoice3.config import CosyVoice3Config, FlowConfig
from token2wav.families.registry import read_config
from token2wav.networks.configs import EstimatorConfig, HiFTConfig

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


def test_the_arithmetic_of_a_stream_follows_from_the_file() -> None:
    config = CosyVoice3Config.read(FULL_SIZE)
    assert config.block_tokens == 25
    assert config.mel_bands == 80
    assert config.vocoder.samples_per_frame == 480
    assert config.samples_per_token == 960
    assert config.sample_rate == 24000


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


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CosyVoice3Config.read(TINY).flow.vocab_size = 1  # type: ignore[misc]


# Changes to the tiny file: replaced text, new text, and the expected message.
# tests/families/test_absurd_sizes.py tries absurd values of every number.
CHANGES = table(
    r"""
flow.CausalMaskedDiffWithDiT | flow.Xvec | flow: expected '!new:...CausalMaskedDiffWithDiT'
generator.CausalHiFTGenerator | generator.HiFT | hift: expected '!new:...CausalHiFTGenerator'
dit.DiT\n | dit.UNet\n | flow.decoder.estimator: expected '!new:...DiT'
f0_predictor.CausalConv | f0_predictor.Conv | hift.f0_predictor: expected
PreLookaheadLayer | Upsample | flow.pre_lookahead_layer: expected
CausalConditionalCFM | ConditionalCFM | flow.decoder: expected
hift: !new:cosyvoice | hift: !apply:cosyvoice | hift: expected '!new:...CausalHiFTGenerator'
!new:cosyvoice.flow.flow.CausalMaskedDiffWithDiT | "" | flow: expected
64\n        pre_lookahead_len: 3 | 64\n        pre_lookahead_len: 2 | flow.pre_lookahead_len is 3
'euler' | 'midpoint' | cfm_params.content.solver
'euler' | 1 | solver: expected str, got 1
'cosine' | 'exp' | cfm_params.content.t_scheduler: 'exp' is not one of cosine, linear
flow: !new | flaw: !new | key 'flow' is missing
hift: !new | heft: !new | key 'hift' is missing
depth: | deepness: | flow.decoder.estimator.depth: missing
hop_len: | hop: | hift.istft_params.hop_len: missing
inference_cfg_rate: | cfg: | flow.decoder.cfm_params.content.inference_cfg_rate: missing
spk_embed_dim: 192\n | "" | 'spk_embed_dim' is missing
vocab_size: 6561 | vocab_size: '6561' | flow.vocab_size: expected int, got '6561'
vocab_size: 6561 | vocab_size: true | flow.vocab_size: expected int, got True
nsf_alpha: 0.1 | nsf_alpha: yes | hift.nsf_alpha: expected float, got True
nsf_alpha: 0.1 | nsf_alpha: .inf | hift.nsf_alpha: expected float, got inf
depth: 2 | depth: 2.5 | flow.decoder.estimator.depth: expected int, got 2.5
depth: 2 | depth: null | flow.decoder.estimator.depth: expected int, got None
depth: 2 | depth: !ref <hift> | flow.decoder.estimator.depth: expected int, got Tagged
depth: 2 | depth: 2\n            conv_layers: 4 | estimator.conv_layers: unknown key
depth: 2 | depth: 2\n            long_skip_connection: 1 | expected bool, got 1
reg_loss_type | loss_type | flow.decoder.cfm_params.content.loss_type: unknown key
output_size: 80 | output_size: 96 | flow.output_size: 96, but only 80 is supported
depth: 2 | depth: -2 | flow.decoder.estimator.depth: -2 is not between 1 and 256
_rates: [8, 5, 3] | _rates: 120 | hift.upsample_rates: expected a list
_rates: [8, 5, 3] | _rates: [8, five, 3] | hift.upsample_rates[1]: expected int, got 'five'
_rates: [8, 5, 3] | _rates: [8, 0, 3] | hift.upsample_rates[1]: 0 is not between 1 and 4096
_rates: [8, 5, 3] | _rates: [] | hift.upsample_rates: empty
" resblock_dilation_sizes: [[1, 3, 5]," | " resblock_dilation_sizes: [1," | _sizes[0]: expected a
" resblock_dilation_sizes: [[1, 3," | " resblock_dilation_sizes: [[1, 0," | _sizes[0][1]: 0 is not
\n        n_fft: 16\n        hop_len: 4 | " [16, 4]" | istft_params: expected a mapping, got list
<chunk_size> * <token_mel_ratio> | <chunk_size> / 0 | not arithmetic
cfg_rate: 0.7 | cfg_rate: -1.0 | inference_cfg_rate: -1.0 is not between 0 and 100
token_frame_rate: 25 | token_frame_rate: 0 | flow.input_frame_rate: 0.0 is not between 0.01 and 1000
dim: 64\n | dim: 72\n | flow.decoder.estimator.dim: 72 is not a multiple of 16
dim_head: 32 | dim_head: 33 | flow.decoder.estimator.dim_head: 33 is odd
mu_dim: 80 | mu_dim: 40 | flow.decoder.estimator: mel_dim, mu_dim, spk_dim
"    input_size: 80" | "    input_size: 96" | flow.input_size: 96
chunk_size: 25\n | chunk_size: 25.5\n | flow.decoder.estimator.static_chunk_size: 51 frames
upsample_kernel_sizes: [16, 11, 7] | upsample_kernel_sizes: [16, 11] | differ in length
source_resblock_kernel_sizes: [7, 7, 11] | source_resblock_kernel_sizes: [7, 7] | differ in length
source_resblock_dilation_sizes: [ | source_resblock_dilation_sizes: [[2], | per upsampling stage
" resblock_dilation_sizes: [" | " resblock_dilation_sizes: [[2]," | per resblock kernel size
base_channels: 32 | base_channels: 36 | hift.base_channels: 36
n_fft: 16 | n_fft: 15 | hift.istft_params: n_fft 15 must be even
n_fft: 16 | n_fft: 6 | n_fft 6 must be
in_channels: 80\n    base | in_channels: 100\n    base | hift.in_channels: 100 mel bands
sample_rate: 24000 | sample_rate: 22050 | sample_rate: 25 tokens
token_frame_rate: 25 | token_frame_rate: 50 | sample_rate: 50 tokens
!apply:random.seed [1986] | !!python/object/apply:os.system ['true'] | nothing was executed
"""
)


@pytest.mark.parametrize(("old", "new", "words"), CHANGES)
def test_a_file_that_does_not_hold_together_is_refused_by_name(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    text = (TINY / "cosyvoice3.yaml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "cosyvoice3.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        CosyVoice3Config.read(tmp_path)
    message = one_line(caught.value)
    assert message.count(str(path)) == 1
    assert words in message
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_folder(tmp_path)


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
    with pytest.raises(ConfigError, match="no such model folder"):
        read_config(tmp_path / "nowhere")
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
        ConfigError,
        match=rf"{tmp_path}: .* its subfolder model is one; use {tmp_path / 'model'}$",
    ):
        read_config(tmp_path)
