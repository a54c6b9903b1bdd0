"""Attention masks of whole sequences, and the biases that are made from them."""

from __future__ import annotations

from typing import get_args

import torch

from token2wav.config.block_grid import BlockGrid
from token2wav.networks.masks import attention_bias, block_mask, guided_biases, guided_mask
from token2wav.published.sizes import SEES, GuidedAttention, Mask


def test_any_rectangle_is_that_part_of_the_whole() -> None:
    grid = BlockGrid(4, prefix=4, left_blocks=1)
    queries, keys = torch.tensor([9, 17, 18]), torch.tensor([0, 3, 4, 12, 19, 20])
    assert torch.equal(grid.allows(queries, keys), block_mask(grid, 21)[queries][:, keys])


def test_guided_masks_frame_by_frame() -> None:
    for mask in get_args(Mask):
        before, after = SEES[mask]
        allowed = guided_mask(mask, 14, 3)
        for query in range(14):
            for key in range(14):
                distance = key // 3 - query // 3
                assert bool(allowed[query, key]) == (-before <= distance <= after)


def test_scores_that_are_not_allowed_get_no_weight() -> None:
    """Not even in float16, and a query without any key gets no NaN."""
    allowed = torch.tensor([[True, False], [False, False]])
    weights = (torch.randn(2, 2) + attention_bias(allowed)).half().softmax(dim=1)
    assert weights[0].tolist() == [1.0, 0.0]
    assert weights.isfinite().all()


def test_no_frame_sees_behind_the_end_of_its_sequence() -> None:
    attention = GuidedAttention(("forward", "block", "forward"))
    first, second, third = guided_biases(attention, 6, 2, lengths=torch.tensor([3, 6]))
    assert first is third
    assert first.shape == second.shape == (2, 1, 6, 6)
    assert (first[0, 0, :3, 3:] < 0).all()
    assert first[1, 0, 0].tolist() == attention_bias(guided_mask("forward", 6, 2))[0].tolist()
