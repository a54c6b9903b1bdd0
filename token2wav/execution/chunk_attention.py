"""Attention of the blocks of one chunk on a CPU, in two calls for all blocks.

Every block of a chunk attends to the same past, and to its own part of the chunk. One call for each
block reads the past once for each block, with few queries. Here one call computes the attention of
all blocks to the keys that every block attends to. A second call computes the attention of the
later blocks to the keys that only they attend to. The two results are then weighted by the sums of
their exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Sequence[int], heads: int
) -> torch.Tensor:
    """Computes attention of the blocks of a chunk, in the shape of q.

    Args:
        q: (branches, blocks, frames, heads * dim_head), on a CPU.
        k, v: (branches, keys, heads * dim_head).
        visible: keys that each block attends to, from the first key on. Their number never falls
            from block to block.
    """
    frames = q.shape[2]
    q, k, v = (
        value.unflatten(-1, (heads, -1)).transpose(1, 2) for value in (q.flatten(1, 2), k, v)
    )  # (branches, heads, frames or keys, dim_head)
    shared = visible[0]
    result, log_sum = _attention(q, k[:, :, :shared], v[:, :, :shared])
    if visible[-1] > shared:
        later = q[:, :, frames:]
        bias = _bias([count - shared for count in visible[1:]], frames, q.dtype)
        later_result, later_log_sum = _attention(later, k[:, :, shared:], v[:, :, shared:], bias)
        weight = torch.sigmoid(later_log_sum - log_sum[:, :, frames:])[..., None].to(q.dtype)
        result[:, :, frames:].lerp_(later_result, weight)
    return result.transpose(1, 2).flatten(2).unflatten(1, (len(visible), frames))


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes attention, and the logarithm of the sum of exponentials of each query.

    `scaled_dot_product_attention` calls the same operator but does not return the logarithm.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)


def _bias(visible: Sequence[int], frames: int, dtype: torch.dtype) -> torch.Tensor:
    """Makes the bias (blocks * frames, keys) of scores: 0 where a block attends to a key."""
    counts = torch.tensor(visible).repeat_interleave(frames)
    hidden = torch.arange(visible[-1]) >= counts[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
