"""Cache of an encoder: a chunk attends to itself and to the visible past of its stream."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from token2wav.cache.block_pool import BlockPool, PrefixCache, StreamBlocks
from token2wav.cache.encoder_cache import EncoderCache, EncoderContext, page_bytes
from token2wav.config.block_grid import BlockGrid
from token2wav.layers.streaming import KeyValueSpec

BLOCK, PAGES, TOKENS = 5, 24, 33
# two layers at the rate of the tokens, then a layer with two positions for each token
SPECS = [KeyValueSpec(layers=2, size=4, rate=1), KeyValueSpec(layers=1, size=6, rate=2)]
LAYERS = [(1, 4), (1, 4), (2, 6)]  # rate and size of each layer
GRIDS = {
    "all of the past": BlockGrid(BLOCK),
    "a prompt": BlockGrid(BLOCK, prompt=12, prefix=10),
    "a window": BlockGrid(BLOCK, prefix=BLOCK, left_blocks=1),
    "padding": BlockGrid(
        BLOCK, prompt=8, prefix=8, prompt_padding=2, full_prompt_attention=True, left_blocks=2
    ),
}


@pytest.fixture
def cache() -> EncoderCache:
    """Cache whose pages begin as NaN."""
    cache = EncoderCache(SPECS, BLOCK, PAGES, torch.device("cpu"))
    for layer in range(len(LAYERS)):
        cache.layer(layer).data.fill_(torch.nan)
    return cache


def keys_and_values(layer: int, seed: int) -> list[torch.Tensor]:
    """Draws the keys and values (1, positions, size) of all tokens of a stream, for a layer."""
    rate, size = LAYERS[layer]
    random = torch.Generator().manual_seed(10 * seed + layer)
    return [torch.randn(1, rate * TOKENS, size, generator=random) for _ in range(2)]


@pytest.mark.parametrize("stops", [(5, 10, 15, 20, 25, 30), (15, 30), (10,)], ids=str)
@pytest.mark.parametrize("name", GRIDS)
def test_a_chunk_gets_what_its_first_block_sees(
    cache: EncoderCache, name: str, stops: tuple[int, ...]
) -> None:
    """Two streams take turns. Their pages are not in order."""
    grid = GRIDS[name]
    pool: PrefixCache[Any] = PrefixCache(BlockPool(PAGES))
    pool.pool.release([pool.take(3)[1]])
    streams = [StreamBlocks(pool, [], grid) for _ in range(2)]
    ends = {stop - grid.prompt_padding for stop in stops if stop > grid.prefix}
    for start, stop in itertools.pairwise(sorted({0, grid.prefix, *ends, TOKENS})):
        for seed, blocks in enumerate(streams):
            if start and start == grid.prefix:
                blocks = streams[seed] = StreamBlocks(pool, blocks.pages, grid)
            tables = blocks.extend(grid.block_count(start, stop))
            context = EncoderContext(cache, grid, start, stop - start, tables)
            spans = [*grid.visible_spans(start), (start, stop)]
            for layer, (rate, _) in enumerate(LAYERS):
                written = keys_and_values(layer, seed)
                k, v = (value[:, rate * start : rate * stop] for value in written)
                for value, whole in zip(context.attend(layer, k, v), written, strict=True):
                    visible = [whole[:, rate * first : rate * last] for first, last in spans]
                    assert torch.equal(value, torch.cat(visible, dim=1))
            if stop > grid.prefix:
                blocks.forget_unseen()


def test_bytes_of_a_page_equal_the_bytes_of_its_tensors(cache: EncoderCache) -> None:
    tensors = [cache.layer(layer).data for layer in range(len(LAYERS))]
    tensors += [cache.sinusoids(rate) for rate in (1, 2)]
    shapes = {tensor.shape for tensor in tensors[-2:]}
    assert shapes == {(PAGES + 2, BLOCK, 4), (PAGES + 2, 2 * BLOCK, 6)}  # two are for padding
    assert page_bytes(SPECS, BLOCK) == cache.page_bytes
    assert sum(tensor.nbytes for tensor in tensors) == (PAGES + 2) * cache.page_bytes


def test_an_encoder_without_attention_needs_no_pages() -> None:
    cache = EncoderCache([], BLOCK, PAGES, torch.device("cpu"))
    assert cache.page_bytes == 0
    context = EncoderContext(cache, BlockGrid(BLOCK), 0, 7, [])
    assert (context.start, context.past) == (0, [])
