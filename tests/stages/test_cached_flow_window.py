"""Attention to a bounded past: the mask, and streams that release the pages that it hides."""

from __future__ import annotations

import pytest
import torch

from tests.stages.rig import MEL, Parts, flow_mel
from tests.support.utterances import a_voice, off, portions, some_tokens
from token2wav import StreamConfig
from token2wav.config.block_grid import BlockGrid
from token2wav.networks.masks import block_mask

LEFT_BLOCKS = [0, 1, 2, 8]


@pytest.mark.parametrize("left", [-1, *LEFT_BLOCKS])
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("frames", [1, 4, 5, 23])
def test_mask_frame_by_frame(left: int, prefix: int, frames: int) -> None:
    size = 4
    mask = block_mask(BlockGrid(size, prefix=size * prefix, left_blocks=left), frames)
    assert mask.shape == (frames, frames)
    for query in range(frames):
        for key in range(frames):
            query_block, key_block = query // size, key // size
            visible = key_block <= query_block and (
                left < 0 or key_block < prefix or query_block - key_block <= left
            )
            assert bool(mask[query, key]) == visible, f"frame {query} looks at frame {key}"


@pytest.mark.parametrize("left", [-1, *LEFT_BLOCKS])
@pytest.mark.parametrize("prefix", [0, 2])
def test_first_needed_block_is_the_first_that_the_mask_shows(left: int, prefix: int) -> None:
    blocks = 12
    mask = block_mask(BlockGrid(1, prefix=prefix, left_blocks=left), blocks)
    for block in range(prefix, blocks):
        shown = mask[block:, prefix:].any(dim=0).nonzero().flatten() + prefix
        assert BlockGrid(1, prefix=prefix, left_blocks=left).first_needed(block) == int(shown[0])


def test_any_rectangle_is_that_part_of_the_whole() -> None:
    grid = BlockGrid(4, prefix=4, left_blocks=1)
    queries, keys = torch.tensor([9, 17, 18]), torch.tensor([0, 3, 4, 12, 19, 20])
    assert torch.equal(grid.allows(queries, keys), block_mask(grid, 21)[queries][:, keys])


@pytest.mark.parametrize("left_blocks", LEFT_BLOCKS)
@pytest.mark.parametrize("prompt", [0, 75])
def test_streams_equal_the_whole_under_the_mask(
    parts: Parts, left_blocks: int, prompt: int
) -> None:
    stream = StreamConfig(first_tokens=0, left_blocks=left_blocks)
    voice, tokens = a_voice(prompt), some_tokens(180)
    whole = parts.whole(tokens, voice, left_blocks=left_blocks)
    for engine in (
        parts.incremental(left_blocks=left_blocks),
        parts.recompute(left_blocks=left_blocks),
    ):
        assert off(flow_mel(parts, engine, portions(tokens, [17]), voice, stream), whole) <= MEL
    fixed = StreamConfig(first_tokens=0, max_hop_tokens=25, left_blocks=left_blocks)
    assert (
        off(
            flow_mel(parts, parts.incremental(left_blocks=left_blocks), [tokens], voice, fixed),
            whole,
        )
        <= MEL
    )


def test_window_as_long_as_the_utterance_is_exact(parts: Parts) -> None:
    voice, tokens = a_voice(41), some_tokens(160)
    mel = flow_mel(
        parts, parts.incremental(left_blocks=8), [tokens], voice, StreamConfig(left_blocks=8)
    )
    assert off(mel, parts.whole(tokens, voice)) <= MEL


def test_narrow_window_is_an_approximation(parts: Parts) -> None:
    voice, tokens = a_voice(0), some_tokens(160)
    assert off(parts.whole(tokens, voice, left_blocks=1), parts.whole(tokens, voice)) > 1e-2


def test_prompt_stays_in_view(parts: Parts) -> None:
    """Without the prefix, a window of no blocks would limit every block to itself."""
    tokens = some_tokens(160)
    engine = parts.incremental(left_blocks=0)
    stream = StreamConfig(left_blocks=0)
    last = [
        flow_mel(parts, engine, [tokens], a_voice(28, seed), stream)[:, -40:] for seed in (0, 1)
    ]
    assert off(*last) > 1e-2
