"""Schedule of hops: it decides how many tokens go into the next chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.families.cosyvoice3.config import FlowConfig


@dataclass(frozen=True)
class HopSchedule:
    """Schedule of hops, which decides the length of chunks. It has no state: one schedule serves all streams.

    Attributes:
        policy: growth of hops, as `StreamConfig.hop`.
        first: tokens of the first hop.
        longest: most tokens of a hop.
        block: tokens of an attention block; every chunk but the last ends on a multiple of it.
    """

    policy: Literal["growing", "fixed", "lead"]
    first: int
    longest: int
    block: int

    def __post_init__(self) -> None:
        for name, hop in (("hop_tokens", self.first), ("max_hop_tokens", self.longest)):
            if hop % self.block:
                raise ConfigError(f"stream.{name}: {hop} is not a multiple of the attention block, {self.block} tokens")
        if self.longest < self.first:
            raise ConfigError(f"stream.max_hop_tokens: {self.longest} is below hop_tokens {self.first}")

    @classmethod
    def of(cls, stream: StreamConfig, flow: FlowConfig) -> HopSchedule:
        return cls(stream.hop, *flow.hops(stream), flow.block_tokens)

    def first_stop(self, prompt_tokens: int) -> int:
        """Returns the end of the first chunk, from the first prompt token on: a hop past the prompt's last block."""
        return -(-prompt_tokens // self.block) * self.block + self.first

    def hop(self, index: int, lead_tokens: float) -> int:
        """Returns the tokens of a chunk after the first.

        Args:
            index: number of the chunk, >= 1.
            lead_tokens: tokens by which the audio sent so far is ahead of playback.
        """
        if self.policy == "growing":
            return min(self.longest, self.first << index)
        if self.policy == "fixed":
            return self.first
        whole_blocks = int(lead_tokens) // self.block * self.block
        return max(self.first, min(self.longest, whole_blocks))
