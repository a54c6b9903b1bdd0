"""Relative attention of the encoder against torch, where everything that may not be read is NaN."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.test_attention import BLOCK, BLOCKS, CHUNKS, PAGES, ROWS, a_table
from token2wav.cache.paged_kv_cache import CacheLayout, PagedKVCache
from token2wav.kernels.relative_attention import relative_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("fused_products")
# Sums in another order, and on a GPU products of three parts.
EXACT = 5e-6 if DEVICE.type == "cpu" else 2e-5
HEADS, DIM = 2, 16
SIZE = HEADS * DIM


@pytest.mark.parametrize("rate", [1, 2])
def test_attention_reads_exactly_the_positions_of_a_table(rate: int) -> None:
    """Pages are shorter than a tile of keys at one rate, and tiles begin anywhere in a page."""
    positions = rate * BLOCK
    layout = CacheLayout(1, 1, 1, SIZE, positions, branches=1)
    view = PagedKVCache(layout, PAGES, DEVICE).layer(0, 0)
    view.data.normal_()
    sinusoids = torch.randn(view.data.shape[2], positions, SIZE, device=DEVICE)
    keys, values = (part[0].flatten(2).clone() for part in view.data)
    all_keys, all_sinusoids = keys.clone(), sinusoids.clone()
    unseen = torch.ones(len(sinusoids), BLOCK, dtype=torch.bool)
    for block in BLOCKS:
        pages = block.chunk_pages or block.pages
        unseen[pages[:-1]] = False
        unseen[pages[-1], : block.valid] = False
    for block in BLOCKS:
        unseen[(block.chunk_pages or block.pages)[0], : block.prompt_padding] = True
    unseen = unseen.repeat_interleave(rate, dim=1).to(DEVICE)
    view.data[:, 0, unseen] = torch.nan
    sinusoids[unseen] = torch.nan
    queries = torch.randn(ROWS, positions, SIZE, device=DEVICE)
    by_position = torch.randn(HEADS, ROWS, positions, SIZE, device=DEVICE)
    for row, block in enumerate(BLOCKS):
        queries[row, rate * block.valid :] = torch.nan
        by_position[:, row, rate * block.valid :] = torch.nan
    bias = torch.randn(HEADS, DIM, device=DEVICE)

    output = relative_attention(queries, by_position, bias, view, sinusoids, a_table(), rate)

    names = list(CHUNKS)
    for row, block in enumerate(BLOCKS):
        pages = block.chunk_pages or block.pages
        seen = slice(rate * block.prompt_padding, rate * ((len(pages) - 1) * BLOCK + block.valid))
        k, v, s = (part[pages].flatten(0, 1)[seen] for part in (all_keys, values, all_sinusoids))
        k, v = (part.unflatten(1, (HEADS, DIM)).transpose(0, 1) for part in (k, v))
        q = queries[row, : rate * block.valid].unflatten(1, (HEADS, DIM)).transpose(0, 1)
        scores = (q + bias[:, None]) @ k.transpose(1, 2)
        scores = scores + by_position[:, row, : rate * block.valid] @ s.T
        expected = ((scores / math.sqrt(DIM)).softmax(-1) @ v).transpose(0, 1).flatten(1)
        error = (output[row, : rate * block.valid] - expected).abs().max()
        assert error <= EXACT, f"{names[block.chunk]}, after {block.before} tokens: {error}"
        assert not output[row, rate * block.valid :].any()
    assert not output[len(BLOCKS) :].any()
