"""Configuration of DAC, which is read from `config.json` of a `transformers` folder, or from the
`weights.pth` of the package `descript-audio-codec`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from token2wav.config import StreamConfig
from token2wav.config.transformers_json import CONFIG_JSON, has_model_type, read_json
from token2wav.config.values import Bounds, check_bounds, convert, from_mapping, kinds, prefixed
from token2wav.errors import CheckpointError, ConfigError
from token2wav.families import unfilled_network
from token2wav.families.dac.descript import WEIGHTS_PATTERNS, descript_weights_file, read_descript
from token2wav.model_config import ModelConfig, StageName
from token2wav.networks.configs import (
    CodebookCount,
    CodebookSize,
    Rates,
    SampleRate,
    TokenRate,
    Width,
)

MODEL_TYPES = ("dac",)
FILES = WEIGHTS_PATTERNS
_WEIGHTS = "model.safetensors"

KERNEL = 7  # of the first and the last convolution, and of the residual units
DILATIONS = (1, 3, 9)  # of the residual units after each upsampling

# A chunk of one token (12 ms at 44.1 kHz) would be too short to play, and would cost a step. So a
# block has the tokens of at least 40 ms: 4 tokens (46 ms) at 44.1 kHz, 3 at 24 kHz, 2 at 16 kHz.
_BLOCK_SECONDS = 0.04
# Blocks of the first chunk, and of the longest hop. The longest hop has 1.3 to 1.5 s, as in other
# codecs.
HOP_BLOCKS = (1, 32)

# A decoder that reads at most this far ahead holds back its whole reach by default. This is exact.
_LONGEST_WAIT_SECONDS = 0.12
# Frames that other DAC models hold back. The last frame of a chunk then has an SNR of 52 dB or more
# (docs/models.md).
_EARLY_FRAMES = 8


@dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes of the decoder, which other codecs share. Fields and defaults have the values that
    `transformers` publishes.

    Attributes:
        encoder_hidden_size: channels of the encoder before its first downsampling.
        downsampling_ratios: factor of each downsampling of the encoder.
        decoder_hidden_size: channels of the decoder before its first upsampling. Every upsampling
            halves them.
        hidden_size: channels of the latents; None for the channels of the encoder's output.
        upsampling_ratios: factor of each upsampling; empty for the reversed factors of the encoder.
    """

    encoder_hidden_size: Width = 64
    downsampling_ratios: Rates = (2, 4, 8, 8)
    decoder_hidden_size: Width = 1536
    hidden_size: Annotated[int | None, Bounds(1, 1 << 16)] = None
    upsampling_ratios: Rates = ()

    def __post_init__(self) -> None:
        check_bounds(self, "")
        if not self.rates:
            raise ConfigError("downsampling_ratios: empty; at least 1 is needed")
        if math.prod(self.rates) != math.prod(self.downsampling_ratios):
            raise ConfigError(
                f"upsampling_ratios: {self.frame_samples} samples for each frame, but "
                f"downsampling_ratios give {math.prod(self.downsampling_ratios)}"
            )
        if self.decoder_hidden_size % (1 << len(self.rates)):
            raise ConfigError(
                f"decoder_hidden_size: {self.decoder_hidden_size} cannot be halved "
                f"{len(self.rates)} times"
            )
        if self.latents > 1 << 16:
            raise ConfigError(
                f"encoder_hidden_size: {self.encoder_hidden_size} gives {self.latents} channels of "
                f"the latents; at most {1 << 16} are allowed"
            )

    @property
    def rates(self) -> tuple[int, ...]:
        """Factor of each upsampling."""
        return self.upsampling_ratios or self.downsampling_ratios[::-1]

    @property
    def latents(self) -> int:
        """Channels of the latents."""
        return self.hidden_size or self.encoder_hidden_size << len(self.downsampling_ratios)

    @property
    def frame_samples(self) -> int:
        """Samples of audio for each frame of codes."""
        return math.prod(self.rates)


@dataclass(frozen=True, kw_only=True)
class DacSizes(DecoderSizes):
    """Sizes of DAC.

    Attributes:
        sampling_rate: samples per second.
        n_codebooks, codebook_size, codebook_dim: number of codebooks, their entries, and the length
            of an entry.
    """

    sampling_rate: SampleRate = 16000
    n_codebooks: CodebookCount = 9
    codebook_size: CodebookSize = 1024
    codebook_dim: Width = 8


