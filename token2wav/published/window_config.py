"""Configuration of codecs whose decoder is not causal: it decodes windows of a stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from token2wav.config import StreamConfig
from token2wav.config.windows import Windows
from token2wav.errors import ConfigError
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes

_LONGEST_HOP_SECONDS = 1.6
_UNSET = StreamConfig()

ConfigT = TypeVar("ConfigT", bound="WindowCodecConfig")


@dataclass(frozen=True, kw_only=True)
class WindowCodecConfig(CodecConfig):
    """Configuration of a codec that decodes windows. A window is a block with look-ahead, so the
    scheduler treats the codec as any other.

    Attributes:
        whole: windows of an utterance that is decoded at once: one, or several for a long utterance
            whose positions would exceed those of the model.
    """

    windows: Windows  # windows of a stream
    whole: Windows

    @classmethod
    def of(cls: type[ConfigT], sizes: CodecSizes, **fields: Any) -> ConfigT:
        return super().of(sizes, **fields)._with(fields["windows"])

    @property
    def stream_bytes(self) -> int:
        """Bytes that a stream keeps between its chunks: codes, and audio of float32 that fades. A
        token at least is counted.
        """
        [codes] = self.tokens.shape
        samples = self.samples_per_token * self.windows.overlap
        return 4 * max(codes, codes * self.windows.past + samples)

    def withheld_frames(self, stream: StreamConfig) -> int:
        """Returns 0: the context on the right is the look-ahead of chunks."""
        return 0

    def with_stream_settings(self, stream: StreamConfig) -> WindowCodecConfig:
        if stream.lookahead_frames == 0:
            for name in ("block_tokens", "left_blocks", "overlap_tokens"):
                if (value := getattr(stream, name)) != getattr(_UNSET, name):
                    raise ConfigError(
                        f"stream.{name}: {value}, but stream.lookahead_frames: 0 "
                        "decodes whole utterances; remove one of the two"
                    )
            return self._with(self.whole)
        default, whole = self.windows, self.whole
        right = default.right if stream.lookahead_frames is None else stream.lookahead_frames
        if right > whole.right:
            raise ConfigError(
                f"stream.lookahead_frames: {right}, expected 0 to {whole.right} for this model"
            )
        block, left = stream.block_tokens or default.block, default.left
        if stream.left_blocks is not None:
            left = stream.left_blocks * block if stream.left_blocks >= 0 else whole.part
        overlap = stream.overlap_tokens
        if overlap is None:
            overlap = min(default.overlap, block, right)
        return self._with(Windows(block, left, right, overlap, whole.part))

    def _with(self: ConfigT, windows: Windows) -> ConfigT:
        blocks = int(_LONGEST_HOP_SECONDS * self.token_frame_rate / windows.block)
        return replace(
            self,
            windows=windows,
            block_tokens=windows.block,
            lookahead_tokens=windows.right,
            hop_blocks=(1, max(1, blocks)),
        )
