"""Audio detokenizer of LFM2-Audio."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from token2wav.families.lfm2_audio import Lfm2AudioSizes
from token2wav.layers.codebooks import MeanEmbedding
from token2wav.layers.combine import placed
from token2wav.layers.convolutions import causal_conv
from token2wav.layers.feed_forward import GatedFeedForward
from token2wav.layers.inverse_stft import InverseSTFT
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.layers.window_attention import Positions
from token2wav.layers.window_transformer import (
    LayersInWindow,
    TransformerSizes,
    WindowTransformerAttention,
)
from token2wav.networks.waveform_network import WaveformNetwork

_Angles = tuple[torch.Tensor, torch.Tensor]


class Lfm2AudioDecoder(WaveformNetwork):
    """Decoder from codes to audio: each frame of codes becomes several positions of an LFM2. Its
    outputs are log-magnitudes and phases of an inverse STFT.

    Modules have the names of the published weights.
    """

    input_dtype = torch.int32

    def __init__(self, sizes: Lfm2AudioSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.num_codebooks, sizes.frame_samples
        self._repeats = sizes.upsample_factor
        self.emb = MeanEmbedding(sizes.num_codebooks, sizes.codebook_size, sizes.hidden_size)
        self.lfm = Lfm2(sizes)
        self.lin = nn.Linear(sizes.hidden_size, sizes.n_fft + 2)
        self.istft = InverseSTFT(sizes.n_fft, sizes.hop_length)
        self.output = placed((self.lfm, self.istft))

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        x = self.emb(codes).repeat_interleave(self._repeats, dim=1)
        return self.istft.of_polar(self.lin(self.lfm(x, step)).transpose(1, 2), step)


class Lfm2(LayersInWindow):
    """LFM2: layers of short convolutions, and of attention with a sliding window. All are causal,
    so its input must not be late.
    """

    def __init__(self, sizes: Lfm2AudioSizes) -> None:
        layers = (Lfm2Layer(sizes, kind) for kind in sizes.layer_types)
        super().__init__(TransformerSizes.of(sizes), layers)
        self.embedding_norm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes x (B, T, width) to the same shape."""
        return self.embedding_norm(super().forward(x, step))


class Lfm2Layer(nn.Module):
    """Short convolution or attention, and a feed-forward part, each after a norm."""

    def __init__(self, sizes: Lfm2AudioSizes, kind: str) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, sizes.hidden_size, sizes.norm_eps)
        self.operator_norm, self.ffn_norm = norm(), norm()
        if kind == "conv":
            self.conv = ShortConv(sizes)
        else:
            self.self_attn = NormalizedAttention(sizes)
        self.feed_forward = GatedFeedForward(
            sizes.hidden_size, sizes.feed_forward_size, names=("w1", "w3", "w2")
        )

    def forward(
        self, x: torch.Tensor, positions: Positions, angles: _Angles, step: StreamStep
    ) -> torch.Tensor:
        h = self.operator_norm(x)
        if hasattr(self, "conv"):
            x = x + self.conv(h, step)
        else:
            x = x + self.self_attn(h, positions, angles, step)
        return x + self.feed_forward(self.ffn_norm(x))


class ShortConv(nn.Module):
    """Causal convolution of each channel alone, between two gates."""

    def __init__(self, sizes: Lfm2AudioSizes) -> None:
        super().__init__()
        width, bias = sizes.hidden_size, sizes.conv_bias
        self.in_proj = nn.Linear(width, 3 * width, bias=bias)
        self.conv = causal_conv(width, width, sizes.conv_kernel, groups=width, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: torch.Tensor, step: StreamStep) -> torch.Tensor:
        before, after, x = self.in_proj(x).transpose(1, 2).chunk(3, dim=1)
        return self.out_proj((after * self.conv(before * x, step)).transpose(1, 2))


class NormalizedAttention(WindowTransformerAttention):
    """Attention over a window, with a norm over each head of queries and keys."""

    def __init__(self, sizes: Lfm2AudioSizes) -> None:
        super().__init__(TransformerSizes.of(sizes))
        self.q_layernorm, self.k_layernorm = (
            nn.RMSNorm(sizes.dim_head, sizes.norm_eps) for _ in range(2)
        )

    def projected(self, x: torch.Tensor) -> Iterable[torch.Tensor]:
        q, k, v = super().projected(x)
        return self.q_layernorm(q), self.k_layernorm(k), v
