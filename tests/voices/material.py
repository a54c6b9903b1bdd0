"""Test signal that resembles speech."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Signal = NDArray[np.float32]
WriteWav = Callable[..., Path]


def speechlike(seconds: float, rate: int, *, seed: int = 0) -> Signal:
    """(n,) harmonics of a gliding pitch and some noise, in syllables, -23 dBFS."""
    t = np.arange(round(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * t)) / rate
    voiced = sum(np.sin(k * phase + k) / k for k in range(1, 20))
    noise = np.random.default_rng(seed).standard_normal(len(t))
    signal = (voiced + 0.05 * noise) * (0.55 + 0.45 * np.sin(2 * np.pi * 3 * t))
    return (0.07 * signal / np.sqrt(np.mean(np.square(signal)))).astype(np.float32)
