"""Published names of the weights of a decoder, as a table that `networks.codec_weights` reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

PROJECTED = ("codebook.weight", "out_proj.weight", "out_proj.bias")  # weights of a codebook of DAC


@dataclass(frozen=True)
class Codebooks:
    """Published names of the codebooks of a module.

    Attributes:
        pattern: regular expression for the beginning of the names of a codebook. Its group is the
            number of the codebook.
        module: name of the module in the network.
        parts: ends of the names. The entries alone; entries, weight and bias of projections; or the
            sums of training vectors and their numbers, whose quotients are the entries.
    """

    pattern: str
    module: str
    parts: tuple[str, ...] = PROJECTED


@dataclass(frozen=True)
class WeightNames:
    """Published names of weights. Weight norm has any of its three spellings, in every table.

    Attributes:
        parts: beginnings of the names. All other weights stay in the file.
        unused: regular expression for names among them that the decoder does not need.
        renamed: regular expressions and their replacements, in this order. They turn a published
            name into the name in the network.
        codebooks: names of codebooks, after they were renamed.
        wrappers: keys of a pickle. A dict under such a key is read in place of the pickle.
    """

    parts: tuple[str, ...]
    unused: str = r"\.in_proj\."
    renamed: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = ()
    codebooks: tuple[Codebooks, ...] = ()
    wrappers: tuple[str, ...] = ()


# Semantic and acoustic codebooks of Mimi, and of codecs that copied it
RVQ_NAMES = (
    (r"^quantizer\.rvq_first\.(vq\.)?", "quantizer.semantic."),
    (r"^quantizer\.rvq_rest\.(vq\.)?", "quantizer.acoustic."),
    (r"\._codebook\.embedding_sum$", ".codebook.embed_sum"),
    (r"\._codebook\.", ".codebook."),
)
RVQ_CODEBOOKS = tuple(
    Codebooks(
        rf"quantizer\.{kind}\.layers\.(\d{{1,3}})\.codebook\.",
        f"quantizer.{kind}",
        ("embed_sum", "cluster_usage"),
    )
    for kind in ("semantic", "acoustic")
)
RVQ_UNUSED = r"\bquantizer\..*(\.input_proj\.|initialized$|inited$)"  # weights that make codes
WRAPPERS = (r"(?:\.conv(?:tr)?)+\.(weight|bias)$", r".\1")  # names of wrappers of convolutions
# Layers of transformers in the package `moshi`, and in codecs that copied them
MOSHI_LAYERS = (
    (r"\.self_attn\.out_projs?(\.0)?\.weight$", ".self_attn.o_proj.weight"),
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".post_attention_layernorm."),
    (r"\.linear([12])\.", r".mlp.fc\1."),
    (r"\.ffn\.0\.", ".mlp.fc1."),
    (r"\.ffn\.2\.", ".mlp.fc2."),
    (r"\.layer_scale_1\.", ".self_attn_layer_scale."),
    (r"\.layer_scale_2\.", ".mlp_layer_scale."),
)
