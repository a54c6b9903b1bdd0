"""Spectral losses, which compare the magnitudes of two spectra, but not their phases.

They use several resolutions, because each resolution shows other errors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from token2wav_voice.features import PROMPT_BANDS, slaney_filters

_FFT_SIZES = (256, 512, 1024, 2048)
_FLOOR = 1e-4  # smallest magnitude; smaller ones are inaudible
_MEL_FFT, _MEL_HOP = 1920, 480
_MEL_WEIGHT = 2.0


class SpectralLosses:
    """Multi-resolution STFT loss (Yamamoto et al., 2020) and L1 of the log-mel."""

    def __init__(self, rate_hz: int) -> None:
        filters = slaney_filters(rate_hz, _MEL_FFT, PROMPT_BANDS)
        self._mel_filters = torch.from_numpy(filters).float()
        self._windows = {size: torch.hann_window(size) for size in (*_FFT_SIZES, _MEL_FFT)}

    def __call__(self, audio: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        """Computes the losses of audio (B, N) against a target (B, N).

        The losses of spectra are means over all resolutions.
        """
        shape, level = [], []
        for size in _FFT_SIZES:
            result, reference = (
                self._magnitude(signal, size, size // 4) for signal in (audio, target)
            )
            shape.append((result - reference).norm() / reference.norm().clamp(min=_FLOOR))
            level.append(F.l1_loss(result.log(), reference.log()))
        audio_mel, target_mel = self.log_mel(audio), self.log_mel(target)
        return {
            "convergence": torch.stack(shape).mean(),
            "magnitude": torch.stack(level).mean(),
            "mel": _MEL_WEIGHT * F.l1_loss(audio_mel, target_mel),
        }

    def log_mel(self, audio: torch.Tensor) -> torch.Tensor:
        """Computes the log-mel (B, 80, frames) of audio (B, N), at twice the model's frame rate."""
        return (
            (self._mel_filters @ self._magnitude(audio, _MEL_FFT, _MEL_HOP // 2))
            .clamp(min=1e-5)
            .log()
        )

    def _magnitude(self, signal: torch.Tensor, size: int, hop: int) -> torch.Tensor:
        spectrum = torch.stft(signal, size, hop, window=self._windows[size], return_complex=True)
        return (spectrum.real.square() + spectrum.imag.square() + _FLOOR**2).sqrt()
