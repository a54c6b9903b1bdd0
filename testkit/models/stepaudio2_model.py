"""Folders of Step-Audio2's decoder as they are published, at the sizes of golden sets and with
their weights.
"""

from __future__ import annotations

from pathlib import Path

from testkit.models.cosyvoice2_model import HIFT, HIFT_YAML, write_weights
from testkit.models.family_golden import FamilyGolden
from token2wav.families.stepaudio2 import read
from token2wav.families.stepaudio2.flow import stepaudio2_flow
from token2wav.networks.hift import HiFT

_YAML = """\
flow: !new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec
    input_size: {encoder}
    output_size: 80
    spk_embed_dim: 192
    output_type: 'mel'
    vocab_size: 6561
    encoder: !new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2
        input_size: {encoder}
        output_size: {encoder}
        input_layer: 'linear'
        pre_lookahead_len: 3
        num_blocks: {encoder_layers[0]}
        num_up_blocks: {encoder_layers[1]}
        up_stride: 2
        up_scale_factor: 2
        attention_heads: {encoder_heads}
        pos_enc_layer_type: 'rel_pos_espnet'
        selfattention_layer_type: 'rel_selfattn'
        key_bias: true
        linear_units: {encoder_units}
        dropout_rate: 0.1
        positional_dropout_rate: 0.1
        attention_dropout_rate: 0.1
        normalize_before: True
    decoder: !new:cosyvoice2.flow.flow_matching.CausalConditionalCFM
        inference_cfg_rate: 0.7
        estimator: !new:cosyvoice2.flow.decoder_dit.DiT
            in_channels: 320
            out_channels: 80
            mlp_ratio: 4.0
            depth: {layers[0]}
            num_heads: {heads}
            head_dim: {dim_head}
            hidden_size: {channels}
"""


def write_yaml(folder: Path, golden: FamilyGolden, *, hift: bool = True) -> Path:
    """Writes the model file for the sizes of a golden set.

    Args:
        hift: whether the vocoder is described, as CosyVoice2's is. Public code has the published
            sizes in itself.
    """
    path = folder / "flow.yaml"
    path.write_text((_YAML + HIFT_YAML * hift).format(**HIFT, **golden.sizes))
    return path


def write_model(folder: Path, golden: FamilyGolden) -> Path:
    """Writes such a model with the weights of the golden set, and returns its folder."""
    config = read(write_yaml(folder, golden).parent)
    return write_weights(folder, stepaudio2_flow(config.flow), HiFT(config.vocoder))
