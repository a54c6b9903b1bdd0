"""Attention masks of the estimator.

All masks count frames from the start of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from token2wav.networks.configs import SEES, GuidedAttention, Mask

_NEVER = -30000.0  # bias of scores where attention is not allowed


@dataclass(frozen=True)
class BlockMask:
    """Attention mask of a stream, made of blocks.

    A frame attends to its own block and to earlier blocks: to all earlier blocks if `left_blocks`
    is negative, else to the last `left_blocks` blocks and to the blocks of the prefix.

    Attributes:
        block_frames: number of frames of an attention block.
        left_blocks: number of visible earlier blocks; negative for all.
        prefix_blocks: number of blocks at the start that always stay visible. They depend on the
            voice alone.
        joined_blocks: number of blocks at the start that attend to one another as if they were one
            block.
    """

    block_frames: int
    left_blocks: int = -1
    prefix_blocks: int = 0
    joined_blocks: int = 0

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Computes the mask (Q, K), True where allowed, of frame indices (Q,) and (K,)."""
        query, key = (queries // self.block_frames)[:, None], (keys // self.block_frames)[None, :]
        query = query.clamp(min=self.joined_blocks - 1)
        allowed = key <= query
        if self.left_blocks >= 0:
            allowed &= (key >= query - self.left_blocks) | (key < self.prefix_blocks)
        return allowed

    def whole(self, frames: int, device: torch.device | None = None) -> torch.Tensor:
        """Computes the mask (frames, frames) of a whole sequence."""
        position = torch.arange(frames, device=device)
        return self.allows(position, position)

    def first_needed(self, block: int) -> int:
        """Returns the first block after the prefix that `block` and later blocks can attend to."""
        if self.left_blocks < 0:
            return self.prefix_blocks
        return max(self.prefix_blocks, block - self.left_blocks)


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
