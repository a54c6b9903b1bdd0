"""Names of Mimi's weights in the folders of the package `moshi`, which become the names of
`transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

_KINDS = {"first": "semantic", "rest": "acoustic"}
_RENAMED = (
    (re.compile(r"^decoder\.model\."), "decoder.layers."),
    (re.compile(r"^decoder_transformer\.transformer\."), "decoder_transformer."),
    (re.compile(r"(?:\.conv(?:tr)?){2,3}\.(weight|bias)$"), r".conv.\1"),
    (re.compile(r"\.self_attn\.out_projs?(\.0)?\.weight$"), ".self_attn.o_proj.weight"),
    (re.compile(r"\.norm1\."), ".input_layernorm."),
    (re.compile(r"\.norm2\."), ".post_attention_layernorm."),
    (re.compile(r"\.linear([12])\."), r".mlp.fc\1."),
    (re.compile(r"\.layer_scale_1\."), ".self_attn_layer_scale."),
    (re.compile(r"\.layer_scale_2\."), ".mlp_layer_scale."),
)
_BOOK = re.compile(r"^quantizer\.rvq_(first|rest)\.vq\.layers\.(\d+)\._codebook\.(\w+)$")
_BOOK_PARTS = {
    "embedding_sum": "embed_sum",
    "cluster_usage": "cluster_usage",
    "_initialized": "initialized",
}
_PROJECTION = re.compile(r"^quantizer\.rvq_(first|rest)\.(input|output)_proj\.weight$")
# Files have the first name; newer versions of the package save the second one.
_QKV = re.compile(r"^(decoder_transformer\.layers\.\d+\.self_attn\.)in_proj(_weight|s\.0\.weight)$")


def is_moshi(state: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether tensors have the names of `moshi`."""
    return any(name.startswith("decoder_transformer.transformer.") for name in state)


def transformers_names(state: Mapping[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Returns tensors under the names of `transformers`.

    `moshi` rotates pairs of neighbouring channels; `transformers`, pairs of a channel of the first
    half of a head and a channel of its second half. So the rows of queries and keys change places.

    Args:
        state: tensors by the names of `moshi`.
        heads: number of heads of the transformer.
    """
    weights: dict[str, torch.Tensor] = {}
    for published, value in state.items():
        name = _name(published)
        if (found := _QKV.match(name)) and _splits(value, heads):
            q, k, v = value.chunk(3)
            weights[f"{found[1]}q_proj.weight"] = _halves(q, heads)
            weights[f"{found[1]}k_proj.weight"] = _halves(k, heads)
            weights[f"{found[1]}v_proj.weight"] = v
        else:
            weights[name] = value
    return weights


def _name(published: str) -> str:
    if found := _BOOK.match(published):
        kind, number, part = found.groups()
        layer = f"quantizer.{_KINDS[kind]}_residual_vector_quantizer.layers.{number}"
        return f"{layer}.codebook.{_BOOK_PARTS.get(part, part)}"
    if found := _PROJECTION.match(published):
        kind, direction = found.groups()
        return f"quantizer.{_KINDS[kind]}_residual_vector_quantizer.{direction}_proj.weight"
    for pattern, replacement in _RENAMED:
        published = pattern.sub(replacement, published)
    return published


def _splits(value: torch.Tensor, heads: int) -> bool:
    """Returns whether a tensor has the rows of queries, keys and values of heads with pairs. The
    later check of names rejects any other tensor.
    """
    return isinstance(value, torch.Tensor) and value.dim() == 2 and not len(value) % (6 * heads)


def _halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Moves the even rows of every head before its odd rows."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)
