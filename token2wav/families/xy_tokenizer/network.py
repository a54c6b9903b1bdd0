"""Decoder of XY-Tokenizer."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.config.windows import Windows
from token2wav.families.xy_tokenizer import XYTokenizerSizes, whole_windows
from token2wav.layers.codebooks import Codebooks
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.full_attention import FullAttention, FullTransformerLayer
from token2wav.networks.vocos import Vocos
from token2wav.networks.waveform_network import WindowNetwork

_LONGEST_PERIOD = 10_000  # of the sines and cosines of positions, over 2 pi


class XYTokenizerDecoder(WindowNetwork):
    """Decoder from codes to audio: a transformer on frames of codes, one on more positions, and
    Vocos.
    """

    input_dtype = torch.int32

    def __init__(self, sizes: XYTokenizerSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.num_quantizers, sizes.frame_samples
        self.whole: Windows = whole_windows(sizes)
        self._stride = sizes.stride
        self.quantizer = Codebooks(
            sizes.num_quantizers,
            sizes.codebook_size,
            sizes.codebook_dim,
            sizes.rvq_dim,
            projected=False,
        )
        self.output_proj = nn.Linear(sizes.rvq_dim, sizes.latent_dim)
        self.post_rvq_adapter = Adapter(sizes)
        self.upsample = nn.ConvTranspose1d(
            sizes.latent_dim, sizes.d_model, sizes.stride, sizes.stride, bias=False
        )
        self.acoustic_decoder = AcousticDecoder(sizes)
        self.vocos = Vocos(
            sizes.num_mel_bins,
            sizes.vocos_dim,
            sizes.intermediate_dim,
            sizes.num_layers,
            sizes.n_fft,
            sizes.hop_size,
        )

    def forward(self, frames: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.output_proj(self.quantizer(frames).transpose(1, 2))
        x = self.post_rvq_adapter(x, positions).transpose(1, 2)
        x = self.upsample(x).transpose(1, 2)
        return self.vocos(self.acoustic_decoder(x, self._stride * positions))


class Transformer(nn.Module):
    """Whisper's transformer: absolute positions, and attention to all positions."""

    def __init__(self, width: int, heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(width, heads, inner) for _ in range(layers))
        self.layer_norm = nn.LayerNorm(width)

    def transform(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Computes x (B, T, width) to the same shape. `first` (B,) are positions of its starts."""
        x = x + sinusoids(first[:, None] + torch.arange(x.shape[1], device=x.device), x.shape[2])
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Adapter(Transformer):
    """Transformer between linear layers."""

    def __init__(self, sizes: XYTokenizerSizes) -> None:
        super().__init__(
            sizes.d_model, sizes.adapter_heads, sizes.adapter_ffn_dim, sizes.adapter_layers
        )
        self.proj = nn.Linear(sizes.latent_dim, sizes.d_model)
        self.out_proj = nn.Linear(sizes.d_model, sizes.latent_dim)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.transform(self.proj(x), first))


class AcousticDecoder(Transformer):
    """Transformer before two transposed convolutions, of which the first one upsamples."""

    def __init__(self, sizes: XYTokenizerSizes) -> None:
        width, kernel = sizes.d_model, sizes.kernel_size
        super().__init__(width, sizes.decoder_heads, sizes.decoder_ffn_dim, sizes.decoder_layers)
        self.deconv1 = nn.ConvTranspose1d(width, width, kernel, sizes.stride_size)
        self.deconv2 = nn.ConvTranspose1d(width, sizes.num_mel_bins, kernel)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Computes x (B, T, width) to (B, mel bins, stride_size * T)."""
        x = self.transform(x, first).transpose(1, 2)
        count = self.deconv1.stride[0] * x.shape[2]
        return F.gelu(self.deconv2(F.gelu(self.deconv1(x))))[:, :, :count]


def _layer(width: int, heads: int, inner: int) -> FullTransformerLayer:
    attention = FullAttention(width, heads, width // heads, bias=True)
    mlp = FeedForward(width, inner, bias=True)
    return FullTransformerLayer(attention, mlp, partial(nn.LayerNorm, width))


def sinusoids(positions: torch.Tensor, channels: int) -> torch.Tensor:
    """Returns sines and then cosines (..., channels) of positions (...)."""
    half = channels // 2
    steps = torch.arange(half, device=positions.device)
    angles = positions[..., None] * torch.exp(-math.log(_LONGEST_PERIOD) / (half - 1) * steps)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)
