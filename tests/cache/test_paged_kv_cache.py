"""Cached keys and values: written values are read back, up to the rounding of their type."""

from __future__ import annotations

import pytest
import torch

from token2wav.cache.paged_kv_cache import BRANCHES, CacheLayout, PagedKVCache, Storage

STORAGES: list[Storage] = ["float32", "float16", "int8", "float8"]
# Error of a value relative to the largest of its vector: half a unit of 11 bits of mantissa, half a
# step of 127, half a unit of 4 bits of mantissa.
ROUNDING = {"float32": 0.0, "float16": 2**-11, "int8": 0.5 / 127 * 1.001, "float8": 2**-4}


def a_layout(storage: Storage) -> CacheLayout:
    return CacheLayout(steps=2, layers=2, heads=2, dim_head=8, block_frames=4, storage=storage)


def values(frames: int, seed: int) -> torch.Tensor:
    return torch.randn(BRANCHES, frames, 16, generator=torch.Generator().manual_seed(seed))


def assert_close(value: torch.Tensor, reference: torch.Tensor, storage: Storage) -> None:
    assert value.dtype == torch.float32
    vectors = reference.unflatten(-1, (2, 8))
    error = (value.unflatten(-1, (2, 8)) - vectors).abs().amax(-1)
    assert bool((error <= ROUNDING[storage] * vectors.abs().amax(-1)).all())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("pages", [[3], [1, 2, 3], [5, 0, 2], [4, 3]], ids=str)
def test_written_keys_and_values_are_read_back(storage: Storage, pages: list[int]) -> None:
    store = PagedKVCache(a_layout(storage), 6, torch.device("cpu"))
    written = {}
    for step in range(2):
        for layer in range(2):
            k, v = (values(4 * len(pages), 10 * step + 2 * layer + part) for part in (0, 1))
            store.layer(step, layer).write(
                store.index(pages), k.unflatten(1, (-1, 4)), v.unflatten(1, (-1, 4))
            )
            written[step, layer] = k, v
    for (step, layer), (k, v) in written.items():
        view = store.layer(step, layer)
        for value, reference in zip(
            view.read(store.index(pages), 4 * len(pages)), (k, v), strict=True
        ):
            assert_close(value, reference, storage)
        assert torch.equal(
            view.read(store.index(pages), 3)[1], view.read(store.index(pages), 4)[1][:, :3]
        )
        for at, page in enumerate(pages):  # one page at a time, with any pages in between
            assert torch.equal(
                view.read(store.index([page]), 4)[0],
                view.read(store.index(pages), 4 * len(pages))[0].split(4, 1)[at],
            )


def test_pages_that_follow_one_another_are_read_in_place() -> None:
    store = PagedKVCache(a_layout("float32"), 6, torch.device("cpu"))
    data = store.layer(1, 0).data
    for pages, in_place in (([2, 3], True), ([3, 2], False)):
        k, _ = store.layer(1, 0).read(store.index(pages), 7)
        assert (data.data_ptr() <= k.data_ptr() < data.data_ptr() + data.nbytes) == in_place


def test_bytes_of_a_page_equal_the_bytes_of_its_tensors() -> None:
    for storage in STORAGES:
        layout = a_layout(storage)
        store = PagedKVCache(layout, 3, torch.device("cpu"))
        scale = 0 if store._scales is None else store._scales.nbytes
        assert store._data.nbytes + scale == (3 + 2) * layout.page_bytes  # two are for padding


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
