"""Block grid of a stream: its arithmetic, and which positions attend to which."""

from __future__ import annotations

from itertools import product

import torch

from token2wav.config.block_grid import BlockGrid
from token2wav.config.model_config import ModelConfig
from token2wav.config.token_format import TokenFormat

LEFT_BLOCKS = (-1, 0, 1, 2, 8)


def test_blocks_are_counted_from_the_prompt() -> None:
    grid = BlockGrid(25, prompt=30, prefix=25)
    assert grid.first_boundary == 50
    assert grid.prefix_blocks == 1
    assert [grid.complete_stop(stop) for stop in (24, 25, 74)] == [0, 25, 50]
    assert [grid.block_count(25, stop) for stop in (26, 50, 51)] == [1, 1, 2]
    padded = BlockGrid(25, prompt=30, prefix=30, prompt_padding=20)
    assert (padded.first_boundary, padded.prefix_blocks) == (30, 2)
    assert padded.complete_stop(40) == 30
    assert padded.scaled(2) == BlockGrid(50, prompt=60, prefix=60, prompt_padding=40)


def test_the_prefix_ends_where_no_later_token_reaches() -> None:
    model = ModelConfig(
        tokens=TokenFormat.numbers(6561),
        sample_rate=24_000,
        samples_per_token=960,
        stages=("flow", "vocoder"),
        block_tokens=25,
        lookahead_tokens=3,
    )
    prefixes = [model.grid(prompt).prefix for prompt in (0, 27, 28, 52, 53)]
    assert prefixes == [0, 0, 25, 25, 50]
    assert model.grid(28, 3) == BlockGrid(25, 28, 25, left_blocks=3)


def test_the_mask_position_by_position() -> None:
    size = 4
    for left, prefix, count in product(LEFT_BLOCKS, (0, 1, 3), (1, 4, 5, 23)):
        grid, positions = BlockGrid(size, prefix=size * prefix, left_blocks=left), range(count)
        mask = grid.allows(torch.arange(count), torch.arange(count))
        for query, key in product(positions, positions):
            query_block, key_block = query // size, key // size
            visible = key_block <= query_block and (
                left < 0 or key_block < prefix or query_block - key_block <= left
            )
            assert bool(mask[query, key]) == visible, f"{grid}: {query} looks at {key}"


def test_visible_blocks_and_spans_are_those_of_the_mask() -> None:
    for left, prefix, block in product(LEFT_BLOCKS, (0, 2), range(12)):
        grid = BlockGrid(1, prefix=prefix, left_blocks=left)
        seen = grid.allows(torch.tensor([block]), torch.arange(12))[0].nonzero().flatten().tolist()
        assert grid.visible_blocks(block) == seen
        spans = [range(*span) for span in grid.visible_spans(block)]
        assert [position for span in spans for position in span] == seen[:-1]


def test_first_needed_block_is_the_first_that_a_later_block_sees() -> None:
    positions = torch.arange(12)
    for left, prefix in product(LEFT_BLOCKS, (0, 2)):
        grid = BlockGrid(1, prefix=prefix, left_blocks=left)
        mask = grid.allows(positions, positions)
        for block in range(prefix, 12):
            shown = mask[block:, prefix:].any(dim=0).nonzero().flatten() + prefix
            assert grid.first_needed(block) == int(shown[0])


def test_full_attention_in_the_prefix() -> None:
    """The last block of the prompt sees as much as the blocks before it, and they see it."""
    grid = BlockGrid(2, prompt=4, prefix=4, full_prompt_attention=True)
    positions = torch.arange(6)
    assert grid.allows(positions, positions).sum(dim=1).tolist() == [4, 4, 4, 4, 6, 6]
