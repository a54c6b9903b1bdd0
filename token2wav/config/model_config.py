"""Configuration of a model: token format, rates and bounds of chunks, which all families have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from token2wav.config import StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.config.token_format import TokenFormat
from token2wav.errors import ConfigError, InputError

StageName = Literal["flow", "vocoder", "decoder"]  # tokens to mel, mel to audio, tokens to audio
# Names of the weights files of the stages, without suffix.
_STEMS = {"flow": "flow", "vocoder": "hift", "decoder": "decoder"}
ENDINGS = (".safetensors", ".pt")  # in order of preference
# Share of the ODE steps of a stream that its provisional chunks have, and the least number of them
# (docs/tuning.md).
_PROVISIONAL_SHARE, _LEAST_PROVISIONAL_STEPS = Fraction(3, 10), 3


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of one model.

    A family derives its own class, which adds the sizes of its networks: from `FlowModelConfig` or
    `CodecConfig`. Facts that only some models have are properties with the value of all other
    models. A class whose models differ overrides them, with a property, or with a field that has a
    default.

    Attributes:
        samples_per_token: audio samples per token, of each channel.
        stages: names of the stages, in the order in which they compute a chunk.
        block_tokens: tokens of an attention block. Every chunk ends where a block of the stream
            ends, except the last chunk and provisional chunks.
        lookahead_tokens: tokens after a chunk that the chunk depends on. They must have arrived
            before the chunk can run.
        hop_blocks: attention blocks in the first hop and in the longest hop. A hop is the number of
            new tokens of a chunk. `StreamConfig.max_hop_tokens` overrides the longest hop.
    """

    tokens: TokenFormat
    sample_rate: int
    samples_per_token: int
    stages: tuple[StageName, ...]
    block_tokens: int = 1
    lookahead_tokens: int = 0
    hop_blocks: tuple[int, int] = (1, 4)

    @property
    def token_frame_rate(self) -> float:
        """Tokens per second."""
        return self.sample_rate / self.samples_per_token

    @property
    def channels(self) -> int:
        """Channels of the audio, 1 or 2. The last stage makes the samples of two channels in turn,
        and `AudioOutput` separates them.
        """
        return 1

    @property
    def missing_samples(self) -> int:
        """Samples at the start of an utterance that the decoder does not make. N tokens give
        samples_per_token * N - missing_samples samples.
        """
        return 0

    @property
    def adds_noise(self) -> bool:
        """Whether the decoder adds noise to its signal, which a request can turn off."""
        return False

    @property
    def optional_lookahead_tokens(self) -> int:
        """Tokens after a chunk that the last stage uses for early audio, as far as they have
        arrived.
        """
        return 0

    @property
    def token_mel_ratio(self) -> int:
        """Mel frames per token; 1 for a codec."""
        return 1

    @property
    def mel_bands(self) -> int:
        """Bands of the mel between flow and vocoder; 0 for a codec."""
        return 0

    @property
    def speaker_size(self) -> int:
        """Length of a speaker embedding; 0 for a model without voices."""
        return 0

    @property
    def takes_voice(self) -> bool:
        return self.speaker_size > 0

    @property
    def takes_prompt(self) -> bool:
        """Whether voices may have a prompt."""
        return False

    def prompt_frames(self, tokens: int) -> range:
        """Returns the numbers of mel frames that a prompt of so many tokens may have."""
        frames = self.token_mel_ratio * tokens
        return range(frames, frames + 1)

    @property
    def ode_steps(self) -> int:
        """Default number of ODE steps; 0 for a model without an ODE."""
        return 0

    @property
    def fixed_steps(self) -> bool:
        """Whether the model allows no other number of ODE steps."""
        return False

    @property
    def provisional_chunks(self) -> bool:
        """Whether the flow can compute provisional chunks. A provisional chunk ends inside a block,
        and its state is not stored.
        """
        return False

    @property
    def fixed_hops(self) -> bool:
        """Whether the audio depends on where chunks end. If so, the ends of chunks do not depend on
        the arrival times of tokens.
        """
        return False

    @property
    def left_blocks(self) -> int:
        """Past blocks that stay visible besides the prompt; -1 for all. `StreamConfig.left_blocks`
        overrides this number.
        """
        return -1

    @property
    def most_tokens(self) -> int | None:
        """Most tokens of an utterance; None for any number. Only a codec whose past has no window
        has such a limit.
        """
        return None

    @property
    def block_seconds(self) -> float:
        return self.block_tokens / self.token_frame_rate

    @property
    def equal_chunks(self) -> bool:
        """Whether a batch should hold only chunks of equal length. A decoder of codecs computes the
        chunks of each length one after another, so a batch of several lengths takes several times
        as long.
        """
        return self.stages == ("decoder",)

    def grid(self, prompt_tokens: int, left_blocks: int = -1) -> BlockGrid:
        """Returns the block grid of a stream, in tokens. Its prefix consists of the blocks that end
        at least `lookahead_tokens` before the end of the prompt.
        """
        block = self.block_tokens
        prefix = max(0, prompt_tokens - self.lookahead_tokens) // block * block
        return BlockGrid(block, prompt_tokens, prefix, left_blocks=left_blocks)

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the tokens of the first hop and of the longest hop, under settings of streams."""
        first, longest = (blocks * self.block_tokens for blocks in self.hop_blocks)
        return first, stream.max_hop_tokens or longest

    def window(self, stream: StreamConfig) -> int:
        """Returns the number of past blocks that stay visible besides the prompt; negative for
        all.
        """
        return self.left_blocks if stream.left_blocks is None else stream.left_blocks

    def withheld_frames(self, stream: StreamConfig) -> int:
        """Returns the frames that the last stage holds back; 0 for its whole look-ahead."""
        return stream.lookahead_frames or 0

    def decoder_noise(self, choice: bool | None, stream: StreamConfig) -> bool:
        """Returns whether the decoder adds its noise to a stream. `choice` is the value of the
        request; None for the default in the settings.
        """
        if choice is not None and not self.adds_noise:
            raise InputError("decoder_noise", "given, but the decoder of this model adds no noise")
        return stream.decoder_noise if choice is None else choice

    def check_speed(self, speed: float) -> None:
        """Raises InputError for another speed than 1 if the model is a codec, which has no mel."""
        if speed != 1 and not self.mel_bands:
            raise InputError(
                "speed",
                f"{speed:g}, but this model has no mel that could be stretched; expected 1",
            )

    def check(self, stream: StreamConfig) -> None:
        """Raises ConfigError if settings of streams do not fit the model."""
        self.allowed_steps(stream.steps)

    def with_stream_settings(self, stream: StreamConfig) -> ModelConfig:
        """Returns the configuration as the settings of streams change it.

        In some families the settings change the attention block, or the tokens that a chunk gets
        after its end. This base class changes nothing, and raises ConfigError for such settings.
        """
        if stream.block_tokens:
            raise ConfigError(
                f"stream.block_tokens: {stream.block_tokens}, but the block of this model is fixed "
                f"at {self.block_tokens} tokens; expected 0"
            )
        if stream.overlap_tokens is not None:
            raise ConfigError(
                f"stream.overlap_tokens: {stream.overlap_tokens}, but this model has no windows "
                "that could overlap; remove the setting"
            )
        return self

    def allowed_steps(self, setting: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the numbers of ODE steps that streams may have, the default first. `setting` is
        `StreamConfig.steps`.
        """
        default = self.ode_steps
        if self.fixed_steps and setting not in ((), (default,)):
            raise ConfigError(
                f"stream.steps: {', '.join(map(str, setting))}, but the model has a fixed "
                f"list of times for {default} steps only"
            )
        return setting or (default,)

    def provisional_steps(self, stream: StreamConfig, steps: int) -> int:
        """Returns the number of ODE steps of the provisional chunks of a stream. It is `steps`, the
        number of the other chunks, if there are no such chunks.
        """
        if not (stream.first_tokens and self.provisional_chunks):
            return steps
        if stream.provisional_steps:
            return min(stream.provisional_steps, steps)
        if self.fixed_steps:
            return steps
        return min(steps, max(_LEAST_PROVISIONAL_STEPS, math.ceil(_PROVISIONAL_SHARE * steps)))

    def stage_config(self, stage: StageName) -> Any:
        """Returns the part of the configuration that the network of a stage depends on. This part
        is hashed with the weights, to identify exported artefacts.
        """
        return self

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        """Returns the names that the file of the weights of a stage may have in a model folder, in
        order of preference.
        """
        return tuple(_STEMS[stage] + ending for ending in ENDINGS)
