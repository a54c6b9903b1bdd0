"""Audex: the causal speech decoder of Nemotron Audex, a transformer without convolutions in its
output.

Its configuration is the `config.json` in the folder `audex_causal_speech_decoder` of a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from token2wav.config import StreamConfig
from token2wav.config.values import Bounds
from token2wav.published import bounded
from token2wav.published.codec_config import SymmetricCodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import TRANSFORMERS, Format
from token2wav.published.relations import Divides, Equals, Gives, Only
from token2wav.published.weight_names import WeightNames

MODEL_TYPES = ("audex_causal_speech_decoder",)
DECODER = "token2wav.families.audex.network:AudexDecoder"
WEIGHTS = WeightNames(
    parts=("audex_speech_token_embedder.", "module."),
    unused=r"^module\.wav_proj\.",  # of training
    renamed=(
        (r"^audex_speech_token_embedder\.", ""),
        (r"^module\.(backbone\.)?", ""),
        (r"^lookahead_", "lookahead."),
        (r"^transformers\.", "transformer.layers."),
        (r"\.att_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.att\.c_attn\.", ".self_attn.in_proj."),
        (r"\.att\.c_proj\.", ".self_attn.o_proj."),
        (r"^head\.proj\.", "head."),
    ),
)
FORMAT = Format(names={"window": ()}, without_effect=TRANSFORMERS)

_BLOCK = 2  # tokens
# The decoder attends to the whole past. The language model makes at most as many tokens, by the
# limit of its published settings.
_MOST_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class AudexSizes(CodecSizes):
    """Sizes of the decoder, with the fields and defaults of the configuration of its authors.

    Attributes:
        pos_meb_dim: channels of a head. All have rotary positions.
        codebook_levels, codebook_size: levels of each value of a code, and all of their
            combinations.
        window: positions that a position attends to, itself included. No file has it.
    """

    RATE, CODES, FRAME = "sample_rate", ("codes", "codebook_size"), ("hop_length",)

    hidden_dim: Annotated[bounded.Width, Equals("head_channels", "heads and pos_meb_dim")] = 2048
    depth: bounded.Layers = 12
    heads: Annotated[bounded.Heads, Divides("hidden_dim")] = 32
    pos_meb_dim: bounded.HeadWidth = 64
    hop_length: bounded.Rate = 320
    vq_dim: bounded.Width = 2048  # channels of an embedded token
    lookahead_steps: Annotated[int, Bounds(1, 64)] = 4  # later tokens that a token depends on
    sample_rate: bounded.SampleRate = 16_000
    codebook_levels: Annotated[bounded.Levels, Gives("combinations", 1 << 20, "codes")] = (4,) * 8
    codebook_size: Annotated[int, Equals("combinations", "codebook_levels")] = 65_536
    token_embed_dim: Annotated[int, Equals("values", "codebook_levels")] = 8  # values of a code
    embed_tokens_from_codes: Annotated[bool, Only(True)] = True
    window: bounded.Window = _MOST_TOKENS

    @property
    def codes(self) -> int:
        """Codes of a token."""
        return 1

    @property
    def values(self) -> int:
        return len(self.codebook_levels)

    @property
    def combinations(self) -> int:
        return math.prod(self.codebook_levels)

    @property
    def head_channels(self) -> int:
        """Channels of all heads."""
        return self.heads * self.pos_meb_dim


@dataclass(frozen=True, kw_only=True)
class AudexConfig(SymmetricCodecConfig):
    """Configuration of the decoder. It attends to the whole past, so utterances have a limit, until
    `StreamConfig.left_blocks` sets a window.
    """

    sizes: AudexSizes
    block_tokens: int = _BLOCK
    most_tokens: int | None = _MOST_TOKENS

    def with_stream_settings(self, stream: StreamConfig) -> SymmetricCodecConfig:
        config = self
        if stream.left_blocks is not None and stream.left_blocks >= 0:
            window = self.block_tokens * (1 + stream.left_blocks)
            config = replace(self, sizes=replace(self.sizes, window=window), most_tokens=None)
        other = replace(stream, left_blocks=None)
        return super(AudexConfig, config).with_stream_settings(other)


read = AudexConfig.reader(AudexSizes, FORMAT)
