"""Policy of the scheduler: it forms the next batch out of the chunks that are ready.

First those whose listeners are about to run out of audio, then streams that were not heard yet,
then whoever will run out first; these last have time to spare and never make a batch of the others
slower. Every fourth batch goes by how long chunks have waited, so that under overload nobody
starves of those that have no time. Whoever is far ahead of playback gets only what others leave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

RESERVE_SECONDS = 0.25  # a listener with less audio than this goes before newcomers
AHEAD_SECONDS = 5.0  # a stream with more audio than this in hand can do without a chunk for a while
_HARMLESS_SECONDS = 0.05  # a batch this short keeps nobody waiting
_SHORT_TOKENS = 100  # a batch of no more than this is worth its while; one long chunk is as slow
_FAIR_TURN = 4
_NEWEST = 0.2  # weight of the latest batch in the mean time of a token
_URGENT, _UNHEARD, _RELAXED, _AHEAD = range(4)


@dataclass(frozen=True)
class Ready(Generic[Owner]):
    """Chunk that is ready to run. Times are of the scheduler's clock, in seconds.

    Attributes:
        owner: utterance that the chunk belongs to.
        since: time at which its tokens were all there.
        plays_until: time at which its listener runs out of audio; None for a stream that was not
            heard yet.
        tokens: number of its tokens.
        steps: number of its ODE steps; only chunks with the same number are computed together.
    """

    owner: Owner
    since: float
    plays_until: float | None
    tokens: int
    steps: int = 0


class Policy(Generic[Owner]):
    """Policy that forms batches, and learns how fast the workers are.

    Args:
        most: largest number of chunks in a batch.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._turn = 0
        self._token_seconds = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Learns the speed of a worker from a batch that it has computed; one that only ended
        streams has no tokens.
        """
        if not tokens:
            return
        weight = _NEWEST if self._token_seconds else 1.0
        self._token_seconds += weight * (seconds / tokens - self._token_seconds)

    def next_batch(
        self,
        ready: Sequence[Ready[Owner]],
        now: float,
        workers: int = 1,
        awaited: Sequence[float] = (),
    ) -> list[Ready[Owner]]:
        """Returns the chunk that comes first, and those that are computed together with it.

        A batch is as slow as what is in it and cannot be stopped, so a chunk takes only such along
        as are no longer than itself and have as many ODE steps, and leaves other workers their
        share. One that has time does not take so many along that it comes too late itself or, on
        the last worker, that another listener falls silent meanwhile.

        Args:
            ready: chunks that could run.
            now: present time on the same clock.
            workers: number of idle workers, this one included.
            awaited: for each stream that waits for tokens, the time at which its listener runs out
                of audio, or of its admission if it was not heard yet.

        Returns:
            Nothing also where all that is ready is far ahead, and others may need the worker before
            it is done.
        """
        if not ready:
            return []
        self._turn += 1
        by_waiting = not self._turn % _FAIR_TURN
        ranked = sorted(ready, key=lambda chunk: _rank(chunk, now, by_waiting=by_waiting))
        head = ranked[0]
        kind = _kind(head, now)
        candidates = [
            chunk
            for chunk in ranked
            if chunk.steps == head.steps
            and chunk.tokens <= head.tokens
            and _kind(chunk, now) <= max(kind, _UNHEARD)
        ]
        batch = candidates[: min(self._most, math.ceil(len(ready) / workers))]
        if not has_time(head, now):
            return batch
        fitting = self._fitting_tokens(head, now, awaited if workers == 1 else ())
        if kind == _AHEAD:
            return _within(batch, fitting)
        return _within(batch, max(fitting, _SHORT_TOKENS)) or [head]

    def _fitting_tokens(self, head: Ready[Owner], now: float, awaited: Sequence[float]) -> float:
        """Returns how many tokens fit in before `head`, or a stream that waits for tokens, runs out
        of audio.
        """
        due = [] if head.plays_until is None else [head.plays_until]
        # others have long run dry
        due += [at - RESERVE_SECONDS for at in awaited if at > now - AHEAD_SECONDS]
        seconds = max(min(due, default=math.inf) - now, _HARMLESS_SECONDS)
        return seconds / self._token_seconds if self._token_seconds else math.inf


def has_time(chunk: Ready[Owner], now: float) -> bool:
    """Says whether a chunk may wait for those that may not: its listener still has audio."""
    return _kind(chunk, now) >= _RELAXED


def _kind(chunk: Ready[Owner], now: float) -> int:
    if chunk.plays_until is None:
        return _UNHEARD
    in_hand = chunk.plays_until - now
    return (
        _URGENT if in_hand < RESERVE_SECONDS else _RELAXED if in_hand <= AHEAD_SECONDS else _AHEAD
    )


def _rank(chunk: Ready[Owner], now: float, *, by_waiting: bool) -> tuple[int, float]:
    if by_waiting and not has_time(chunk, now):
        return _URGENT, chunk.since
    return _kind(chunk, now), chunk.since if chunk.plays_until is None else chunk.plays_until


def _within(batch: Sequence[Ready[Owner]], tokens: float) -> list[Ready[Owner]]:
    """Returns the first chunks of a batch, as many as have no more than `tokens` together."""
    sums = itertools.accumulate(chunk.tokens for chunk in batch)
    return [chunk for chunk, total in zip(batch, sums, strict=True) if total <= tokens]
