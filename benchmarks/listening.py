"""Listeners of a stream: pace of a language model, silences that a player hears, and quantiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

PACE = 25.0  # tokens per second of a language model
_ROUNDING_S = 1e-4


@dataclass(frozen=True)
class Piece:
    """Piece of audio as it arrived; times are in seconds.

    Attributes:
        arrival_s: arrival since the request was sent, or its first token.
        audio_s: length of the audio.
        sound_s: time from the start of the piece to its first audible sound; None without one.
    """

    arrival_s: float
    audio_s: float
    sound_s: float | None


@dataclass(frozen=True)
class Heard:
    """Utterance as a listener hears it. docs/benchmarking.md defines the figures.

    Attributes:
        pieces: pieces of audio in their order.
        lag_s: time by which the client sent the request too late.
    """

    pieces: tuple[Piece, ...]
    lag_s: float
    error: str | None = None

    def complete(self, audio_s: float) -> bool:
        """Returns whether all audio arrived."""
        arrived_s = sum(piece.audio_s for piece in self.pieces)
        return self.error is None and abs(arrived_s - audio_s) <= _ROUNDING_S

    @property
    def first_byte_s(self) -> float:
        """Arrival of the first audio."""
        return self.pieces[0].arrival_s

    @cached_property
    def first_playable_s(self) -> float:
        """Earliest start of a player that plays to the end without a gap."""
        return max(
            piece.arrival_s - before
            for piece, before in zip(self.pieces, self._starts, strict=True)
        )

    @property
    def buffer_s(self) -> float:
        """Shortest time that a player must wait after the first audio to play without a gap."""
        return self.first_playable_s - self.first_byte_s

    @cached_property
    def leading_silence_s(self) -> float | None:
        """Time from the start of the audio to its first sound; None if there is no sound."""
        return next(
            (
                before + piece.sound_s
                for piece, before in zip(self.pieces, self._starts, strict=True)
                if piece.sound_s is not None
            ),
            None,
        )

    @property
    def first_audible_s(self) -> float | None:
        """Time at which a player that starts at `first_playable_s` makes the first sound."""
        silence_s = self.leading_silence_s
        return None if silence_s is None else self.first_playable_s + silence_s

    @property
    def _starts(self) -> list[float]:
        """Position of each piece in the audio, in seconds."""
        return list(accumulate((piece.audio_s for piece in self.pieces[:-1]), initial=0.0))


def silences(heard: Iterable[tuple[float, float]], buffer_s: float) -> list[float]:
    """Lists the silences of a player in seconds, one for each time its audio runs out.

    Args:
        heard: arrival and length of every chunk, in seconds.
        buffer_s: seconds that the player waits after the first chunk before it starts. After a
            silence, the player continues with the next chunk at once.
    """
    gaps, plays_until = list[float](), None
    for arrival_s, audio_s in heard:
        if plays_until is None:
            plays_until = arrival_s + buffer_s
        if arrival_s > plays_until:
            gaps.append(arrival_s - plays_until)
        plays_until = max(plays_until, arrival_s) + audio_s
    return gaps


def quantiles(values: Sequence[float], digits: int = 1) -> dict[str, float] | None:
    """Computes p50, p90, p99 and the largest value.

    Returns None without values, for example for the gaps of utterances of one chunk.
    """
    if not values:
        return None
    named = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
    return {name: round(value, digits) for name, value in {**named, "max": max(values)}.items()}
