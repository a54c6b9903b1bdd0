"""Attention masks of the estimator.

All masks count frames from the start of the prompt.
"""

from __future__ import annotations

import torch

from token2wav.block_grid import BlockGrid
from token2wav.networks.configs import SEES, GuidedAttention, Mask

_NEVER = -30000.0  # bias of scores where attention is not allowed


def block_mask(grid: BlockGrid, frames: int, device: torch.device | None = None) -> torch.Tensor:
    """Computes the attention mask (frames, frames) of a whole sequence under a block grid."""
    positions = torch.arange(frames, device=device)
    return grid.allows(positions, positions)


def attention_bias(allowed: torch.Tensor) -> torch.Tensor:
    """Converts a mask to a float32 bias of attention scores: 0 where allowed, else -30000, for
    which softmax gives zero.

    Attention also takes the bool mask, but then converts it in every layer and step, which costs 4
    % of the time of a chunk. The bias is not minus infinity, because a query in padding that may
    attend to no key would then give NaN, and because float16 ends at 65504.
    """
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, _NEVER)


def guided_mask(
    mask: Mask, frames: int, block_frames: int, device: torch.device | None = None
) -> torch.Tensor:
    """Computes the mask (frames, frames) of a layer with guided attention. Rows are queries. The
    first frame starts a block.
    """
    block = torch.arange(frames, device=device) // block_frames
    before, after = SEES[mask]
    distance = block[None, :] - block[:, None]
    return (distance >= -before) & (distance <= after)


def guided_biases(
    attention: GuidedAttention, frames: int, block_frames: int, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Computes the bias of attention scores of every layer, each (frames, frames)."""
    biases = {
        mask: attention_bias(guided_mask(mask, frames, block_frames, device))
        for mask in set(attention.layers)
    }
    return tuple(biases[mask] for mask in attention.layers)
