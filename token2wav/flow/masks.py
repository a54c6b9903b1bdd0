"""Attention masks of the estimator."""

from __future__ import annotations

import torch


def chunk_causal_mask(frames: int, block_frames: int, device: torch.device | None = None) -> torch.Tensor:
    """Who may look at whom while streaming: every frame sees all blocks up to the end of its own.

    Frames count from the start of the prompt, so that a frame sees the same keys in every call.

    Args:
        frames: length of the sequence.
        block_frames: frames of one attention block.
        device: where the mask is made.

    Returns:
        (frames, frames) bool; rows are queries, columns keys, True where attention is allowed.
    """
    position = torch.arange(frames, device=device)
    block_end = (position // block_frames + 1) * block_frames
    return position[None, :] < block_end[:, None]
