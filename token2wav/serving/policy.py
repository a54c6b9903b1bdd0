"""Policy of the scheduler: selects the utterances whose next chunks run as one batch.

A chunk has one of four kinds. The kinds are served in this order:

1. Urgent: the listener has less than `RESERVE_SECONDS` of audio left.
2. Unheard: no audio of the stream was sent yet.
3. Relaxed: the listener has at most `AHEAD_SECONDS` of audio left.
4. Ahead: the listener has more audio left.

Unheard chunks are ordered by their waiting time. Chunks of each other kind are ordered by the time
at which their listeners run out of audio.

A batch of urgent or unheard chunks holds no relaxed and no ahead chunks, because they would make
the batch slower. Every second batch ranks urgent and unheard chunks together, and begins with the
streams that have sent the least audio. Under overload all long streams are urgent. So a short text
waits for one batch of long texts, not for the chunks of all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from token2wav.config.model_config import ModelConfig
from token2wav.serving.utterance import Utterance

RESERVE_SECONDS = 0.25
AHEAD_SECONDS = 5.0
_HARMLESS_SECONDS = 0.05  # a batch that takes no longer delays no other stream noticeably
# Tokens of the longest chunk by default. A batch of relaxed chunks may always hold as many, even if
# it may finish too late. A smaller bound would gain little, because the longest chunk alone has so
# many tokens.
_LONGEST_CHUNK_TOKENS = 100
_HANG_SECONDS = 180.0  # a batch of eight of the longest chunks takes 130 s on a slow CPU
_HANG_TOKENS = 8 * _LONGEST_CHUNK_TOKENS  # in that batch
# Most chunks that interrupt a batch at once. First chunks have two blocks by default, so they fit
# the batches that are captured as one CUDA graph.
_INTERRUPTING_CHUNKS = 8
_FAIR_TURN = 2
_NEWEST = 0.2  # weight of the latest batch in the mean compute time per token
_URGENT, _UNHEARD, _RELAXED, _AHEAD = range(4)


class ReadyChunk(NamedTuple):
    """Next chunk of an utterance, as the policy reads it. Times are on the clock of the scheduler.

    Attributes:
        ready_since: time at which the chunk became ready: its tokens have arrived, and no earlier
            chunk of the utterance is running.
        plays_until: time at which the listener runs out of audio; None if no audio was sent yet.
        seconds_sent: seconds of audio that were sent so far.
        ode_steps: ODE steps. All chunks of a batch have the same number.
        provisional: whether the chunk is provisional, so that it may have fewer ODE steps.
        divisible: whether the chunk may be shortened: it lies between the first and the last chunk.
    """

    utterance: Utterance
    ready_since: float
    plays_until: float | None
    seconds_sent: float
    tokens: int
    ode_steps: int
    provisional: bool
    divisible: bool

    @classmethod
    def of(cls, utterance: Utterance) -> ReadyChunk:
        chunker, playback = utterance.chunker, utterance.playback
        return cls(
            utterance,
            utterance.ready_since,
            playback.plays_until,
            playback.seconds_sent,
            chunker.next_tokens,
            utterance.stream_options.steps,
            chunker.next_provisional,
            chunker.next_divisible,
        )


def has_interruptions(config: ModelConfig, workers: int) -> bool:
    """Returns whether first chunks may interrupt a batch: the model has a flow, and one worker
    computes.

    A batch holds its tensors while it is interrupted. A second worker could wait for them with a
    prompt that the interruption needs, and both would wait for ever.
    """
    return workers == 1 and "flow" in config.stages


def chunks_at_once(config: ModelConfig, batch_streams: int, workers: int = 1) -> int:
    """Returns the most chunks that are computed at the same time, those of interruptions included.
    `batch_streams` is the most chunks in a batch.
    """
    interrupting = min(batch_streams, _INTERRUPTING_CHUNKS)
    return workers * batch_streams + interrupting * has_interruptions(config, workers)


def hang_seconds(tokens: int) -> float:
    """Returns the time after which a turn counts as hung. Above `_HANG_TOKENS` the time grows in
    proportion to the tokens.
    """
    return _HANG_SECONDS * max(1.0, tokens / _HANG_TOKENS)


class Policy:
    """Policy that forms batches.

    Args:
        most: most chunks in a batch.
        equal_block: tokens of a block, for a model whose batches hold only chunks of equal length;
            0 for other models.
    """

    def __init__(self, most: int, equal_block: int = 0) -> None:
        self._most = most
        self._equal_block = equal_block
        self._turn = 0
        self._token_seconds = 0.0
        self._interruption_seconds = 0.0

    def record_batch(self, tokens: int, seconds: float) -> None:
        """Updates the mean compute time per token. 0 tokens change nothing: they stand for a batch
        of provisional chunks (`Turn.tokens`), or the batch only ended streams.
        """
        if not tokens:
            return
        self._token_seconds = _mean(self._token_seconds, seconds / tokens)

    def record_interruption(self, seconds: float) -> None:
        """Updates the mean time of an interruption that computes chunks. Such short batches take
        more time per token than others, so they are no part of the mean of `record_batch`.
        """
        self._interruption_seconds = _mean(self._interruption_seconds, seconds)

    def next_batch(
        self,
        ready: Sequence[ReadyChunk],
        now: float,
        idle_workers: int = 1,
        waiting: Iterable[float] = (),
    ) -> list[ReadyChunk]:
        """Forms the next batch, which may be empty. Idle workers share the ready chunks equally.

        Only first chunks can interrupt a running batch. So a batch of relaxed or ahead chunks is
        kept small enough to finish before the listener of its first chunk runs out of audio. On the
        last idle worker the batch must also finish `RESERVE_SECONDS` before the listener of any
        waiting utterance runs out of audio. An ahead chunk that does not fit waits. A relaxed chunk
        never waits for this reason.

        Args:
            idle_workers: idle workers, the calling one included.
            waiting: for each utterance that waits for tokens or for its opening, the time at which
                its listener runs out of audio; before the first audio, the time of its admission.
        """
        if not ready:
            return []
        self._turn += 1
        fair = not self._turn % _FAIR_TURN
        ranked = sorted(ready, key=lambda chunk: _rank(chunk, now, fair=fair))
        head = ranked[0]
        kind = _kind(head.plays_until, now)
        candidates = [
            chunk
            for chunk in _together(ranked)
            if _kind(chunk.plays_until, now) <= max(kind, _UNHEARD)
        ]
        room = min(self._most, math.ceil(len(ready) / idle_workers))
        if self._equal_block:
            candidates = _alike(candidates, self._equal_block, room)
        batch = candidates[:room]
        if not has_time(head.plays_until, now):
            return batch
        fitting = self._fitting_tokens(head, now, waiting if idle_workers == 1 else ())
        if kind == _AHEAD:
            return _within(batch, fitting)
        return _within(batch, max(fitting, _LONGEST_CHUNK_TOKENS)) or [head]

    def common_tokens(self, batch: Sequence[ReadyChunk]) -> int:
        """Returns the tokens to which the chunks of a batch are shortened; 0 if they stay as they
        are.
        """
        if not (self._equal_block and batch and batch[0].divisible):
            return 0
        return _common_length(min(chunk.tokens for chunk in batch), self._equal_block)

    def is_long(self, tokens: int) -> bool:
        """Returns whether a batch takes so long that other streams should not wait for its end."""
        return tokens * self._token_seconds > _HARMLESS_SECONDS

    def may_interrupt(
        self, tokens: int, ran: float, spent: float, ends: Iterable[float | None], now: float
    ) -> bool:
        """Returns whether a long batch may be interrupted: its interruptions have time left, and
        each of its listeners still gets the audio before the earlier audio ends.

        Args:
            tokens: tokens of the batch.
            ran: seconds for which the batch has run, without interruptions.
            spent: seconds of earlier interruptions.
            ends: times at which the listeners of the batch, and those that wait for the next batch,
                run out of audio; None for a stream of the batch before the first audio.
        """
        spare = _HARMLESS_SECONDS - spent
        done = now + max(0.0, tokens * self._token_seconds - ran) + spare
        return spare > 0 and all(end is not None and end > done for end in ends)

    def fits_interruption(self, tokens: int, batches: int, spent: float) -> bool:
        """Returns whether interruptions have time left for `tokens` tokens in `batches` batches."""
        least = batches * self._least_interruption
        return max(least, tokens * self._token_seconds) <= _HARMLESS_SECONDS - spent

    def interrupting(self, first: Sequence[ReadyChunk], spent: float) -> list[ReadyChunk]:
        """Forms a batch of first chunks that interrupts another batch; it may be empty."""
        fitting = [chunk for chunk in first if self.fits_interruption(chunk.tokens, 1, spent)]
        together = _together(sorted(fitting, key=lambda chunk: chunk.ready_since))
        most = min(self._most, _INTERRUPTING_CHUNKS)
        return _within(together[:most], self._tokens_in(_HARMLESS_SECONDS - spent))

    @property
    def _least_interruption(self) -> float:
        """Seconds that an interruption takes at least, however few tokens it has. Until one was
        measured, half of the time is assumed. A longer mean counts as half of the time too, else no
        further interruption would ever correct it.
        """
        half = _HARMLESS_SECONDS / 2
        return min(self._interruption_seconds or half, half)

    def _fitting_tokens(self, head: ReadyChunk, now: float, waiting: Iterable[float]) -> float:
        """Estimates how many tokens a worker can compute before a listener needs audio."""
        due = [] if head.plays_until is None else [head.plays_until]
        # A listener that has long been without audio does not count.
        due += [ends - RESERVE_SECONDS for ends in waiting if ends > now - AHEAD_SECONDS]
        return self._tokens_in(max(min(due, default=math.inf) - now, _HARMLESS_SECONDS))

    def _tokens_in(self, seconds: float) -> float:
        return seconds / self._token_seconds if self._token_seconds else math.inf


def _mean(mean: float, latest: float) -> float:
    return mean + (_NEWEST if mean else 1.0) * (latest - mean)


def has_time(plays_until: float | None, now: float) -> bool:
    """Returns whether the next chunk is relaxed or ahead: its listener has audio to spare."""
    return _kind(plays_until, now) >= _RELAXED


def _kind(plays_until: float | None, now: float) -> int:
    if plays_until is None:
        return _UNHEARD
    in_hand = plays_until - now
    return (
        _URGENT if in_hand < RESERVE_SECONDS else _RELAXED if in_hand <= AHEAD_SECONDS else _AHEAD
    )


def _rank(chunk: ReadyChunk, now: float, *, fair: bool) -> tuple[float, ...]:
    if fair and not has_time(chunk.plays_until, now):
        return _URGENT, chunk.seconds_sent, chunk.ready_since
    if chunk.plays_until is None:
        return _UNHEARD, chunk.ready_since
    return _kind(chunk.plays_until, now), chunk.plays_until


def _together(ranked: Sequence[ReadyChunk]) -> list[ReadyChunk]:
    """Selects the chunks that can run in one batch with the first one."""
    return [
        chunk
        for chunk in ranked
        if chunk.ode_steps == ranked[0].ode_steps
        and chunk.provisional == ranked[0].provisional
        and chunk.tokens <= ranked[0].tokens
    ]


def _alike(candidates: Sequence[ReadyChunk], block: int, room: int) -> list[ReadyChunk]:
    """Selects the chunks that run together with the first one if all of them have equal lengths.

    Divisible chunks get the length with which the batch has the most tokens.
    """
    head = candidates[0]
    alike = [chunk for chunk in candidates if chunk.divisible == head.divisible]
    if not head.divisible:
        return [chunk for chunk in alike if chunk.tokens == head.tokens]
    lengths = sorted((_common_length(chunk.tokens, block) for chunk in alike), reverse=True)
    totals = {length: length * min(at + 1, room) for at, length in enumerate(lengths)}
    chosen = max(reversed(totals), key=lambda length: totals[length])  # the shortest of the best
    return [chunk for chunk in alike if chunk.tokens >= chosen]


def _common_length(tokens: int, block: int) -> int:
    """Rounds down to a common length of chunks: 1, 2, 3, 4, 6, 8, 12 ... blocks.

    On a CPU each length has compiled operations of its own (`execution/device.py`), so there are
    few lengths.
    """
    blocks = tokens // block
    shift = max(0, blocks.bit_length() - 2)
    return (blocks >> shift << shift) * block


def _within(batch: Sequence[ReadyChunk], tokens: float) -> list[ReadyChunk]:
    """Cuts a batch after the last chunk with which it has at most `tokens` tokens in total."""
    sums = itertools.accumulate(chunk.tokens for chunk in batch)
    return [chunk for chunk, total in zip(batch, sums, strict=True) if total <= tokens]
