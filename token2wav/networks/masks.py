"""Attention masks of the estimator.

Frames count from the start of the prompt, so that they are the same everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from token2wav.networks.configs import SEES, GuidedAttention, Mask

_NEVER = -30000.0


@dataclass(frozen=True)
class BlockMask:
    """Attention mask of a stream, block by block.

    A frame sees its own block and, before it, all blocks (`left_blocks` < 0), or the last
    `left_blocks` ones and those of the prefix.
    """

    block_frames: int  # of one attention block
    left_blocks: int = -1
    # at the start, that always stay visible: those that depend on the voice alone
    prefix_blocks: int = 0
    joined_blocks: int = 0  # at the start, that see one another as if they were one

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """(Q,) and (K,) frame indices to (Q, K) bool, True where attention is allowed."""
        query, key = (queries // self.block_frames)[:, None], (keys // self.block_frames)[None, :]
        query = query.clamp(min=self.joined_blocks - 1)
        allowed = key <= query
        if self.left_blocks >= 0:
            allowed &= (key >= query - self.left_blocks) | (key < self.prefix_blocks)
        return allowed

    def whole(self, frames: int, device: torch.device | None = None) -> torch.Tensor:
        """(frames, frames) mask of a sequence computed at once."""
        position = torch.arange(frames, device=device)
        return self.allows(position, position)

    def first_needed(self, block: int) -> int:
        """First block beyond the prefix that queries in `block` and later ones can see."""
        if self.left_blocks < 0:
            return self.prefix_blocks
        return max(self.prefix_blocks, block - self.left_blocks)


def attention_bias(allowed: torch.Tensor) -> torch.Tensor:
    """Bias of attention scores, float32: 0 where allowed, else so little that softmax gives zero.

    Attention takes the bool mask as well, but would then do this anew in every layer and step: 4 %
    of a chunk's time.
    Minus infinity is avoided: a query that may see nothing, in padding, would give NaN, and float16
    ends at 65504.
    """
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, _NEVER)


def guided_mask(
    mask: Mask, frames: int, block_frames: int, device: torch.device | None = None
) -> torch.Tensor:
    """Mask (frames, frames) of a layer with guided attention: rows are queries; the first frame
    starts a block.
    """
    block = torch.arange(frames, device=device) // block_frames
    before, after = SEES[mask]
    distance = block[None, :] - block[:, None]
    return (distance >= -before) & (distance <= after)


def guided_biases(
    attention: GuidedAttention, frames: int, block_frames: int, device: torch.device | None = None
) -> tuple[torch.Tensor, ...]:
    """Biases of the attention scores of every layer, each (frames, frames)."""
    biases = {
        mask: attention_bias(guided_mask(mask, frames, block_frames, device))
        for mask in set(attention.layers)
    }
    return tuple(biases[mask] for mask in attention.layers)
