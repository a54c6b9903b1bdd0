"""Names of Mimi's weights in the folders of the package `moshi`, which become the names of
`transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from token2wav.networks.moshi_layers import attention_rows, layer_name

_KINDS = {"first": "semantic", "rest": "acoustic"}
_RENAMED = (
    (re.compile(r"^decoder\.model\."), "decoder.layers."),
    (re.compile(r"^decoder_transformer\.transformer\."), "decoder_transformer."),
    (re.compile(r"(?:\.conv(?:tr)?){2,3}\.(weight|bias)$"), r".conv.\1"),
)
_BOOK = re.compile(r"^quantizer\.rvq_(first|rest)\.vq\.layers\.(\d+)\._codebook\.(\w+)$")
_BOOK_PARTS = {
    "embedding_sum": "embed_sum",
    "cluster_usage": "cluster_usage",
    "_initialized": "initialized",
}
_PROJECTION = re.compile(r"^quantizer\.rvq_(first|rest)\.(input|output)_proj\.weight$")
_TRANSFORMER = "decoder_transformer."


def is_moshi(state: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether tensors have the names of `moshi`."""
    return any(name.startswith("decoder_transformer.transformer.") for name in state)


def transformers_names(state: Mapping[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """Returns tensors of `moshi` under the names of `transformers`. The transformer has `heads`
    heads.
    """
    weights: dict[str, torch.Tensor] = {}
    for published, value in state.items():
        name = _name(published)
        if name.startswith(_TRANSFORMER):
            weights |= attention_rows(name, value, heads)
        else:
            weights[name] = value
    return weights


def _name(published: str) -> str:
    if match := _BOOK.match(published):
        kind, number, part = match.groups()
        layer = f"quantizer.{_KINDS[kind]}_residual_vector_quantizer.layers.{number}"
        return f"{layer}.codebook.{_BOOK_PARTS.get(part, part)}"
    if match := _PROJECTION.match(published):
        kind, direction = match.groups()
        return f"quantizer.{_KINDS[kind]}_residual_vector_quantizer.{direction}_proj.weight"
    for pattern, replacement in _RENAMED:
        published = pattern.sub(replacement, published)
    return layer_name(published) if published.startswith(_TRANSFORMER) else published
