"""SNAC, the codec of Orpheus and Svara: codebooks at several rates, symmetric convolutions with
Snake, and noise.

Its configuration is the `config.json` of the package `snac`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from token2wav.config import StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.config.values import Bounds, Length
from token2wav.errors import ConfigError
from token2wav.published import bounded
from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import CodecSizes, SymmetricSizes
from token2wav.published.formats import DESCRIPT_NAMES, TRANSFORMERS, Format
from token2wav.published.registry import unfilled_network
from token2wav.published.relations import Descending, Gives, Halves, Multiple, SameProduct
from token2wav.published.weight_names import Codebooks, WeightNames

CONFIG_KEYS = ("vq_strides", "decoder_rates")
DECODER = "token2wav.families.snac.network:Snac"
WEIGHTS = WeightNames(
    parts=("quantizer.", "decoder."),
    codebooks=(Codebooks(r"quantizer\.quantizers\.(\d{1,3})\.", "quantizer"),),
)
FORMAT = Format(names=DESCRIPT_NAMES, without_effect=TRANSFORMERS)
HEAD_CHANNELS = 64  # channels of an attention head

_MOST_CODES = 64  # codes of one token
_LONGEST_WINDOW = 1024  # latents of a window; bounds the work of a short stream
_LONGEST_HOP = 16  # tokens in the longest hop (1.4 s at 24 kHz)
# Tokens of 85 ms that are held back by default. The decoder reads 198 ms ahead (docs/models.md).
_LOOKAHEAD_FRAMES = 2

Strides = Annotated[
    tuple[Annotated[int, Bounds(1, _MOST_CODES)], ...],
    Length(8, least=1),
    Descending(),
    Gives("codes", _MOST_CODES, "codes for each token"),
]


@dataclass(frozen=True, kw_only=True)
class SnacSizes(CodecSizes, SymmetricSizes):
    """Sizes of SNAC. Defaults are those of the package `snac`.

    Attributes:
        attn_window_size: latents of a window of the attention before the first upsampling; None
            for no attention.
    """

    CODES, FRAME = ("codes", "codebook_size"), ("token_latents", "rates")

    sampling_rate: bounded.SampleRate = 44100
    downsampling_ratios: bounded.SomeRates = (3, 3, 7, 7)
    decoder_hidden_size: Annotated[
        bounded.Width,
        Halves("rates"),
        Multiple("head_channels", "the channels of an attention head"),
    ] = 1536
    upsampling_ratios: Annotated[bounded.SomeRates, SameProduct("downsampling_ratios")] = (
        7,
        7,
        3,
        3,
    )
    attn_window_size: Annotated[
        int | None,
        Bounds(1, _LONGEST_WINDOW),
        Multiple("token_latents", "the latents of a token"),
    ] = 32
    codebook_size: bounded.CodebookSize = 4096
    codebook_dim: bounded.Width = 8
    vq_strides: Strides = (8, 4, 2, 1)  # latents for each code of a codebook, the coarsest first
    noise: bool = True
    depthwise: bool = True  # whether the convolutions filter every channel by itself

    @property
    def token_latents(self) -> int:
        """Latents of one token."""
        return self.vq_strides[0]

    @property
    def head_channels(self) -> int:
        """Channels of an attention head; 1 without attention."""
        return 1 if self.attn_window_size is None else HEAD_CHANNELS

    @property
    def codes(self) -> int:
        """Codes of one token."""
        return sum(self.token_latents // stride for stride in self.vq_strides)

    @property
    def window_tokens(self) -> int:
        """Tokens of a window of the attention; 1 without attention."""
        return (self.attn_window_size or self.token_latents) // self.token_latents

    def code_places(self) -> list[list[int]]:
        """Returns the place of every code in a token: for each codebook, and each latent of the
        token, the index of the code that the latent gets.

        A code comes after the coarser code above it, and before the next code of the same codebook.
        For strides of 4, 2 and 1 (24 kHz) the seven codes are

            0: all four latents
            1: latents 0 and 1     4: latents 2 and 3
            2: latent 0            5: latent 2
            3: latent 1            6: latent 3
        """
        latents = self.vq_strides[0]
        places = [[0] * latents for _ in self.vq_strides]
        count = 0
        for latent in range(latents):
            for codebook, stride in enumerate(self.vq_strides):
                if latent % stride == 0:
                    places[codebook][latent : latent + stride] = [count] * stride
                    count += 1
        return places


@dataclass(frozen=True, kw_only=True)
class SnacConfig(SymmetricCodecConfig):
    """Configuration of a SNAC model. A token has the codes of all codebooks for one code of the
    coarsest one.
    """

    sizes: SnacSizes

    @property
    def adds_noise(self) -> bool:
        return self.sizes.noise

    @property
    def tokens_past_window(self) -> int:
        """Tokens after the end of a window that the window depends on; 0 without attention. Chunks
        end this number of tokens after windows.
        """
        return int(unfilled_network(self, "decoder").frames_past_window)

    def grid(self, prompt_tokens: int, left_blocks: int = -1) -> BlockGrid:
        """Returns a grid with blocks that end `tokens_past_window` after the windows."""
        padding = -self.tokens_past_window % self.block_tokens
        return BlockGrid(self.block_tokens, prompt_padding=padding, left_blocks=left_blocks)

    def hops(self, stream: StreamConfig) -> tuple[int, int]:
        """Returns the first and the longest hop, in tokens.

        With attention the first chunk begins before the first boundary of the grid. So it is longer
        than the first hop, which needs fewer tokens for some audio.
        """
        if self.sizes.attn_window_size is None:
            return super().hops(stream)
        block, boundary = self.block_tokens, self.grid(0).first_boundary
        longest = stream.max_hop_tokens or self.hop_blocks[1] * block
        first = block * max(1, math.ceil((self.reach_frames + 1 - boundary) / block))
        return min(first, longest), longest

    def check(self, stream: StreamConfig) -> None:
        super().check(stream)
        if self.sizes.attn_window_size is not None and stream.lookahead_frames:
            raise ConfigError(
                f"stream.lookahead_frames: {stream.lookahead_frames}, expected 0; this model "
                "holds back its whole look-ahead, because later tokens change whole windows of its "
                "attention"
            )

    @classmethod
    def of(cls, sizes: Any, **fields: Any) -> Any:
        block = sizes.window_tokens
        return super().of(
            sizes,
            block_tokens=block,
            hop_blocks=(1, max(1, _LONGEST_HOP // block)),
            withheld_frames_default=_LOOKAHEAD_FRAMES if sizes.attn_window_size is None else 0,
        )


read = SnacConfig.reader(SnacSizes, FORMAT)
