"""Linear layers with one input as one product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn


def join_projections(layers: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Joins the weights of linear layers with the same input.

    The parameters of the layers become views of the result, so the weights are stored once. A
    second call returns the same memory.

    Args:
        layers: layers that all have a bias, or none.

    Returns:
        Weight (sum of outputs, inputs), and bias (sum of outputs,) or None.
    """
    weight = _joined([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else _joined([layer.bias for layer in layers])
    rows = accumulate((layer.out_features for layer in layers), initial=0)
    for layer, (first, stop) in zip(layers, pairwise(rows), strict=True):
        layer.weight = nn.Parameter(weight[first:stop], requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias[first:stop], requires_grad=False)
    return weight, bias


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors along their first axis, unless they are in one piece already."""
    first = parts[0].detach()
    offsets = accumulate((part.numel() for part in parts), initial=first.storage_offset())
    storage = first.untyped_storage()
    in_one_piece = all(
        part.storage_offset() == offset and part.untyped_storage()._cdata == storage._cdata
        for part, offset in zip(parts, offsets, strict=False)
    )
    if in_one_piece:
        shape = sum(len(part) for part in parts), *first.shape[1:]
        return first.as_strided(shape, first.stride())
    return torch.cat([part.detach() for part in parts])