@dataclass(frozen=True, kw_only=True)
class SymmetricCodecConfig(ModelConfig):
    """Configuration of a codec with a decoder that reads as far ahead as it reads back.

    Attributes:
        hold_frames: default number of frames to hold back for a decoder that reads far ahead.
            Another decoder holds back its whole reach by default, which is exact.
    """

    @property
    def reach_frames(self) -> int:
        """Number of frames that the decoder reads ahead, rounded up."""
        return int(unfilled_network(self, "decoder").lookahead_frames)

    @property
    def missing_samples(self) -> int:
        return int(unfilled_network(self, "decoder").missing_samples)

    def held_frames(self, stream: StreamConfig) -> int:
        if stream.hold_frames is not None:
            return stream.hold_frames
        far = self.reach_frames / self.token_frame_rate > _LONGEST_WAIT_SECONDS
        return self.hold_frames if far and self.hold_frames < self.reach_frames else 0

    def with_stream_settings(self, stream: StreamConfig) -> SymmetricCodecConfig:
        """Sets `ahead_tokens`, the number of tokens after a chunk that make its last samples exact.

        If the whole reach is held back, all samples are exact, and the number is 0.
        """
        held = self.held_frames(stream)
        # The reach counts from the first sample that the decoder makes. If samples are missing, one
        # more token may be needed.
        ahead = self.reach_frames + bool(self.missing_samples) - held
        return replace(self, ahead_tokens=max(0, ahead) if held else 0)

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the first and the longest hop, in tokens.

        The first hop also has the tokens that the decoder holds back. Without them the first chunk
        would have less audio than `hop_blocks[0]` blocks, or none.
        """
        first, longest = super().hops(stream)
        held = self.held_frames(stream) or self.reach_frames
        first += self.block_tokens * math.ceil(held / self.block_tokens)
        return min(first, longest), longest


@dataclass(frozen=True, kw_only=True)
class DacConfig(SymmetricCodecConfig):
    """Configuration of a DAC model.

    Attributes:
        sizes: sizes of the decoder.
    """

    sizes: DacSizes

    def stage_config(self, stage: StageName) -> Any:
        return self.sizes

    def weights_file(self, folder: Path, stage: StageName) -> Path:
        return weights_file(folder)


def weights_file(folder: Path) -> Path:
    """Finds the file of the weights, in the format of `transformers` or `descript-audio-codec`.

    Raises:
        CheckpointError: the folder has no such file.
        ConfigError: the folder has several files of `descript-audio-codec`.
    """
    own = folder / _WEIGHTS
    found = own if _is_transformers(folder) else descript_weights_file(folder)
    if found is None or not found.is_file():
        raise CheckpointError(f"{folder}: contains neither {_WEIGHTS} nor {WEIGHTS_PATTERNS[0]}")
    return found


def _is_transformers(folder: Path) -> bool:
    return has_model_type(folder, *MODEL_TYPES)


def read(folder: Path) -> DacConfig:
    """Reads the configuration of a folder. Settings of the training are skipped.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one.
        CheckpointError: the folder has no weights, or `weights.pth` cannot be read.
    """
    if not _is_transformers(folder):
        path = weights_file(folder)
        return config_of(read_descript(path), path)
    path = folder / CONFIG_JSON
    document = read_json(path)
    with prefixed(f"{path}: "):
        own = {name: value for name, value in document.items() if name in kinds(DacSizes)}
        return config_of(own, path)


def config_of(values: dict[str, Any], path: Path) -> DacConfig:
    """Returns the configuration of a model.

    Args:
        values: values of `DacSizes`.
        path: file of the values, for messages.

    Raises:
        ConfigError: a value is of another type, out of range, or does not fit another one.
    """
    with prefixed(f"{path}: "):
        sizes = from_mapping(DacSizes, values, "")
        samples = sizes.frame_samples
        rate = convert(sizes.sampling_rate / samples, TokenRate, "frames per second")
    return DacConfig(
        vocab_size=sizes.codebook_size,
        token_frame_rate=rate,
        token_shape=(sizes.n_codebooks,),
        fewer_codebooks=True,
        block_tokens=math.ceil(_BLOCK_SECONDS * rate),
        token_mel_ratio=1,
        mel_bands=sizes.n_codebooks,
        speaker_size=0,
        sample_rate=sizes.sampling_rate,
        stages=("decoder",),
        samples_per_token=samples,
        hop_blocks=HOP_BLOCKS,
        hold_frames=_EARLY_FRAMES,
        takes_prompt=False,
        sizes=sizes,
    )
