"""Pitch of a recording by autocorrelation, which is fast, and good enough for a clean voice."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

_LOWEST_HZ, _HIGHEST_HZ = 60.0, 350.0
_VOICED = 0.5  # least normalised autocorrelation
_SILENT = 1e-3  # RMS below which a frame is unvoiced
# The first peak that has at least this share of the highest peak is chosen, against octave errors.
_EARLIER_IS_BETTER = 0.92


def pitch(signal: NDArray[np.float32], rate_hz: int, hop: int) -> NDArray[np.float32]:
    """Estimates F0 in Hz around the middle of every hop, shape (n // hop,); 0 if it is unvoiced.

    The method is the normalised autocorrelation of Boersma (1993): the autocorrelation of the
    windowed signal, divided by the autocorrelation of the window.
    """
    shortest, longest = int(rate_hz / _HIGHEST_HZ), int(np.ceil(rate_hz / _LOWEST_HZ))
    width = 3 * longest
    padded = np.pad(signal.astype(np.float64), ((width - hop) // 2, width))
    frames = sliding_window_view(padded, width)[::hop][: len(signal) // hop]
    frames = frames - frames.mean(axis=1, keepdims=True)
    window = np.hanning(width)
    correlation = _autocorrelation(frames * window)[:, : longest + 2]
    normal = (
        correlation
        / np.maximum(correlation[:, :1], 1e-12)
        / (_autocorrelation(window) / (window @ window))[: longest + 2]
    )
    middle = normal[:, 1:-1]
    peak = (middle >= normal[:, :-2]) & (middle > normal[:, 2:])
    peak[:, : shortest - 1] = False
    height = np.where(peak, middle, 0.0)
    highest = height.max(axis=1)
    chosen = (height >= _EARLIER_IS_BETTER * highest[:, None]).argmax(axis=1)  # the first one
    rows = np.arange(len(normal))
    before, at, after = (normal[rows, chosen + shift] for shift in (0, 1, 2))
    bend = before - 2 * at + after
    lag = (
        chosen
        + 1
        + np.where(bend < -1e-9, 0.5 * (before - after) / np.where(bend < -1e-9, bend, 1.0), 0.0)
    )
    voiced = (highest > _VOICED) & (np.sqrt(np.square(frames).mean(axis=1)) > _SILENT)
    return np.where(voiced, rate_hz / np.maximum(lag, 1.0), 0.0).astype(np.float32)


def _autocorrelation(x: NDArray[np.float64]) -> NDArray[np.float64]:
    size = 1 << (2 * x.shape[-1] - 1).bit_length()
    return np.fft.irfft(np.square(np.abs(np.fft.rfft(x, size))), size)[..., : x.shape[-1]]
