"""Family of the causal DAC: its decoder, and its weights."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from token2wav.config.model_config import StageName
from token2wav.families.causal_dac.config import CausalDacSizes
from token2wav.families.family import Family
from token2wav.layers.codebooks import ProjectedCodebooks
from token2wav.layers.combine import Chain, placed
from token2wav.layers.convnext import ConvNeXt
from token2wav.layers.feed_forward import GatedFeedForward
from token2wav.layers.streaming import OFFLINE, StreamConvTranspose, StreamStep, WaveformNetwork
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer
from token2wav.networks.codec_weights import BOOK, converted, transformers_name
from token2wav.networks.moshi_layers import attention_rows
from token2wav.networks.symmetric_decoder import SymmetricDecoder
from token2wav.networks.weights import fitting_weights, floating_tensors, read_state

_ROPE_BASE, _NORM_EPS = 10_000.0, 1e-5
_WRAPPERS = ("state_dict", "generator")  # keys that some files have around the weights
_PARTS = (
    "decoder.",
    "quantizer.semantic_quantizer.",
    "quantizer.quantizer.",
    "quantizer.post_module.",
    "quantizer.upsample.",
)
# Projections that make codes, and tables that only files of Fish Audio have
_UNUSED = re.compile(r"\.in_proj\.|\.freqs_cis$|\.causal_mask$")
_RENAMED = (
    (".conv.", "."),  # wrapper
    ("post_module.norm.", "norm."),
    (".attention.wqkv.", ".self_attn.in_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".feed_forward.", ".mlp."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".attention_layer_scale.gamma", ".self_attn_layer_scale.scale"),
    (".ffn_layer_scale.gamma", ".mlp_layer_scale.scale"),
)


class CausalDac(WaveformNetwork):
    """Decoder of the causal DAC, from codes to audio."""

    input_dtype = torch.int32

    def __init__(self, sizes: CausalDacSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_channels, self.frame_samples = sizes.num_codebooks, sizes.frame_samples
        width, dim = sizes.codec_latent_dim, sizes.codec_codebook_dim
        self.semantic_quantizer = ProjectedCodebooks(1, sizes.codebook_size, dim, width)
        self.quantizer = ProjectedCodebooks(
            sizes.num_codebooks - 1, sizes.codec_residual_codebook_size, dim, width
        )
        norm = partial(nn.RMSNorm, eps=_NORM_EPS)
        self.post_module = WindowTransformer(
            TransformerSizes(
                sizes.codec_post_n_layer,
                width,
                sizes.codec_post_n_head,
                sizes.codec_head_dim,
                sizes.codec_window_size,
                _ROPE_BASE,
                key_heads=sizes.codec_post_n_local_heads,
                rope_precision=torch.bfloat16,  # of the table in the public code
            ),
            norm,
            lambda: GatedFeedForward(
                width, sizes.codec_post_intermediate_size, names=("w1", "w3", "w2")
            ),
        )
        self.norm = norm(width)
        self.upsample = Chain(
            Chain([StreamConvTranspose(width, width, factor, factor, cut="end"), ConvNeXt(width)])
            for factor in sizes.codec_downsample_factor[::-1]
        )
        self.decoder = SymmetricDecoder(sizes.decoder, causal=True)
        self.output = placed((self.post_module, self.upsample, self.decoder))

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of codes (B, codebooks, T)."""
        x = self.semantic_quantizer(codes[:, :1]) + self.quantizer(codes[:, 1:])
        x = self.norm(self.post_module(x.transpose(1, 2), step)).transpose(1, 2)
        return torch.tanh(self.decoder(self.upsample(x, step), step))


class CausalDacFamily(Family):
    """Family of the causal DAC."""

    def network(self, config: Any, stage: StageName) -> nn.Module:
        return CausalDac(config.sizes)

    def weights(self, network: Any, path: Path, stage: StageName) -> dict[str, torch.Tensor]:
        file = read_state(path, wrappers=_WRAPPERS)
        names = {str(name).removeprefix("generator."): name for name in file}
        state = {
            name.removeprefix("quantizer."): file[published]
            for name, published in names.items()
            if name.startswith(_PARTS) and not _UNUSED.search(name)
        }
        blocks = len(network.decoder.block)
        named = floating_tensors(state, path, lambda name: _current_name(name, blocks))
        # `converted` knows codebooks by the name `quantizer`.
        semantic = {
            name.removeprefix("semantic_"): named.pop(name)
            for name in list(named)
            if name.startswith("semantic_")
        }
        books = {
            f"semantic_{name}": value for name, value in converted(semantic, BOOK, path).items()
        }
        heads = network.sizes.codec_post_n_head, network.sizes.codec_post_n_local_heads
        weights: dict[str, torch.Tensor] = {}
        for name, value in (converted(named, BOOK, path) | books).items():
            weights |= attention_rows(name, value, *heads)
        return fitting_weights(network, weights, path)


def _current_name(name: str, blocks: int) -> str:
    """Returns the name that a published weight has in `CausalDac`; `attention_rows` renames the
    projection of queries, keys and values.
    """
    for published, current in _RENAMED:
        name = name.replace(published, current)
    return transformers_name(name, blocks)


FAMILY = CausalDacFamily()
