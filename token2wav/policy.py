"""Who runs next, and with whom.

First those whose listeners are about to run out of audio, then streams that were not heard yet, then whoever will run
out first; these last have time to spare and never make a batch of the others slower. Every fourth batch goes by how
long chunks have waited, so that nobody starves under overload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

RESERVE_SECONDS = 0.25  # a listener with less audio than this goes before newcomers
_FAIR_TURN = 4
_URGENT, _UNHEARD, _RELAXED = range(3)


@dataclass(frozen=True)
class Ready(Generic[Owner]):
    """A chunk that could run. Times are of the scheduler's clock, in seconds.

    Attributes:
        owner: whose it is.
        since: when its tokens were all there.
        plays_until: when its listener will run out of audio; None for a stream that was not heard yet.
        tokens: its length.
        steps: of its ODE; what has another number cannot be computed together with it.
    """

    owner: Owner
    since: float
    plays_until: float | None
    tokens: int
    steps: int = 0


class Policy(Generic[Owner]):
    """Forms batches.

    Args:
        most: chunks in a batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._turn = 0

    def next_batch(self, ready: Sequence[Ready[Owner]], now: float, lanes: int = 1) -> list[Ready[Owner]]:
        """The chunk that comes first, and those that may ride along.

        A batch is as slow as what is in it, so a chunk takes only such along as are no longer than itself and have as
        many ODE steps, and leaves other lanes their share.

        Args:
            ready: what could run.
            now: of the same clock.
            lanes: that have nothing to do, this one included.
        """
        if not ready:
            return []
        self._turn += 1
        if self._turn % _FAIR_TURN:
            ranked = sorted(ready, key=lambda chunk: _rank(chunk, now))
        else:
            ranked = sorted(ready, key=lambda chunk: chunk.since)
        head = ranked[0]
        least_urgent = _RELAXED if _rank(head, now)[0] == _RELAXED else _UNHEARD
        riders = [
            chunk
            for chunk in ranked
            if chunk.steps == head.steps and chunk.tokens <= head.tokens and _rank(chunk, now)[0] <= least_urgent
        ]
        return riders[: min(self._most, math.ceil(len(ready) / lanes))]


def _rank(chunk: Ready[Owner], now: float) -> tuple[int, float]:
    if chunk.plays_until is None:
        return _UNHEARD, chunk.since
    return (_URGENT if chunk.plays_until - now < RESERVE_SECONDS else _RELAXED), chunk.plays_until
