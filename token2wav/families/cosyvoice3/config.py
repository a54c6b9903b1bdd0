"""Configuration of a flow, typed and frozen: it gives sizes, attention, and the tokens that a chunk waits for."""

from __future__ import annotations

from dataclasses import dataclass

from token2wav.config import StreamConfig
from token2wav.config.values import all_positive
from token2wav.errors import ConfigError
from token2wav.networks.configs import CodebookConfig, EstimatorConfig, GuidedAttention

_LONGEST_HOP_BLOCKS = 4  # of 25 tokens: 4 s
_TOKEN_CONVOLUTIONS = ("pre_lookahead_len", "pre_lookahead_channels", "lookbehind_len")


@dataclass(frozen=True)
class FlowConfig:
    """Configuration of the flow, which turns tokens into mel."""

    vocab_size: int
    input_size: int
    spk_embed_dim: int
    token_mel_ratio: int
    pre_lookahead_len: int
    pre_lookahead_channels: int
    inference_cfg_rate: float
    estimator: EstimatorConfig
    n_timesteps: int = 10  # this and the next are fixed in the public code, not in its YAML
    lookbehind_len: int = 2
    chunk_blocks: int | None = None  # of a first chunk; None: 1
    codebooks: CodebookConfig | None = None

    def __post_init__(self) -> None:
        zero_too = ("inference_cfg_rate", *(_TOKEN_CONVOLUTIONS if self.guided else ()))
        all_positive(self, "flow", zero_too)
        if self.codebooks and self.codebooks.merge == "concat" and self.input_size % self.codebooks.count:
            raise ConfigError(
                f"flow.input_size: {self.input_size} is not a multiple of {self.codebooks.count}, the codebooks whose "
                "embeddings are concatenated"
            )
        if self.input_size != self.estimator.mu_dim:
            raise ConfigError(
                f"flow.input_size: {self.input_size} is not the estimator's mu_dim {self.estimator.mu_dim}"
            )
        if self.estimator.static_chunk_size % self.token_mel_ratio:
            raise ConfigError(
                f"flow.decoder.estimator.static_chunk_size: {self.estimator.static_chunk_size} frames are not a "
                f"whole number of tokens of {self.token_mel_ratio} frames"
            )

    @property
    def guided(self) -> GuidedAttention | None:
        return self.estimator.guided

    @property
    def lookahead_tokens(self) -> int:
        """Tokens after a chunk that it depends on and that must be there before it can run."""
        if self.guided is None:
            return self.pre_lookahead_len
        return self.guided.future_blocks * self.block_tokens

    @property
    def lookbehind_tokens(self) -> int:
        """Tokens before a chunk that it is given along."""
        if self.guided is None:
            return self.lookbehind_len
        return self.guided.past_blocks * self.block_tokens

    @property
    def mel_bands(self) -> int:
        return self.estimator.mel_dim

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of one token: () for a number, (codebooks,) for several codes."""
        return (self.codebooks.count,) if self.codebooks else ()

    @property
    def block_tokens(self) -> int:
        """Tokens in one attention block: every chunk must end on a multiple of it."""
        return self.estimator.static_chunk_size // self.token_mel_ratio

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the tokens of the first and of the longest hop, which settings may bound."""
        first = (self.chunk_blocks or 1) * self.block_tokens
        growth = 1 if self.guided else _LONGEST_HOP_BLOCKS
        return first, stream.max_hop_tokens or max(first, growth * self.block_tokens)

    def check(self, stream: StreamConfig) -> None:
        """Raises ConfigError if settings of streams do not go with guided attention, where the model has it."""
        if self.guided is None:
            return
        default = StreamConfig()
        for key in ("left_blocks", "reference"):
            if (value := getattr(stream, key)) != getattr(default, key):
                raise ConfigError(
                    f"stream.{key}: {value} does not go with guided attention, whose layers say who sees whom"
                )
        first, longest = self.hops(stream)
        if stream.hop == "lead" and longest > first:
            raise ConfigError(
                "stream.hop: lead would make the audio depend on time, because the windows of chunks do; take fixed or "
                "growing"
            )

    def prefix_tokens(self, prompt_tokens: int) -> int:
        """Counts the tokens of blocks wholly in a prompt, look-ahead included: they depend on the voice alone."""
        return max(0, prompt_tokens - self.lookahead_tokens) // self.block_tokens * self.block_tokens
