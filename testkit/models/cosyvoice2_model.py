"""Folders of CosyVoice2 and MOSS-Speech models as they are published, at the sizes of golden sets
and with their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from testkit.models.family_golden import FamilyGolden
from testkit.models.random_weights import fill
from testkit.models.yaml_edits import edit_text
from token2wav.families.cosyvoice2 import read
from token2wav.families.cosyvoice2.flow import cosyvoice2_flow
from token2wav.networks.hift import HiFT

CFM_YAML = """\
    decoder: !new:cosyvoice.flow.flow_matching.{cfm}
        in_channels: 240
        n_spks: 1
        spk_emb_dim: 80
        cfm_params: !new:omegaconf.DictConfig
            content:
                sigma_min: 1e-06
                solver: 'euler'
                t_scheduler: 'cosine'
                training_cfg_rate: 0.2
                inference_cfg_rate: 0.7
                reg_loss_type: 'l1'
"""
_YAML = (
    """\
__set_seed1: !apply:random.seed [1986]

sample_rate: 24000
llm_input_size: 896
spk_embed_dim: 192
token_frame_rate: 25
token_mel_ratio: 2
chunk_size: 25
num_decoding_left_chunks: -1

llm: !new:cosyvoice.llm.llm.Qwen2LM
    llm_input_size: !ref <llm_input_size>

flow: !new:cosyvoice.flow.flow.CausalMaskedDiffWithXvec
    input_size: {encoder}
    output_size: 80
    spk_embed_dim: !ref <spk_embed_dim>
    output_type: 'mel'
    vocab_size: 6561
    input_frame_rate: !ref <token_frame_rate>
    only_mask_loss: True
    token_mel_ratio: !ref <token_mel_ratio>
    pre_lookahead_len: 3
    encoder: !new:cosyvoice.transformer.upsample_encoder.UpsampleConformerEncoder
        output_size: {encoder}
        attention_heads: {encoder_heads}
        linear_units: {encoder_units}
        num_blocks: {encoder_layers[0]}
        num_up_blocks: {encoder_layers[1]}
        dropout_rate: 0.1
        normalize_before: True
        input_layer: 'linear'
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        input_size: {encoder}
        use_cnn_module: False
        macaron_style: False
        static_chunk_size: !ref <chunk_size>
"""
    + CFM_YAML
    + """\
        estimator: !new:cosyvoice.flow.decoder.CausalConditionalDecoder
            in_channels: 320
            out_channels: 80
            channels: [{channels}]
            dropout: 0.0
            attention_head_dim: {dim_head}
            n_blocks: {layers[1]}
            num_mid_blocks: {layers[0]}
            num_heads: {heads}
            act_fn: 'gelu'
            static_chunk_size: !ref <chunk_size> * <token_mel_ratio>
            num_decoding_left_chunks: !ref <num_decoding_left_chunks>
"""
)
HIFT_YAML = """\

hift: !new:cosyvoice.hifigan.generator.HiFTGenerator
    in_channels: 80
    base_channels: {vocoder[0]}
    nb_harmonics: 8
    sampling_rate: {sampling_rate}
    nsf_alpha: 0.1
    nsf_sigma: 0.003
    nsf_voiced_threshold: 10
    upsample_rates: {rates}
    upsample_kernel_sizes: {kernels}
    istft_params:
        n_fft: 16
        hop_len: 4
    resblock_kernel_sizes: [3, 7, 11]
    resblock_dilation_sizes: [[1, 3, 5], [1, 3, 5], [1, 3, 5]]
    source_resblock_kernel_sizes: {source_kernels}
    source_resblock_dilation_sizes: {source_dilations}
    lrelu_slope: 0.1
    audio_limit: 0.99
    f0_predictor: !new:cosyvoice.hifigan.f0_predictor.ConvRNNF0Predictor
        num_class: 1
        in_channels: 80
        cond_channels: {vocoder[1]}
"""
_DILATIONS = [1, 3, 5]
HIFT = {  # sizes of the vocoder
    "sampling_rate": 24000,
    "rates": [8, 5, 3],
    "kernels": [16, 11, 7],
    "source_kernels": [7, 7, 11],
    "source_dilations": [_DILATIONS] * 3,
}
HIFT_22_KHZ = {
    "sampling_rate": "!ref <sample_rate>",
    "rates": [8, 8],
    "kernels": [16, 16],
    "source_kernels": [7, 11],
    "source_dilations": [_DILATIONS] * 2,
}


def write_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file for the sizes of a golden set."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "cosyvoice2.yaml"
    path.write_text((_YAML + HIFT_YAML).format(cfm="CausalConditionalCFM", **HIFT, **golden.sizes))
    return path


def write_moss_speech_yaml(folder: Path, golden: FamilyGolden) -> Path:
    """Writes the model file of MOSS-Speech for the sizes of a golden set."""
    return edit_text(
        write_yaml(folder, golden),
        ("token_frame_rate: 25", "token_frame_rate: 12.5"),
        ("token_mel_ratio: 2", "token_mel_ratio: 4"),
        ("chunk_size: 25", "chunk_size: 5"),
        ("vocab_size: 6561", "vocab_size: 20480"),
        ("        use_cnn_module", "        upsample_stride: 4\n        use_cnn_module"),
        name="config.yaml",
    )


def write_model(
    folder: Path,
    golden: FamilyGolden,
    write_file: Callable[[Path, FamilyGolden], Path] = write_yaml,
) -> Path:
    """Writes a model with the weights of a golden set, and returns its folder."""
    config = read(write_file(folder, golden).parent)
    return write_weights(folder, cosyvoice2_flow(config.flow), HiFT(config.vocoder))


def write_moss_speech(folder: Path, golden: FamilyGolden) -> Path:
    """Writes a model of MOSS-Speech with the weights of a golden set, and returns its folder."""
    write_model(folder, golden, write_moss_speech_yaml)
    return (folder / "flow.pt").rename(folder / "flow-chunk-5.pt").parent


def write_weights(folder: Path, flow: nn.Module, hift: HiFT) -> Path:
    """Writes weights as a golden set has them, and returns their folder."""
    torch.save(fill(flow).state_dict(), folder / "flow.pt")
    vocoder = {f"generator.{name}": value for name, value in fill(hift).state_dict().items()}
    torch.save(vocoder, folder / "hift.pt")
    return folder
