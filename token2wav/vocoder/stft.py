"""The short-time Fourier transform of HiFT and its inverse, as convolutions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

_MAX_MAGNITUDE = 100.0
_LEAST_WEIGHT = 1e-6  # of the windows over a sample; where there is any frame it is 0.1 and more


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


def reflected(source: torch.Tensor, n_fft: int) -> torch.Tensor:
    """A signal (B, 1, N) with half a window mirrored at both ends, as `spectrum` takes it."""
    return F.pad(source, (n_fft // 2, n_fft // 2), mode="reflect")


def spectrum(padded: torch.Tensor, analysis: torch.Tensor, hop: int) -> torch.Tensor:
    """STFT of a signal with padding, (B, 1, N + n) to (B, n + 2, N / hop + 1): real parts, then imaginary parts."""
    return F.conv1d(padded, analysis, stride=hop)


def waveform(
    x: torch.Tensor, synthesis: torch.Tensor, window: torch.Tensor, hop: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Inverse STFT of log-magnitudes and phases.

    Args:
        x: (B, n_fft + 2, frames) as HiFT's last convolution gives them.
        synthesis: from `fourier_kernels`.
        window: (n_fft,) of both directions.
        hop: samples from a frame to the next.
        valid: (B, 1, frames) ones, and zeros for frames that are not there; None for ones only.

    Returns:
        (B, (frames - 1) * hop), zero where there is no frame.
    """
    edge = len(window) // 2
    bins = edge + 1
    magnitude = x[:, :bins].exp().clamp(max=_MAX_MAGNITUDE)
    if valid is not None:
        magnitude = magnitude * valid
    angle = x[:, bins:].sin()  # the sine of the output is the phase, in radians (Q24)
    stft = torch.cat((magnitude * angle.cos(), magnitude * angle.sin()), dim=1)
    # Overlapping windows, and what they add up to.
    overlap = F.conv_transpose1d(stft, synthesis, stride=hop, padding=edge)
    frames = torch.ones_like(x[:1, :1]) if valid is None else valid
    weight = F.conv_transpose1d(frames, window.square()[None, None], stride=hop, padding=edge)
    return (overlap / weight if valid is None else overlap / weight.clamp(min=_LEAST_WEIGHT))[:, 0]
