"""Schedule of hops: it decides how many tokens go into the next chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from token2wav.config import StreamConfig
from token2wav.errors import ConfigError
from token2wav.model_config import ModelConfig


@dataclass(frozen=True)
class HopSchedule:
    """Schedule of hops, which decides the length of chunks. It has no state: one schedule serves all streams.

    Attributes:
        policy: growth of hops, as `StreamConfig.hop`.
        first: tokens of the first hop.
        longest: most tokens of a hop.
        block: tokens of an attention block; every chunk but the last ends on a multiple of it.
        joined_prompt: whether multiples are counted from the prompt's end.
    """

    policy: Literal["growing", "fixed", "lead"]
    first: int
    longest: int
    block: int
    joined_prompt: bool = False

    def __post_init__(self) -> None:
        if self.longest % self.block:
            raise ConfigError(
                f"stream.max_hop_tokens: {self.longest} is not a multiple of the attention block, {self.block} tokens"
            )
        if self.longest < self.first:
            raise ConfigError(f"stream.max_hop_tokens: {self.longest} is below the first hop, {self.first} tokens")

    @classmethod
    def of(cls, stream: StreamConfig, config: ModelConfig) -> HopSchedule:
        return cls(stream.hop, *config.hops(stream), config.block_tokens, config.joined_prompt)

    def first_stop(self, prompt_tokens: int) -> int:
        """Returns the end of the first chunk, from the first prompt token on: a hop past the prompt's last block."""
        if self.joined_prompt:
            return prompt_tokens + self.first
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
