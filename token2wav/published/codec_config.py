"""Configuration of codecs, whose decoder computes audio from codes or latents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from token2wav.config import StreamConfig
from token2wav.config.model_config import ModelConfig, StageName
from token2wav.config.values import prefixed
from token2wav.errors import ConfigError
from token2wav.published.checkpoint_files import PUBLISHED
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import Format
from token2wav.published.registry import unfilled_network
from token2wav.published.transformers_json import CONFIG_JSON, read_json

# A decoder that reads at most this far ahead holds back its whole reach by default. This is exact.
_LONGEST_WAIT_SECONDS = 0.12

ConfigT = TypeVar("ConfigT", bound="CodecConfig")


@dataclass(frozen=True, kw_only=True)
class CodecConfig(ModelConfig):
    """Configuration of a codec. It has one stage, no voices and no prompts.

    A family derives its own class if its models differ in other facts than their sizes.

    Attributes:
        sizes: sizes of the decoder, which identify an exported artefact together with the weights.
        weights: names that the file of the weights may have, in order of preference.
    """

    sizes: Any
    weights: tuple[str, ...] = PUBLISHED
    stages: tuple[StageName, ...] = ("decoder",)
    hop_blocks: tuple[int, int] = (1, 16)

    @classmethod
    def of(cls: type[ConfigT], sizes: CodecSizes, **fields: Any) -> ConfigT:
        """Makes the configuration of a codec.

        Args:
            fields: further fields of the class.
        """
        _ = sizes.frames_per_second  # checks its range
        return cls(
            tokens=sizes.tokens,
            sample_rate=sizes.audio_rate,
            samples_per_token=sizes.frame_samples,
            sizes=sizes,
            **fields,
        )

    @classmethod
    def reader(
        cls: type[ConfigT],
        sizes: type[CodecSizes],
        formats: Format | Mapping[str, Format] | Callable[[dict[str, Any]], Format],
        **fields: Any,
    ) -> Callable[[Path], ConfigT]:
        """Returns the function `read` of a family, which reads the `config.json` of a folder.

        Args:
            sizes: dataclass of the sizes.
            formats: the format; formats by the value of `model_type`; or a function that chooses
                the format of a file by its content.
            fields: further fields of the class.
        """

        def read(folder: Path) -> ConfigT:
            path = folder / CONFIG_JSON
            document = read_json(path)
            with prefixed(f"{path}: "):
                if isinstance(formats, Format):
                    format_ = formats
                elif isinstance(formats, Mapping):
                    format_ = formats[str(document.get("model_type"))]
                else:
                    format_ = formats(document)
                return cls.of(format_.read(sizes, document), **fields)

        return read

    @property
    def module(self) -> str:
        """Module of the family: it has the class of the configuration, or that of the sizes."""
        module = type(self).__module__
        return type(self.sizes).__module__ if module.startswith(f"{__package__}.") else module

    def with_stream_settings(self, stream: StreamConfig) -> ModelConfig:
        if stream.left_blocks is not None:
            raise ConfigError(
                f"stream.left_blocks: {stream.left_blocks}, but the decoder of this model sees a "
                "fixed past; remove the setting"
            )
        return super().with_stream_settings(stream)

    def stage_config(self, stage: StageName) -> Any:
        return self.sizes

    def weights_names(self, stage: StageName) -> tuple[str, ...]:
        return self.weights


@dataclass(frozen=True, kw_only=True)
class SymmetricCodecConfig(CodecConfig):
    """Configuration of a codec with a decoder that reads as far ahead as it reads back.

    Attributes:
        withheld_frames_default: number of frames to hold back if `StreamConfig.lookahead_frames` is
            None and the decoder reads far ahead; 0 for its whole reach. Another decoder holds back
            its whole reach by default, which is exact.
    """

    hop_blocks: tuple[int, int] = (1, 32)  # the longest hop has 1.3 to 1.5 s
    withheld_frames_default: int = 0
    optional_lookahead_tokens: int = 0  # see `ModelConfig`. `with_stream_settings` sets it

    @property
    def reach_frames(self) -> int:
        """Number of frames that the decoder reads ahead, rounded up."""
        return int(unfilled_network(self, "decoder").lookahead_frames)

    @property
    def missing_samples(self) -> int:
        return int(unfilled_network(self, "decoder").missing_samples)

    def withheld_frames(self, stream: StreamConfig) -> int:
        if stream.lookahead_frames is not None:
            return stream.lookahead_frames
        far = self.reach_frames / self.token_frame_rate > _LONGEST_WAIT_SECONDS
        default = self.withheld_frames_default
        return default if far and default < self.reach_frames else 0

    def with_stream_settings(self, stream: StreamConfig) -> SymmetricCodecConfig:
        """Sets `optional_lookahead_tokens` to the number of tokens after a chunk that make its last
        samples exact.

        If the whole reach is held back, all samples are exact, and the number is 0.
        """
        super().with_stream_settings(stream)
        held = self.withheld_frames(stream)
        # The reach counts from the first sample that the decoder makes. If samples are missing, one
        # more token may be needed.
        ahead = self.reach_frames + bool(self.missing_samples) - held
        return replace(self, optional_lookahead_tokens=max(0, ahead) if held else 0)

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the first and the longest hop, in tokens.

        The first hop also has the tokens that the decoder holds back. Without them the first chunk
        would have less audio than `hop_blocks[0]` blocks, or none.
        """
        first, longest = super().hops(stream)
        held = self.withheld_frames(stream) or self.reach_frames
        first += self.block_tokens * math.ceil(held / self.block_tokens)
        return min(first, longest), longest
