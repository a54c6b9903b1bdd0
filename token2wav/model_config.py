"""Configuration of a model as everything outside of its family knows it: tokens, rates, and what
chunks need.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from token2wav.config import StreamConfig
from token2wav.errors import CheckpointError, ConfigError

StageName = Literal["flow", "vocoder", "decoder"]  # tokens to mel, mel to audio, tokens to audio
FLOW_AND_VOCODER: tuple[StageName, ...] = ("flow", "vocoder")
# of files of weights, before their suffix
_STEMS = {"flow": "flow", "vocoder": "hift", "decoder": "decoder"}
_SUFFIXES = (".safetensors", ".pt")  # in order of preference


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of one model. Families derive theirs from it, with what their networks need."""

    vocab_size: int  # different tokens, or codes in each codebook
    token_frame_rate: float  # tokens per second
    block_tokens: int  # of one attention block: every chunk but the last ends on a multiple of it
    token_mel_ratio: int  # mel frames per token
    mel_bands: int  # between flow and vocoder
    speaker_size: int  # length of a speaker embedding
    sample_rate: int  # samples per second
    stages: tuple[StageName, ...] = FLOW_AND_VOCODER  # in the order in which a chunk passes them
    samples_per_token: int  # that an utterance has
    # of one token: () for a number, (codebooks,) for several codes
    token_shape: tuple[int, ...] = ()
    # after a chunk, that it depends on and that must be there before it can run
    lookahead_tokens: int = 0
    lookbehind_tokens: int = 0  # before a chunk, that it is given along
    # of the first and of the longest hop, where settings do not bound it
    hop_blocks: tuple[int, int] = (1, 4)
    ode_steps: int = 0  # the usual number; 0 for a model without an ODE
    fixed_steps: bool = False  # it takes no other number
    takes_prompt: bool = True  # voices may have a prompt
    # the flow computes provisional chunks, which end within a block and are not kept
    speaks_early: bool = False
    # results depend on where chunks end, so that this must not depend on time
    fixed_hops: bool = False
    # attention takes a prompt of any length as one block, and blocks begin at its end
    full_prompt_attention: bool = False
    # of the past that stay visible beside the prompt's, where settings do not say it
    left_blocks: int = -1

    @property
    def block_seconds(self) -> float:
        """Duration of the audio of one attention block."""
        return self.block_tokens / self.token_frame_rate

    def prefix_tokens(self, prompt_tokens: int) -> int:
        """Counts the tokens of blocks wholly in a prompt, look-ahead included: they depend on the
        voice alone.
        """
        if self.full_prompt_attention:
            return prompt_tokens
        return (
            max(0, prompt_tokens - self.lookahead_tokens) // self.block_tokens * self.block_tokens
        )

    def prompt_padding_tokens(self, prompt_tokens: int) -> int:
        """Counts the tokens that are missing before a prompt, where blocks are counted from its
        end.
        """
        return -prompt_tokens % self.block_tokens if self.full_prompt_attention else 0

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the tokens of the first and of the longest hop, which settings may bound."""
        first, longest = (blocks * self.block_tokens for blocks in self.hop_blocks)
        return first, stream.max_hop_tokens or longest

    def window(self, stream: StreamConfig) -> int:
        """Returns the blocks of the past that stay visible beside the prompt's: those of settings,
        or else its own.
        """
        return self.left_blocks if stream.left_blocks is None else stream.left_blocks

    def check(self, stream: StreamConfig) -> None:
        """Raises ConfigError if settings of streams do not go with the model."""
        self.allowed_steps(stream.steps)

    def with_stream_settings(self, stream: StreamConfig) -> ModelConfig:
        """Returns the configuration of streams with some settings, on which what their chunks need
        may depend.
        """
        return self

    def allowed_steps(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the numbers of ODE steps that streams may have, the usual one first; `wanted` is
        the setting.

        Raises:
            ConfigError: the model takes its own number alone.
        """
        own = self.ode_steps
        if self.fixed_steps and wanted not in ((), (own,)):
            raise ConfigError(
                f"stream.steps: {', '.join(map(str, wanted))}, but the model has a list of times, "
                f"for {own} steps only"
            )
        return wanted or (own,)

    def stage_config(self, stage: StageName) -> Any:
        """Returns the part of the configuration that a stage's network depends on.

        It is hashed with the weights.
        """
        return self

    def weights_file(self, folder: Path, stage: StageName) -> Path:
        """Finds the weights of a stage in a folder of this model.

        Raises:
            CheckpointError: there are none.
        """
        stem = _STEMS[stage]
        for suffix in _SUFFIXES:
            if (path := folder / (stem + suffix)).is_file():
                return path
        raise CheckpointError(f"{folder}: neither {stem}.safetensors nor {stem}.pt is there")
