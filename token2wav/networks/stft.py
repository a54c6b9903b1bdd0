"""The short-time Fourier transform of HiFT and its inverse, as convolutions over a stream."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from token2wav.networks.streaming import WHOLE, Overlap, Piece, Streaming, strided_delay

_MAX_MAGNITUDE = 100.0


def fourier_kernels(window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Short-time Fourier transform as convolution kernels: 16 samples need no FFT, and every engine has convolutions.

    Args:
        window: (n,) of both directions.

    Returns:
        Analysis and synthesis kernels, (n + 2, 1, n): real parts of all bins, then imaginary parts.
    """
    size = len(window)
    angle = 2 * math.pi / size * torch.outer(torch.arange(size // 2 + 1), torch.arange(size)).double()
    waves = torch.cat((angle.cos(), -angle.sin()))  # (n + 2, n)
    # All bins but the first and the last stand for two of the inverse transform, their mirror image included.
    twice = torch.full((size // 2 + 1,), 2.0, dtype=torch.float64)
    twice[0] = twice[-1] = 1.0
    inverse = waves * twice.repeat(2)[:, None] / size
    return (waves * window).float()[:, None], (inverse * window).float()[:, None]


class Analysis(Streaming):
    """STFT of a signal with half a window mirrored at both ends.

    Args:
        n_fft, hop: samples of a window, and from one to the next.
        delay: of the signal.
    """

    kernels: torch.Tensor

    def __init__(self, n_fft: int, hop: int, delay: int) -> None:
        super().__init__()
        self.edge, self.hop, self.delay = n_fft // 2, hop, delay
        self.keeps = (1, self.edge - delay + hop * self.delayed)
        self.register_buffer("kernels", fourier_kernels(torch.hann_window(n_fft))[0], persistent=False)

    @property
    def delayed(self) -> int:
        return strided_delay(self.edge - self.delay, 2 * self.edge, self.hop)

    def forward(self, signal: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        """(B, 1, N) to (B, n_fft + 2, N / hop + 1): real parts, then imaginary parts."""
        return F.conv1d(piece.extended(self, signal, self.edge, self.edge, "reflect"), self.kernels, stride=self.hop)


class Synthesis(nn.Module):
    """Inverse STFT of log-magnitudes and phases.

    Args:
        n_fft, hop: samples of a window, and from one to the next.
        delay: of the input, in windows.
    """

    kernels: torch.Tensor
    weights: torch.Tensor

    def __init__(self, n_fft: int, hop: int, delay: int) -> None:
        super().__init__()
        self.overlap = Overlap(n_fft + 3, n_fft, hop, cut=n_fft // 2, delay=delay, more=1)
        self.bins = n_fft // 2 + 1
        window = torch.hann_window(n_fft)
        self.register_buffer("kernels", fourier_kernels(window)[1], persistent=False)
        self.register_buffer("weights", window.square()[None, None], persistent=False)

    @property
    def delayed(self) -> int:
        """Samples that the signal is late."""
        return self.overlap.delayed

    def forward(self, x: torch.Tensor, piece: Piece = WHOLE) -> torch.Tensor:
        """(B, n_fft + 2, frames), as HiFT's last convolution gives them, to (B, (frames - 1) * hop)."""
        magnitude = x[:, : self.bins].exp().clamp(max=_MAX_MAGNITUDE)
        angle = x[:, self.bins :].sin()  # the sine of the output is the phase, in radians (Q24)
        there = torch.ones_like(magnitude[:, :1])  # where there is a window, and not before the first or after the last
        stft = torch.cat((magnitude * angle.cos(), magnitude * angle.sin(), there), dim=1)
        stft, hop = self.overlap.extended(stft, piece), self.overlap.stride
        audio = F.conv_transpose1d(stft[:, :-1], self.kernels, stride=hop)
        weight = F.conv_transpose1d(stft[:, -1:], self.weights, stride=hop)
        audio, weight = (self.overlap.settled(each, stft.shape[2], piece) for each in (audio, weight))
        return (audio / weight)[:, 0]
