"""Short-time Fourier transform as convolutions, and the overlap-add of its inverse for streams."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from token2wav.layers.convolutions import Overlap, for_cudnn
from token2wav.layers.streaming import OFFLINE, StreamModule, StreamStep

MOST_MAGNITUDE = 100.0  # limit of Vocos, and of codecs that copied it


def fourier_kernels(window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns convolution kernels of the short-time Fourier transform and of its inverse for a
    window (n,), each (n + 2, 1, n): real parts of all bins, then imaginary parts.

    16 samples need no FFT, and every backend has convolutions.
    """
    size = len(window)
    angle = (
        2 * math.pi / size * torch.outer(torch.arange(size // 2 + 1), torch.arange(size)).double()
    )
    waves = torch.cat((angle.cos(), -angle.sin()))  # (n + 2, n)
    # Every bin except the first and the last counts twice in the inverse transform, because it also
    # stands for its mirror image.
    twice = torch.full((size // 2 + 1,), 2.0, dtype=torch.float64)
    twice[0] = twice[-1] = 1.0
    inverse = waves * twice.repeat(2)[:, None] / size
    return (waves * window).float()[:, None], (inverse * window).float()[:, None]


class OverlapAdd(StreamModule):
    """Overlap-add of windowed frames, divided by the sum of the squared windows.

    Args:
        kernels: (C, 1, n) contribution of every channel to the samples of a frame, with the window
            (n,).
        cut: samples that are dropped at each end of a whole sequence.
    """

    kernels: torch.Tensor
    weights: torch.Tensor

    def __init__(self, kernels: torch.Tensor, window: torch.Tensor, hop: int, cut: int) -> None:
        super().__init__()
        # one more channel, of ones, from which the sum of overlapping windows is computed
        self.overlap = Overlap(len(kernels) + 1, len(window), hop, cut=cut)
        self.register_buffer("kernels", kernels, persistent=False)
        self.register_buffer("weights", window.square()[None, None], persistent=False)

    def add(self, frames: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Converts frames (B, C, T) to samples (B, 1, hop * T) without the cut samples."""
        x = torch.cat((frames, torch.ones_like(frames[:, :1])), dim=1)
        x = for_cudnn(self.overlap.with_context(x, step, channels_last=False))
        hop = self.overlap.stride
        audio = F.conv_transpose1d(x[:, :-1], self.kernels, stride=hop)
        weight = F.conv_transpose1d(x[:, -1:], self.weights, stride=hop)
        audio, weight = (
            self.overlap.complete_outputs(signal, x.shape[2], step) for signal in (audio, weight)
        )
        return audio / weight


class InverseSTFT(OverlapAdd):
    """Inverse short-time Fourier transform with Hann windows of `n_fft` samples, `hop` samples
    apart.
    """

    inverse: torch.Tensor

    def __init__(self, n_fft: int, hop: int) -> None:
        window = torch.hann_window(n_fft)
        # A channel is a sample of a frame.
        super().__init__(torch.diag(window)[:, None], window, hop, cut=(n_fft - hop) // 2)
        inverse = fourier_kernels(torch.ones(n_fft))[1][:, 0].T  # (n_fft, n_fft + 2)
        self.register_buffer("inverse", inverse, persistent=False)

    def forward(self, spectrum: torch.Tensor, step: StreamStep = OFFLINE) -> torch.Tensor:
        """Converts real and imaginary parts (B, n_fft + 2, T) to samples (B, 1, hop * T)."""
        return self.add(torch.matmul(self.inverse, spectrum), step)

    def of_polar(
        self, spectrum: torch.Tensor, step: StreamStep = OFFLINE, most: float | None = None
    ) -> torch.Tensor:
        """Converts log-magnitudes and phases (B, n_fft + 2, T) to samples (B, 1, hop * T). `most`
        is the largest magnitude; None for no limit.
        """
        magnitude, phase = spectrum.float().chunk(2, dim=1)
        magnitude = magnitude.exp()
        if most is not None:
            magnitude = magnitude.clamp(max=most)
        return self(torch.cat((magnitude * phase.cos(), magnitude * phase.sin()), 1), step)
