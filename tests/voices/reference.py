"""Second implementation of the features, from their definitions, with filters from formulas."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def whisper_log_mel(signal: NDArray[np.float32]) -> Array:
    """(128, n // 160) of a signal at 16 kHz."""
    n_fft, hop = 400, 160
    x = np.pad(signal.astype(np.float64), n_fft // 2, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n_fft) / n_fft)
    frames = np.stack([x[160 * i : 160 * i + n_fft] * window for i in range(len(signal) // hop)])
    log_mel = np.log10(np.maximum(slaney_filters(16_000, n_fft, 128) @ power(frames).T, 1e-10))
    return (np.maximum(log_mel, log_mel.max() - 8) + 4) / 4


def prompt_mel(signal: NDArray[np.float32], top_hz: int = 12_000) -> Array:
    """(n // 480, 80) of a signal at 24 kHz."""
    n_fft, hop = 1920, 480
    x = np.pad(signal.astype(np.float64), 720, mode="reflect")
    window = np.sin(np.pi * np.arange(n_fft) / n_fft) ** 2
    frames = np.stack([x[hop * i : hop * i + n_fft] * window for i in range(len(signal) // hop)])
    magnitude = np.sqrt(power(frames) + 1e-9)
    return np.log(np.maximum(magnitude @ slaney_filters(24_000, n_fft, 80, top_hz).T, 1e-5))


def kaldi_fbank(signal: NDArray[np.float32]) -> Array:
    """(frames, 80) of a signal at 16 kHz, its mean over time removed."""
    size, shift, n_fft = 400, 160, 512
    x = signal.astype(np.float64)
    window = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(size) / (size - 1))) ** 0.85  # Povey's
    rows = []
    for start in range(0, len(x) - size + 1, shift):
        frame = x[start : start + size] - x[start : start + size].mean()
        before = np.concatenate([frame[:1], frame[:-1]])
        rows.append(np.pad((frame - 0.97 * before) * window, (0, n_fft - size)))
    spectrum = power(np.stack(rows))[:, : n_fft // 2]  # without the last bin

    def mel(hz: Array | float) -> Array:
        return 1127 * np.log(1 + np.asarray(hz) / 700)

    edges = np.linspace(mel(20.0), mel(8000.0), 82)
    bins = mel(np.arange(n_fft // 2) * 16_000 / n_fft)
    filters = np.stack([triangle(bins, *edges[band : band + 3]) for band in range(80)])
    log_mel = np.log(np.maximum(spectrum @ filters.T, np.finfo(np.float32).eps))
    return np.asarray(log_mel - log_mel.mean(axis=0))


def slaney_filters(rate: int, n_fft: int, bands: int, top_hz: int = 0) -> Array:
    """Linear to 1 kHz, logarithmic above; each triangle of the same area."""
    top = 15 + 27 * np.log((top_hz or rate / 2) / 1000) / np.log(6.4)
    mels = np.linspace(0, top, bands + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    hz = np.arange(n_fft // 2 + 1) * rate / n_fft
    return np.stack(
        [triangle(hz, *edges[b : b + 3]) * 2 / (edges[b + 2] - edges[b]) for b in range(bands)]
    )


def triangle(x: Array, left: float, centre: float, right: float) -> Array:
    return np.maximum(0, np.minimum((x - left) / (centre - left), (right - x) / (right - centre)))


def power(frames: Array) -> Array:
    return np.asarray(np.square(np.abs(np.fft.rfft(frames))))
