"""Schedule of hops: the numbers of new tokens of a stream's chunks if its tokens arrive in time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from token2wav.config import StreamConfig
from token2wav.config.model_config import ModelConfig
from token2wav.errors import ConfigError


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
                f"stream.max_hop_tokens: {self.longest} is not a multiple of the attention block, "
                f"{self.block} tokens"
            )
        if self.longest < self.first:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is below the first hop, {self.first} tokens"
            )

    @classmethod
    def of(
        cls, stream: StreamConfig, config: ModelConfig, withheld_samples: int = 0
    ) -> HopSchedule:
        """Raises ConfigError if the settings do not fit the model."""
        adaptive = not config.fixed_hops and not stream.reference
        provisional = adaptive and config.provisional_chunks and stream.first_tokens > 0
        return cls(
            *config.hops(stream),
            config.block_tokens,
            _first_tokens(stream.first_tokens, withheld_samples / config.samples_per_token)
            if provisional
            else 0,
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
