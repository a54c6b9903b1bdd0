"""Fourier transforms as convolutions, against those of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from token2wav.layers.inverse_stft import OverlapAdd, fourier_kernels

SIZE, HOP = 16, 4
WINDOW = torch.hann_window(SIZE)


def test_analysis_is_the_transform_of_every_window() -> None:
    audio = torch.randn(2, 1, 160, generator=torch.Generator().manual_seed(0))
    spectrum = F.conv1d(audio, fourier_kernels(WINDOW)[0], stride=HOP)
    expected = torch.fft.rfft(audio[:, 0].unfold(1, SIZE, HOP) * WINDOW).transpose(1, 2)
    assert torch.allclose(spectrum, torch.cat((expected.real, expected.imag), 1), atol=1e-5)


def test_synthesis_is_the_inverse_transform() -> None:
    generator = torch.Generator().manual_seed(0)
    real, imaginary = (torch.randn(2, SIZE // 2 + 1, 30, generator=generator) for _ in range(2))
    layer = OverlapAdd(fourier_kernels(WINDOW)[1], WINDOW, HOP, cut=SIZE // 2)
    layer.place()
    audio = layer.add(torch.cat((real, imaginary), 1))[:, 0]
    expected = torch.istft(torch.complex(real, imaginary), SIZE, HOP, window=WINDOW)
    assert torch.allclose(audio[:, : expected.shape[1]], expected, atol=1e-5)
