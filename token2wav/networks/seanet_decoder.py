"""Decoder of Mimi and Pocket TTS: a causal transformer with a sliding window, and a causal SEANet
decoder.

Modules have the names of the published weights in the format of `transformers`, without the names
of wrappers.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.layers.combine import Chain, Residual, placed
from token2wav.layers.convolutions import StreamConvTranspose, causal_conv
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.streaming import Curve, StreamStep
from token2wav.layers.window_transformer import TransformerSizes, WindowTransformer
from token2wav.networks.waveform_network import WaveformNetwork
from token2wav.published.codec_sizes import SeanetSizes


class SeanetDecoder(WaveformNetwork):
    """Decoder from latents, vectors of `hidden_size` numbers, to audio."""

    def __init__(self, sizes: SeanetSizes) -> None:
        super().__init__()
        self.heads, self.frame_samples = sizes.num_attention_heads, sizes.frame_samples
        self.upsample = StreamConvTranspose(
            sizes.hidden_size,
            sizes.hidden_size,
            2 * sizes.stride,
            sizes.stride,
            cut="end",
            groups=sizes.upsample_groups,
            bias=False,
        )
        approximate = "none" if sizes.hidden_act == "gelu" else "tanh"
        gelu = partial(F.gelu, approximate=approximate)
        self.decoder_transformer = WindowTransformer(
            TransformerSizes.of(sizes),
            partial(nn.LayerNorm, eps=sizes.norm_eps),
            lambda: FeedForward(sizes.hidden_size, sizes.intermediate_size, gelu),
        )
        self.decoder = Chain({"layers": seanet(sizes)})
        self.output = placed((self.upsample, self.decoder_transformer, self.decoder))

    def decode(self, latents: torch.Tensor, step: StreamStep) -> torch.Tensor:
        """Computes the audio (B, 1, frame_samples * T) of latents (B, hidden_size, T)."""
        x = self.upsample(latents, step).transpose(1, 2).contiguous()
        x = self.decoder_transformer(x, step)
        return self.decoder(x.transpose(1, 2), step)  # channels last, see `StreamConv`


def seanet(sizes: SeanetSizes) -> Chain:
    """Makes the layers of a SEANet decoder. The number of a layer is its name in the published
    weights.
    """
    channels = sizes.num_filters << len(sizes.upsampling_ratios)
    layers: list[nn.Module] = [causal_conv(sizes.hidden_size, channels, sizes.kernel_size)]
    for ratio in sizes.upsampling_ratios:
        half = channels // 2
        layers += [ELU(), StreamConvTranspose(channels, half, 2 * ratio, ratio, cut="end")]
        dilations = (sizes.dilation_growth_rate**unit for unit in range(sizes.num_residual_layers))
        layers += [_residual_unit(half, dilation, sizes) for dilation in dilations]
        channels = half
    return Chain([*layers, ELU(), causal_conv(channels, 1, sizes.last_kernel_size)])


def _residual_unit(channels: int, dilation: int, sizes: SeanetSizes) -> Residual:
    inner, kernel = channels // sizes.compress, sizes.residual_kernel_size
    convs = (
        causal_conv(channels, inner, kernel, dilation=dilation),
        causal_conv(inner, channels, 1),
    )
    return Residual(channels, {"block": Chain(part for conv in convs for part in (ELU(), conv))})


class ELU(nn.Module):
    curve = Curve(elu=True)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return F.elu(x) if out is None else torch.ops.aten.elu.out(x, out=out)
