"""Cached keys and values: written values are read back, and the error of smaller types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.stages.rig import MEL, Parts, flow_mel
from tests.support.utterances import Mel, a_voice, off, portions, some_tokens
from token2wav import StreamConfig
from token2wav.cache.paged_kv_cache import BRANCHES, CacheLayout, PagedKVCache, Storage

STORAGES: list[Storage] = ["float32", "float16", "int8", "float8"]
# Error of a value relative to the largest of its vector: half a unit of 11 bits of mantissa, half a
# step of 127, half a unit of 4 bits of mantissa.
ROUNDING = {"float32": 0.0, "float16": 2**-11, "int8": 0.5 / 127 * 1.001, "float8": 2**-4}
# Of the mel, relative to its deviation; measured 5.6e-5, 1.3e-3 and 7.0e-3.
ERROR = {"float32": 5e-6, "float16": 1.5e-4, "int8": 3e-3, "float8": 1.5e-2}
# Chunks of other lengths round sums differently, and a value beside a rounding step of the storage
# then moves by a whole step. In double precision the chunks make no difference (4e-15); measured in
# single 3e-6 and 3e-5.
CHUNKING = {"float32": 5e-6, "float16": 1e-5, "int8": 1e-4, "float8": 1e-3}


def a_layout(storage: Storage) -> CacheLayout:
    return CacheLayout(steps=2, layers=2, heads=2, dim_head=8, block_frames=4, storage=storage)


def values(frames: int, seed: int) -> torch.Tensor:
    return torch.randn(BRANCHES, frames, 16, generator=torch.Generator().manual_seed(seed))


def relative_rms(error: Mel, reference: Mel) -> float:
    return float(np.sqrt(np.square(error).mean()) / reference.std())


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
            k, v = (values(4 * len(pages), 10 * step + 2 * layer + which) for which in (0, 1))
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
    given = torch.randn(2, 2, BRANCHES, 3, 4, 2, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for padding in (0.0, 1e6, torch.nan):
        store = PagedKVCache(a_layout("float8"), 6, torch.device("cpu"))
        for row, frames in enumerate(valid.tolist()):
            given[:, :, :, row, frames:] = padding
        if whole_pages:
            store.scatter(1, pages, given, valid)
        else:
            for layer in range(2):
                k, v = given[layer].flatten(4)
                store.layer(1, layer).write(pages, k, v, valid)
        got = torch.empty_like(given)
        store.gather(1, pages, got)
        found.append([got[:, :, :, row, :frames] for row, frames in enumerate(valid.tolist())])
    for row, frames in enumerate(valid.tolist()):
        wanted = given[:, :, :, row, :frames]
        assert ((found[0][row] - wanted).abs() <= 2**-4 * wanted.abs() + 1e-4).all()
        assert torch.equal(found[0][row], found[1][row])
        assert torch.equal(found[0][row], found[2][row])


@pytest.mark.parametrize("storage", STORAGES)
def test_mel_is_close_and_hardly_depends_on_the_chunks(parts: Parts, storage: Storage) -> None:
    voice, tokens = a_voice(41), some_tokens(210)
    growing = flow_mel(parts, parts.incremental(storage=storage), [tokens], voice)
    by_block = StreamConfig(first_tokens=0, max_hop_tokens=25)
    fixed = flow_mel(
        parts, parts.incremental(storage=storage), portions(tokens, [9]), voice, by_block
    )
    whole = parts.whole(tokens, voice)
    assert relative_rms(growing - whole, whole) <= ERROR[storage]
    assert relative_rms(growing - fixed, whole) <= CHUNKING[storage]
    if storage == "float32":
        assert off(growing, fixed) <= MEL
