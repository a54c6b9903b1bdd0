"""Acoustic decoder of VibeVoice, with modules named as in Microsoft's code."""

from __future__ import annotations

import torch
from torch import nn

from token2wav.families.vibevoice import VibeVoiceSizes
from token2wav.layers.combine import Chain, placed, run
from token2wav.layers.convolutions import StreamConvTranspose, causal_conv
from token2wav.layers.feed_forward import FeedForward
from token2wav.layers.streaming import OFFLINE, StreamModule, StreamStep
from token2wav.networks.waveform_network import WaveformNetwork


class VibeVoiceDecoder(WaveformNetwork):
    """Decoder from latents to audio.

    Latents are taken as the diffusion head of the language model returns them. If the folder has
    a scale and a bias for latents, the decoder divides by the scale and subtracts the bias.

    Args:
        sizes: sizes of the decoder.
    """

    def __init__(self, sizes: VibeVoiceSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.input_channels, self.frame_samples = sizes.hidden_size, sizes.frame_samples
        ratios, depths = sizes.downsampling_ratios[::-1], sizes.depths[::-1]
        widths = [sizes.num_filters << doublings for doublings in range(len(depths))][::-1]
        if sizes.scaled:
            self.scaling_factor, self.bias_factor = (nn.Parameter(torch.ones(())) for _ in range(2))
        self.upsample_layers = nn.ModuleList(
            [causal_conv(sizes.hidden_size, widths[0], sizes.kernel_size)]
        )
        for ratio, width in zip(ratios, widths, strict=False):
            self.upsample_layers.append(
                StreamConvTranspose(width, width // 2, 2 * ratio, ratio, cut="end")
            )
        self.stages = nn.ModuleList(
            Chain(VibeVoiceBlock(width, sizes) for _ in range(depth))
            for width, depth in zip(widths, depths, strict=True)
        )
        self.head = causal_conv(sizes.num_filters, 1, sizes.kernel_size)
        pairs = zip(self.upsample_layers, self.stages, strict=True)
        self._order = [*(layer for pair in pairs for layer in pair), self.head]
        self.output = placed(self._order)

    def forward(self, latents: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        if self.sizes.scaled:
            latents = latents / self.scaling_factor - self.bias_factor
        return run(self._order, latents, step)


class VibeVoiceBlock(StreamModule):
    """A convolution of every channel, and a feed-forward part. Each follows a norm, and is scaled
    and added to its input.

    Args:
        channels: channels of input and output.
        sizes: sizes of the decoder.
    """

    def __init__(self, channels: int, sizes: VibeVoiceSizes) -> None:
        super().__init__()
        self.norm, self.ffn_norm = (nn.RMSNorm(channels, sizes.rms_norm_eps) for _ in range(2))
        self.mixer = causal_conv(channels, channels, sizes.kernel_size, groups=channels)
        self.ffn = FeedForward(
            channels, sizes.ffn_expansion * channels, names=("linear1", "linear2"), bias=True
        )
        self.gamma, self.ffn_gamma = (nn.Parameter(torch.ones(channels)) for _ in range(2))

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Computes x (B, C, T) to the same shape."""
        mixed = self.mixer(self.norm(x.transpose(1, 2)).transpose(1, 2), step)
        x = torch.addcmul(x, self.gamma[:, None], mixed).transpose(1, 2)
        return torch.addcmul(x, self.ffn_gamma, self.ffn(self.ffn_norm(x))).transpose(1, 2)
