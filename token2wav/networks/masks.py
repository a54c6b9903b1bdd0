"""Attention masks, and the score biases that are made from them.

Frames count from the start of the prompt.
"""

from __future__ import annotations

import torch

from token2wav.config.block_grid import BlockGrid
from token2wav.published.sizes import SEES, GuidedAttention, Mask

_NEVER = -30000.0


def block_mask(grid: BlockGrid, frames: int, device: torch.device | None = None) -> torch.Tensor:
    """Computes the attention mask (frames, frames) of a whole sequence under a block grid."""
    positions = torch.arange(frames, device=device)
    return grid.allows(positions, positions)


def attention_bias(allowed: torch.Tensor) -> torch.Tensor:
    """Converts a mask to a float32 score bias: 0 where attention is allowed, else -30000.

    torch's attention also accepts the bool mask, but then converts it in every layer and step. This
    costs 4 % of a chunk's time. The bias is not minus infinity, for two reasons: a query in padding
    that may attend to no key would give NaN, and float16 ends at 65504.
    """
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, _NEVER)


def guided_mask(
    mask: Mask, frames: int, block_frames: int, device: torch.device | None = None
) -> torch.Tensor:
    """Computes the mask (frames, frames) of a layer with guided attention, as in StreamFlow.

    Rows are queries, and columns are keys. A block starts at the first frame.
    """
    block = torch.arange(frames, device=device) // block_frames
    before, after = SEES[mask]
    distance = block[None, :] - block[:, None]
    return (distance >= -before) & (distance <= after)


def guided_biases(
    attention: GuidedAttention,
    frames: int,
    block_frames: int,
    device: torch.device | None = None,
    lengths: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ...]:
    """Computes the score biases (frames, frames), one for every layer. Layers with the same mask
    share a tensor.

    With the lengths (B,) of sequences, no frame attends to frames behind the end of its sequence,
    and the biases have the shape (B, 1, frames, frames).
    """
    masks = {
        mask: guided_mask(mask, frames, block_frames, device) for mask in set(attention.layers)
    }
    if lengths is not None:
        real = torch.arange(frames, device=device) < lengths[:, None, None, None]
        masks = {name: mask & real for name, mask in masks.items()}
    biases = {name: attention_bias(mask).to(dtype) for name, mask in masks.items()}
    return tuple(biases[mask] for mask in attention.layers)
