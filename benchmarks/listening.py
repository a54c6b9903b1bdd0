"""Listeners of a stream: pace of a language model, silences that a player hears, and quantiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

PACE = 25.0  # tokens per second of a language model


def silences(heard: Iterable[tuple[float, float]], buffer_s: float) -> list[float]:
    """Lists the silences of a player in seconds, one for each time its audio runs out.

    Args:
        heard: arrival and length of every chunk, in seconds.
        buffer_s: seconds that the player waits after the first chunk before it starts. After a
            silence, the player continues with the next chunk at once.
    """
    found, plays_until = list[float](), None
    for arrival_s, audio_s in heard:
        if plays_until is None:
            plays_until = arrival_s + buffer_s
        if arrival_s > plays_until:
            found.append(arrival_s - plays_until)
        plays_until = max(plays_until, arrival_s) + audio_s
    return found


def quantiles(values: Sequence[float], digits: int = 1) -> dict[str, float] | None:
    """Computes p50, p90, p99 and the largest value.

    Returns None without values, for example for the gaps of utterances of one chunk.
    """
    if not values:
        return None
    named = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
    return {name: round(value, digits) for name, value in {**named, "max": max(values)}.items()}
