"""Every kernel against the same arithmetic in torch, on shapes that fill no tile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from token2wav.engines.paged_batch import fill_table
from token2wav.engines.work import ChunkWork, Past
from token2wav.flow import dit
from token2wav.flow.cache import CacheLayout, KeyValueStore, Storage
from token2wav.flow.masks import BlockMask
from token2wav.kernels import attention, chunk_table
from token2wav.kernels.attention import paged_attention
from token2wav.kernels.cache_writes import store_keys_values
from token2wav.kernels.norms import gated_norm, modulated_norm
from token2wav.kernels.position_convolution import PositionConvolution

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []  # where there is one, among the tests that it must pass
# Of values around 1: sums in another order, and on a GPU products of three parts, which no GPU has been asked yet.
EXACT = 2e-6 if DEVICE.type == "cpu" else 1e-5
# Of keys and values that are rounded to what the store keeps: the widest step between two numbers around 3.
STEP = {"float32": 1e-6, "float16": 2e-3, "int8": 2e-2}
HEADS, DIM_HEAD, BLOCK = 3, 16, 10  # heads are no power of two, blocks no multiple of a tile
INNER = HEADS * DIM_HEAD
PAGES = 12


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(dim: int, dtype: torch.dtype) -> None:
    x, h = 3 * random(2, 3, dim) + 1, random(2, 3, dim).to(dtype)
    gate, shift, scale = (random(dim) for _ in range(3))
    tolerance = EXACT if dtype == torch.float32 else 1e-2
    found = modulated_norm(x, shift, scale, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), dit.modulated_norm(x, shift[None], scale[None]), atol=tolerance, rtol=tolerance
    )
    summed = x + gate * h.float()
    found = gated_norm(x, h, gate, shift, scale)
    torch.testing.assert_close(x, summed, atol=EXACT, rtol=EXACT)
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), dit.modulated_norm(summed, shift[None], scale[None]), atol=tolerance, rtol=tolerance
    )


def a_work(start: int, frames: int, past: Sequence[tuple[int, int]], prefix: int, new: list[int]) -> ChunkWork:
    """A chunk of which only place and pages matter; `past` has blocks and their pages."""
    nothing = torch.empty(1, frames)
    seen = Past([block for block, _ in past], [page for _, page in past], prefix)
    return ChunkWork(nothing, nothing, nothing, nothing, start, seen, new, nothing)


WORKS = [
    a_work(0, 2 * BLOCK, [], 0, [7, 2]),
    a_work(4 * BLOCK, BLOCK + 3, [(0, 9), (1, 4), (2, 0), (3, 5)], 2, [11, 1]),
]
STREAMS, FRAMES = 3, 2 * BLOCK + 4  # room for one more, and for more frames


def a_table() -> torch.Tensor:
    table = np.full((STREAMS, chunk_table.table_width(8)), 99, np.int32)
    fill_table(table, WORKS, BLOCK)
    return torch.tensor(table, device=DEVICE)


def angles(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dit.RotaryEmbedding(DIM_HEAD).to(DEVICE)(chunk_table.positions(table, FRAMES))


def a_store(storage: Storage) -> KeyValueStore:
    return KeyValueStore(CacheLayout(1, 1, HEADS, DIM_HEAD, BLOCK, storage), PAGES, DEVICE)


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_keys_and_values_are_stored_in_the_pages_of_their_chunk(storage: Storage) -> None:
    store, table = a_store(storage), a_table()
    pages = store.layer(0, 0)
    for tensor in (pages.keys, pages.values):
        tensor.fill_(77)
    qkv, (cos, sin) = random(2 * STREAMS, FRAMES, 3 * INNER), angles(table)
    store_keys_values(qkv, pages, cos, sin, table)
    _, keys, values = qkv.chunk(3, dim=2)
    keys = dit.rotate_first_head(keys, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))
    for stream, work in enumerate(WORKS):
        for branch in range(2):
            row = branch * STREAMS + stream
            found = store.read(0, 0, store.index(work.new))
            for wanted, kept in zip((keys, values), found, strict=True):
                assert (kept[branch, : work.frames] - wanted[row, : work.frames]).abs().max() <= STEP[storage]
                assert not kept[branch, work.frames :].any(), "the rest of a last block"
    untouched = sorted(set(range(PAGES)) - {page for work in WORKS for page in work.new})
    assert (pages.keys[:, untouched] == 77).all()
    assert (pages.values[:, untouched] == 77).all()


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("left_blocks", "wide"), [(-1, False), (-1, True), (0, False), (1, True)])
def test_attention_reads_pages(storage: Storage, left_blocks: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_ENOUGH_PROGRAMS", 1 if wide else 1 << 30)
    store, table = a_store(storage), a_table()
    pages, (cos, sin) = store.layer(0, 0), angles(a_table())
    held = [page for work in WORKS for page in (*work.past.pages, *work.new)]
    store.write(0, 0, store.index(held), *(random(2, len(held) * BLOCK, INNER) for _ in range(2)))
    qkv = random(2 * STREAMS, FRAMES, 3 * INNER)
    found = paged_attention(qkv, pages, cos, sin, table, left_blocks).unflatten(0, (2, STREAMS))
    queries = dit.rotate_first_head(qkv[..., :INNER], cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))
    for stream, work in enumerate(WORKS):
        own = [work.start // BLOCK, work.start // BLOCK + 1]
        keys = torch.cat([torch.arange(BLOCK) + block * BLOCK for block in (*work.past.blocks, *own)])
        end = work.start + work.frames
        mask = BlockMask(BLOCK, left_blocks, work.past.prefix_blocks)
        allowed = mask.allows(torch.arange(work.start, end), keys) & (keys < end)
        k, v = store.read(0, 0, store.index([*work.past.pages, *work.new]))
        q = queries.unflatten(0, (2, STREAMS))[:, stream, : work.frames]
        q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.to(DEVICE)).transpose(1, 2).flatten(2)
        assert (found[:, stream, : work.frames] - wanted).abs().max() <= EXACT
        assert not found[:, stream, work.frames :].any()
    assert not found[:, len(WORKS) :].any()


@pytest.mark.parametrize("width", [3, 16])
def test_position_convolution(width: int) -> None:
    groups, taps = 4, 31
    conv = torch.nn.Conv1d(groups * width, groups * width, taps, groups=groups, device=DEVICE).requires_grad_(False)
    conv.weight.mul_(3)
    x, table = 4 * random(2 * STREAMS, FRAMES, groups * width), a_table()
    # As they lie in a batch: of one ODE step and one of two convolutions.
    before, after = (random(STREAMS, 3, 2, 2, groups * width, taps - 1)[:, 1, 1] for _ in range(2))
    untouched = after.clone()
    found = PositionConvolution(conv)(x, before, after, table).unflatten(0, (2, STREAMS))
    for stream, work in enumerate(WORKS):
        own = x.unflatten(0, (2, STREAMS))[:, stream, : work.frames].transpose(1, 2)
        extended = torch.cat((before[stream], own), dim=2)
        wanted = F.mish(conv(extended)).transpose(1, 2)
        torch.testing.assert_close(found[:, stream, : work.frames], wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(after[stream], extended[:, :, -(taps - 1) :])
    assert torch.equal(after[2], before[2]), "a stream that is not there"
    assert not torch.equal(after, untouched)


def test_what_cannot_be_seen_may_be_nan() -> None:
    store, table = a_store("float32"), a_table()
    pages, (cos, sin) = store.layer(0, 0), angles(a_table())
    qkv = random(2 * STREAMS, FRAMES, 3 * INNER)
    for tensor in (pages.keys, pages.values):
        tensor.fill_(torch.nan)
    store.write(0, 0, store.index(WORKS[1].past.pages), *(random(2, 4 * BLOCK, INNER) for _ in range(2)))
    store_keys_values(qkv, pages, cos, sin, table)
    assert torch.isfinite(paged_attention(qkv, pages, cos, sin, table, -1)).all()
