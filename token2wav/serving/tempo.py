"""Tempo of a stream: its mel is stretched or compressed in time between flow and vocoder."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import torch

from token2wav.config.values import shown
from token2wav.errors import InputError

_SLOWEST, _FASTEST = 0.5, 2.0
_HALF = Fraction(1, 2)


@lru_cache(maxsize=64, typed=True)
def exact_speed(speed: float) -> Fraction:
    """Returns a speed as the exact number of its decimals: 11/10 for 1.1. Raises InputError if the
    speed is not a number from 0.5 to 2.
    """
    if type(speed) not in (int, float) or not _SLOWEST <= speed <= _FASTEST:
        raise InputError(
            "speed", f"{shown(speed)} is not a number from {_SLOWEST:g} to {_FASTEST:g}"
        )
    return Fraction(str(speed))


class Tempo:
    """Tempo of the mel of one stream.

    Frame i of the result lies at position (i + 0.5) * speed - 0.5 of the mel. It is interpolated
    linearly between the two frames beside this position, as by `torch.nn.functional.interpolate`
    with `scale_factor` 1 / speed. N frames give floor(N / speed) frames. The result does not depend
    on how the mel is divided into chunks, because a chunk holds back each frame that needs a later
    frame of the mel.
    """

    def __init__(self, speed: Fraction) -> None:
        self._speed = speed
        self._received = self._made = 0  # frames of the mel, and of the result
        self._kept: torch.Tensor | None = None  # newest frames of the mel

    @torch.inference_mode()
    def advance(self, mel: torch.Tensor, *, last: bool) -> torch.Tensor:
        """Returns the frames (bands, m) that the next frames (bands, n) of the mel complete."""
        frames = mel if self._kept is None else torch.cat((self._kept, mel), dim=1)
        self._received += mel.shape[1]
        begin, newest = self._received - frames.shape[1], self._received - 1
        made = self._made
        count = math.floor(self._received / self._speed)
        if not last:  # a frame beyond the newest one may need the next frame of the mel
            count = min(count, math.ceil((newest + _HALF) / self._speed - _HALF))
        self._made = count = max(made, count)
        index = torch.arange(made, count, dtype=torch.float64, device=frames.device)
        position = ((index + 0.5) * float(self._speed) - 0.5).clamp(0, max(newest, 0)) - begin
        left = position.long()
        right = (left + 1).clamp(max=newest - begin)
        weight = (position - left).to(frames.dtype)
        result = torch.lerp(frames[:, left], frames[:, right], weight)
        next_left = min(math.floor((count + _HALF) * self._speed - _HALF), newest)
        # A copy, because the next batch may overwrite the memory of these frames.
        self._kept = frames[:, max(0, next_left - begin) :].clone()
        return result
