"""LFM2-Audio: its audio detokenizer, a causal LFM2 and an inverse STFT.

Its configuration is the `config.json` in the folder `audio_detokenizer` of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from token2wav.config.values import Bounds, Length
from token2wav.published import bounded
from token2wav.published.codec_config import CodecConfig
from token2wav.published.codec_sizes import CodecSizes
from token2wav.published.formats import ROPE_THETA, ROPE_TYPES, TRANSFORMERS, Format
from token2wav.published.relations import Divides, Equals
from token2wav.published.weight_names import WeightNames

MODEL_TYPES = ("lfm2",)
DECODER = "token2wav.families.lfm2_audio.network:Lfm2AudioDecoder"
WEIGHTS = WeightNames(
    parts=("emb.", "lfm.layers.", "lfm.embedding_norm.", "lin."),
    unused="^$",  # `in_proj` is a layer of the short convolutions
    renamed=((r"^emb\.emb\.", "emb."), (r"\.self_attn\.out_proj\.", ".self_attn.o_proj.")),
)
# of the embedding of text, of training, and older names of sizes
_UNUSED = """
    block_dim block_ff_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init full_attn_idxs num_heads
    output_size tie_embedding use_pos_enc vocab_size
"""


def _one_feed_forward_size(section: dict[str, Any]) -> dict[str, Any]:
    """Returns the section with `block_ff_dim`, which precedes `intermediate_size` as in
    `transformers`, under the name of the other.
    """
    name = "block_ff_dim" if "block_ff_dim" in section else "intermediate_size"
    return {**section, "intermediate_size": section[name]} if name in section else section


FORMAT = Format(
    names={**ROPE_THETA, "conv_kernel": "conv_L_cache"},
    only=ROPE_TYPES,
    without_effect=(*TRANSFORMERS, *_UNUSED.split()),
    prepare=_one_feed_forward_size,
)

Kind = Literal["conv", "full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class Lfm2AudioSizes(CodecSizes):
    """Sizes of the detokenizer, with the names and defaults of `Lfm2Config` in `transformers`.
    The fields after `rope_theta` are constants in the public code.

    Attributes:
        intermediate_size, block_auto_adjust_ff_dim, block_ffn_dim_multiplier, block_multiple_of:
            see `feed_forward_size`.
        layer_types: kind of each layer. Attention of both kinds has the window.
        conv_kernel, conv_bias: kernel of the short convolutions, and whether they have biases.
        upsample_factor: positions of the layers for each frame of codes.
    """

    RATE, CODES = "sample_rate", ("num_codebooks", "codebook_size")
    FRAME = ("upsample_factor", "hop_length")

    hidden_size: bounded.Width = 2560
    intermediate_size: bounded.Width = 12288
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Annotated[float, Bounds(0.001, 1000)] = 1.0
    block_multiple_of: bounded.Width = 256
    num_hidden_layers: Annotated[bounded.Layers, Equals("listed_layers", "layer_types")] = 32
    num_attention_heads: bounded.Heads = 32
    num_key_value_heads: Annotated[bounded.Heads, Divides("num_attention_heads")] = 8
    head_dim: Annotated[int | None, Bounds(2, 1 << 16)] = None
    layer_types: Annotated[tuple[Kind, ...], Length(1024)]
    conv_kernel: bounded.Kernel = 3
    conv_bias: bool = False
    sliding_window: bounded.Window = 30
    norm_eps: bounded.Epsilon = 1e-5
    rope_theta: bounded.RopeBase = 1e6
    num_codebooks: bounded.CodebookCount = 8
    codebook_size: bounded.CodebookSize = 2048
    upsample_factor: bounded.Rate = 6
    n_fft: bounded.SmallFftSize = 1280
    hop_length: bounded.HopSize = 320
    sample_rate: bounded.SampleRate = 24_000

    @property
    def listed_layers(self) -> int:
        return len(self.layer_types)

    @property
    def dim_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def feed_forward_size(self) -> int:
        """Channels inside the feed-forward part of a layer."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return -(-size // self.block_multiple_of) * self.block_multiple_of


read = CodecConfig.reader(Lfm2AudioSizes, FORMAT)
