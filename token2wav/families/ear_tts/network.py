"""Decoder of EAR-TTS's codec."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.families.ear_tts import EarTtsSizes
from token2wav.layers.codebooks import Codebooks
from token2wav.layers.combine import placed, run
from token2wav.layers.convnext import ConvNeXt
from token2wav.layers.convolutions import StreamConvTranspose, causal_conv
from token2wav.layers.inverse_stft import InverseSTFT
from token2wav.layers.streaming import OFFLINE, StreamStep
from token2wav.networks.waveform_network import WaveformNetwork

_MOST_MAGNITUDE = 100.0


class EarTtsDecoder(WaveformNetwork):
    """Decoder from codes to audio. Its layers have the numbers of the published weights.

    Args:
        sizes: sizes of the codec.
    """

    input_dtype = torch.int32

    def __init__(self, sizes: EarTtsSizes) -> None:
        super().__init__()
        self.input_channels, self.frame_samples = sizes.num_quantizers, sizes.frame_samples
        self.codebooks = Codebooks(
            sizes.num_quantizers,
            sizes.codebook_size,
            sizes.latent_size,
            sizes.latent_size,
            projected=False,
        )
        self.layers = nn.ModuleList()
        inputs = sizes.latent_size
        for width, rate in zip(sizes.widths, reversed(sizes.rates), strict=True):
            self.layers.append(
                StreamConvTranspose(
                    inputs, width, rate, rate, cut="end", groups=sizes.groups, bias=False
                )
            )
            self.layers.extend(
                ConvNeXt(width, kernel=sizes.kernel_size, scaled=False)
                for _ in range(sizes.num_blocks)
            )
            inputs = width
        self.layers.append(causal_conv(inputs, sizes.n_fft + 2, 1, bias=False))
        self.synthesis = Synthesis(sizes.n_fft, sizes.hop_length)
        self.output = placed([*self.layers, self.synthesis])

    def forward(self, codes: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        return self.synthesis(run(self.layers, self.codebooks(codes), step), step)


class Synthesis(InverseSTFT):
    """Inverse STFT of log-magnitudes and phases. No sample of a frame exceeds its window.

    Args:
        n_fft: samples of a window.
        hop: samples from a window to the next one.
    """

    bound: torch.Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        super().__init__(n_fft, hop)
        self.register_buffer("bound", torch.hann_window(n_fft)[:, None], persistent=False)

    def forward(self, x: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Converts magnitudes and phases (B, n_fft + 2, T) to samples (B, 1, hop * T)."""
        magnitude, phase = x.float().chunk(2, dim=1)
        magnitude = _MOST_MAGNITUDE * torch.exp(-F.softplus(math.log(_MOST_MAGNITUDE) - magnitude))
        spectrum = torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), dim=1)
        frames = torch.matmul(self.inverse, spectrum).clamp(-self.bound, self.bound)
        return self.add(frames, step)
