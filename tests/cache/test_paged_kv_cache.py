"""Tensors of the pages: reads in place, scales, and bytes of a page."""

from __future__ import annotations

import pytest
import torch

from token2wav.cache.encoder_cache import EncoderCache, page_bytes
from token2wav.cache.paged_kv_cache import BRANCHES, CacheLayout, PagedKVCache, Storage
from token2wav.layers.streaming import KeyValueSpec


def a_layout(storage: Storage) -> CacheLayout:
    return CacheLayout(steps=2, layers=2, heads=2, dim_head=8, block_frames=4, storage=storage)


def test_pages_that_follow_one_another_are_read_in_place() -> None:
    store = PagedKVCache(a_layout("float32"), 6, torch.device("cpu"))
    data = store.layer(1, 0).data
    for pages, in_place in (([2, 3], True), ([3, 2], False)):
        k, _ = store.layer(1, 0).read(store.index(pages), 7)
        assert (data.data_ptr() <= k.data_ptr() < data.data_ptr() + data.nbytes) == in_place


@pytest.mark.parametrize("whole_pages", [True, False])
def test_frames_behind_the_valid_ones_have_no_effect_on_a_scale(whole_pages: bool) -> None:
    """float8 has one scale for all frames of a page, and a block may not fill its page."""
    valid, pages = torch.tensor([4, 1, 2]), torch.tensor([5, 0, 2])
    entries = torch.randn(2, 2, BRANCHES, 3, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    contents = []
    for padding in (0.0, 1e6, torch.nan):
        store = PagedKVCache(a_layout("float8"), 6, torch.device("cpu"))
        for row, frames in enumerate(valid.tolist()):
            entries[:, :, :, row, frames:] = padding
        if whole_pages:
            store.scatter(1, pages, entries, valid)
        else:
            for layer in range(2):
                k, v = entries[layer].flatten(4)
                store.layer(1, layer).write(pages, k, v, valid)
        buffer = torch.empty_like(entries)
        store.gather(1, pages, buffer)
        contents.append(
            [buffer[:, :, :, row, :frames] for row, frames in enumerate(valid.tolist())]
        )
    for row, frames in enumerate(valid.tolist()):
        expected = entries[:, :, :, row, :frames]
        assert ((contents[0][row] - expected).abs() <= 2**-4 * expected.abs() + 1e-4).all()
        assert torch.equal(contents[0][row], contents[1][row])
        assert torch.equal(contents[0][row], contents[2][row])


def test_bytes_of_a_page_of_an_encoder_equal_the_bytes_of_its_tensors() -> None:
    """Two layers have the rate of the tokens, and one has two positions for each token."""
    specs = [KeyValueSpec(layers=2, size=4, rate=1), KeyValueSpec(layers=1, size=6, rate=2)]
    cache = EncoderCache(specs, 5, 24, torch.device("cpu"))
    tensors = [cache.layer(layer).data for layer in range(3)]
    tensors += [cache.sinusoids(rate) for rate in (1, 2)]
    assert page_bytes(specs, 5) == cache.page_bytes
    assert sum(tensor.nbytes for tensor in tensors) == (24 + 2) * cache.page_bytes  # 2 for padding
