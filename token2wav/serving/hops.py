"""Hops: the numbers of new tokens of a stream's chunks, and the decision where its next chunk ends.

Hops grow from chunk to chunk, as the schedule says. If the listener's audio would end before the
tokens of a hop arrive, the hop is cut to the blocks that are complete. If no block will be complete
in time, the next chunk may be provisional: it ends inside a block, and the block is computed again
when it is complete. The first chunk may be provisional too, so that the first audio comes early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from token2wav.config import StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.config.model_config import ModelConfig
from token2wav.errors import ConfigError
from token2wav.serving.provisional import Pace, next_end

# Margin for the delay of the connection to the client, and for the interval of 0.05 s at which the
# workers check waiting streams.
_MARGIN_SECONDS = 0.06


@dataclass(frozen=True)
class HopSchedule:
    """Schedule that all streams share.

    With `first=25` and `longest=100` the hops are 25, 50, 100, 100 ...

    Attributes:
        block: tokens of an attention block. Every chunk ends where a block of the stream ends,
            except the last chunk and provisional chunks.
        first_tokens: new tokens, without look-ahead, after which a stream may send audio of an
            incomplete block; 0 to wait for whole blocks.
        provisional_lookahead: look-ahead tokens that a provisional chunk needs; at least 1.
        adaptive: whether a hop may be shortened when the listener runs out of audio. False if the
            audio of the model depends on where chunks end.
        least_tokens: least new tokens of a provisional chunk after the first chunk, if no plan
            gives its end (`next_end`).
        growing: whether a chunk that waits for a worker takes tokens that arrive meanwhile, up to
            its hop.
    """

    first: int
    longest: int
    block: int
    first_tokens: int = 0
    provisional_lookahead: int = 1
    adaptive: bool = True
    least_tokens: int = 0
    growing: bool = False

    def __post_init__(self) -> None:
        if self.longest % self.block:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is not a multiple of the attention block "
                f"or window, {self.block} tokens"
            )
        if self.longest < self.first:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is below the first hop, {self.first} tokens"
            )

    @classmethod
    def of(
        cls, stream: StreamConfig, config: ModelConfig, withheld_samples: float = 0
    ) -> HopSchedule:
        """Raises ConfigError if the settings do not fit the model."""
        adaptive = not config.fixed_hops and not stream.reference
        provisional = adaptive and config.provisional_chunks and stream.first_tokens > 0
        held_tokens = withheld_samples / config.samples_per_token
        return cls(
            *config.hops(stream),
            config.block_tokens,
            _first_tokens(stream.first_tokens, held_tokens) if provisional else 0,
            max(1, min(stream.provisional_lookahead_tokens, config.lookahead_tokens)),
            adaptive,
            least_tokens=stream.first_tokens // 2 if provisional else 0,
            growing=adaptive and config.equal_chunks,
        )

    def hop(self, index: int) -> int:
        """Returns the hop of the chunk after `index` chunks, at least 1; provisional chunks do not
        count.
        """
        return min(self.longest, self.first << index)


def _first_tokens(first_tokens: int, held_tokens: float) -> int:
    # If the last stage held back the audio of more than half of the tokens, a chunk of
    # `first_tokens` would be computed for nothing, or it would be followed by a gap.
    return max(first_tokens, math.ceil(held_tokens + first_tokens / 2))


class ChunkTime(NamedTuple):
    """Time of a chunk, from the decision about it to its end, and its tokens."""

    seconds: float = 0.0
    tokens: int = 1


class Estimates(NamedTuple):
    """Estimates of times of a stream, made at one moment."""

    token_seconds: float  # mean time from one token to the next; 0 if the pace is not known yet
    seconds_until_next: float
    whole: ChunkTime
    provisional: ChunkTime  # which has fewer ODE steps
    delay_seconds: float  # mean time of the chunks of all streams; no estimate falls below it

    def seconds_to_compute(self, tokens: int, *, provisional: bool = False) -> float:
        """Returns the time from the decision about a chunk to its end. A chunk of more tokens than
        the known one takes longer in proportion.
        """
        seconds, known_tokens = self.provisional if provisional else self.whole
        return max(self.delay_seconds, seconds * max(1.0, tokens / known_tokens))


class StreamFacts(NamedTuple):
    """Facts of a stream. Positions are tokens from the first prompt token.

    Attributes:
        lookahead: look-ahead tokens that a whole chunk needs.
        optional_lookahead: further look-ahead tokens that a chunk takes if they have arrived.
        audio_seconds: seconds of audio of a token.
        spoken: as in `Chunker`.
        hops: computed chunks that were not provisional.
        lead: seconds of audio that the listener has left.
    """

    schedule: HopSchedule
    grid: BlockGrid
    lookahead: int
    optional_lookahead: int
    audio_seconds: float
    start: int
    spoken: int
    received: int
    ended: bool
    hops: int
    heard: bool
    lead: float
    estimates: Estimates

    @property
    def hop_stop(self) -> int:
        if self.hops:
            return self.start + self.schedule.hop(self.hops)
        return self.grid.first_boundary + self.schedule.first

    @property
    def complete_stop(self) -> int:
        """End of the last block whose tokens and look-ahead have arrived."""
        return self.grid.complete_stop(self.received - self.lookahead)

    @property
    def latest_provisional_stop(self) -> int:
        """Latest position at which a provisional chunk can end now. At least one token remains for
        the last chunk.
        """
        return self.received - self.schedule.provisional_lookahead

    def seconds_until(self, stop: int) -> float:
        """Estimates the time until a whole chunk up to position `stop` can run."""
        return (stop + self.lookahead - self.received) * self.estimates.token_seconds


class Stop(NamedTuple):
    """End of the next chunk."""

    position: int
    needs_admission: bool = False  # whether `PipelineLoad` must first admit the stream


def next_stop(facts: StreamFacts) -> Stop | float:
    """Returns the end of the next chunk. If there is no chunk now, returns for how many seconds
    there will be none, by the present estimates, unless a token arrives.
    """
    if facts.received - facts.lookahead >= facts.hop_stop or facts.ended:
        return Stop(_whole_hop(facts))
    if not facts.heard:
        return _first_audio(facts)
    if not facts.schedule.adaptive:
        return math.inf
    if facts.complete_stop > facts.spoken:
        spare = _spare_seconds(facts)
        return Stop(facts.complete_stop) if spare < 0 else spare
    # A stream whose listener has run out of audio waits for a whole block. Its tokens arrive too
    # slowly for playback, so every provisional chunk would be followed by another gap.
    if not facts.schedule.first_tokens or facts.lead <= 0:
        return math.inf
    return _provisional(facts)


def _whole_hop(facts: StreamFacts) -> int:
    if facts.received - facts.lookahead < facts.hop_stop:
        return facts.received
    # The rest of the stream joins this chunk if it is too short to be its optional look-ahead.
    few = facts.ended and facts.received - facts.hop_stop < facts.optional_lookahead
    return facts.received if few else facts.hop_stop


def _first_audio(facts: StreamFacts) -> Stop | float:
    schedule, blocks = facts.schedule, facts.complete_stop
    first, latest = facts.spoken + schedule.first_tokens, facts.latest_provisional_stop
    if not schedule.first_tokens or max(blocks, latest) < first:
        return math.inf
    if blocks >= first:
        return Stop(blocks, needs_admission=True)
    # The chunk enters another block only if it would be too short without it.
    return Stop(min(latest, max(first, blocks + schedule.block - 1)), needs_admission=True)


def _spare_seconds(facts: StreamFacts) -> float:
    """Estimates the audio that the listener will have left when a whole hop is computed."""
    hop_stop = facts.hop_stop
    compute = facts.estimates.seconds_to_compute(hop_stop - facts.start) + _MARGIN_SECONDS
    return facts.lead - compute - facts.seconds_until(hop_stop)


def _provisional(facts: StreamFacts) -> Stop | float:
    schedule, estimates, blocks = facts.schedule, facts.estimates, facts.complete_stop
    block_end = facts.grid.complete_stop(facts.spoken) + schedule.block
    stop = min(facts.latest_provisional_stop, block_end - 1)
    planned = _planned(facts, block_end)
    if facts.start < blocks and planned > facts.spoken:
        # Provisional chunks have sent the audio of the block. The next ones would compute it again,
        # because its state is not stored yet.
        return Stop(blocks)
    if facts.spoken < planned <= stop:
        return Stop(planned, needs_admission=True)
    spare = facts.lead - estimates.seconds_to_compute(1, provisional=True) - _MARGIN_SECONDS
    soon = min(facts.seconds_until(block_end), estimates.seconds_until_next)
    if spare >= soon or stop - facts.spoken < schedule.least_tokens:
        return 0.0  # decide again at the next check, because these estimates change all the time
    return Stop(stop, needs_admission=True)


def _planned(facts: StreamFacts, block_end: int) -> int:
    """Returns the end of the cheapest next provisional chunk; at most `facts.spoken` for none."""
    estimates = facts.estimates
    if not estimates.token_seconds:
        return facts.spoken
    compute = estimates.seconds_to_compute(1, provisional=True) + _MARGIN_SECONDS
    pace = Pace(estimates.token_seconds, facts.audio_seconds, compute)
    whole = facts.seconds_until(block_end) + _MARGIN_SECONDS
    whole += estimates.seconds_to_compute(block_end - facts.start)
    return next_end(pace, facts.spoken, facts.latest_provisional_stop, facts.lead, whole)
