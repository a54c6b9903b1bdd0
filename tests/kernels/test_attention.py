"""Attention kernel against torch, where all keys and values that may not be read are NaN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from token2wav.cache.paged_kv_cache import CacheLayout, LayerView, PagedKVCache, Storage
from token2wav.execution.block_table import HEADER, Block, ChunkPlace, blocks_of, frame_positions
from token2wav.kernels import attention
from token2wav.kernels.attention import paged_attention
from token2wav.networks import dit

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("fused_products")
# Sums in another order, and on a GPU products of three parts.
EXACT = 2e-6 if DEVICE.type == "cpu" else 1e-5
HEADS, DIM_HEAD, BLOCK = 3, 16, 18  # heads are no power of two, blocks no multiple of a tile
INNER = HEADS * DIM_HEAD
PAGES = 36


def a_chunk(
    tables: list[list[int]],
    length: int,
    start: int = 0,
    prompt_padding: int = 0,
    *,
    full: bool = False,
) -> ChunkPlace:
    """Returns the place of a chunk of `length` frames."""
    return ChunkPlace(
        start, length, tables, 1, prompt_padding=prompt_padding, full_prompt_attention=full
    )


CHUNKS = {
    "the start of an utterance": a_chunk([[7], [7, 2]], 2 * BLOCK),
    "one block": a_chunk([[9, 4, 0, 11]], BLOCK, 3 * BLOCK),
    "one block that is not full": a_chunk([[9, 5]], 3, BLOCK),
    "a window that moves on": a_chunk([[9, 3, 1], [9, 1, 8], [9, 8, 6]], 2 * BLOCK + 3, 6 * BLOCK),
    "a window that begins to move": a_chunk([[9, 10], [9, 10, 12], [9, 12, 13]], 3 * BLOCK, BLOCK),
    "a window without a prompt": a_chunk([[14], [15], [16]], 3 * BLOCK),
    "a long past": a_chunk(
        [[9, *range(17, 24 + index)] for index in range(7)], 6 * BLOCK + 5, 7 * BLOCK
    ),
    "a prompt under full attention": a_chunk(
        [[31], [31, 32], [31, 32, 33]], 3 * BLOCK, 0, 4, full=True
    ),
}
BLOCKS: list[Block] = [
    block
    for number, chunk in enumerate(CHUNKS.values())
    for block in blocks_of(chunk, number, BLOCK)
]
ROWS = len(BLOCKS) + 1  # the last row holds no block


def a_table() -> torch.Tensor:
    table = torch.full((ROWS, HEADER + 16), 99, dtype=torch.int32)
    table[len(BLOCKS), :HEADER] = 0
    for row, block in zip(table, BLOCKS, strict=False):
        row[: len(block.row)] = torch.tensor(block.row)
    return table.to(DEVICE)


def filled(cache: PagedKVCache) -> LayerView:
    """Fills all pages with random keys and values, and all frames that no block attends to with NaN
    or, if the storage has no NaN, with scales that are NaN.
    """
    view, generator = cache.layer(0, 0), torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, PAGES, BLOCK, INNER, generator=generator).to(DEVICE) for _ in range(2))
    view.write(cache.index(list(range(PAGES))), k, v)
    seen = torch.zeros(PAGES + 2, BLOCK, dtype=torch.bool)  # two pages are for padding
    for block in BLOCKS:
        pages = block.chunk_pages or block.pages
        seen[pages[-1], : block.valid] = True
        seen[pages[:-1]] = True
    for block in BLOCKS:
        seen[(block.chunk_pages or block.pages)[0], : block.prompt_padding] = False
    if cache.layout.storage == "float8":
        view.data.view(torch.uint8)[:, :, ~seen] = 0x7F  # NaN
        assert view.scales is not None
        view.scales[:, :, ~seen.any(1)] = torch.nan
    else:
        (view.data if view.scales is None else view.scales)[:, :, ~seen] = torch.nan
    return view


@pytest.mark.parametrize(
    ("tile", "storage", "size"),  # of the queries: scores of up to 1, of 1,000, or all 0
    [
        (attention._WIDE, "float32", 1),
        (attention._WIDE, "float32", 100),
        (attention._WIDE, "float32", 0),
        (attention._NARROW_FLOAT32, "float32", 1),
        (attention._NARROW_FLOAT32, "float32", 100),
        (attention._WIDE, "int8", 1),
        (attention._NARROW, "int8", 1),
        (attention._WIDE, "float8", 1),
        (attention._NARROW, "float16", 1),
    ],
)
def test_attention_reads_exactly_the_frames_of_a_table(
    tile: attention._Tile, storage: Storage, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_tile", lambda *sizes: tile)
    layout = CacheLayout(1, 1, HEADS, DIM_HEAD, BLOCK, storage)
    cache = PagedKVCache(layout, PAGES, DEVICE)
    view, table = filled(cache), a_table()
    cos, sin = dit.RotaryEmbedding(DIM_HEAD).to(DEVICE)(frame_positions(table, BLOCK))
    qkv = size * torch.randn(2 * ROWS, BLOCK, 3 * INNER, device=DEVICE)
    for row, block in enumerate(BLOCKS):
        qkv[row::ROWS, block.valid :] = torch.nan
    output = paged_attention(qkv, view, cos, sin, table).unflatten(0, (2, ROWS))
    queries = dit.rotate_first_head(
        qkv[..., :INNER], cos.repeat(2, 1, 1), sin.repeat(2, 1, 1)
    ).unflatten(0, (2, ROWS))
    names = list(CHUNKS)
    for row, block in enumerate(BLOCKS):
        pages = block.chunk_pages or block.pages
        k, v = view.read(cache.index(pages), (len(pages) - 1) * BLOCK + block.valid)
        q, k, v = (
            x.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for x in (
                queries[:, row, : block.valid],
                k[:, block.prompt_padding :],
                v[:, block.prompt_padding :],
            )
        )
        expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        error = (output[:, row, : block.valid] - expected).abs().max()
        assert error <= max(size, 1) * EXACT, (names[block.chunk], block.before, error)
        assert not output[:, row, block.valid :].any()
    assert not output[:, len(BLOCKS) :].any()


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("storage", ["int8", "float8"])
@pytest.mark.parametrize("tile", [attention._WIDE, attention._NARROW])
def test_scales_of_pages_are_not_rounded_to_float16(
    tile: attention._Tile, storage: Storage, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only weights and results are rounded, as with pages in float16: 4e-4 for scores of this size.

    When keys and values were multiplied by their scales in float16, the error was 1e-3. Weights
    times the scale of small values are rounded more if they are not multiplied by `_SCALE_UNIT`.
    """
    monkeypatch.setattr(attention, "_tile", lambda *sizes: tile)
    count, [block] = 8, blocks_of(a_chunk([list(range(8))], BLOCK, 7 * BLOCK), 0, BLOCK)
    cache = PagedKVCache(CacheLayout(1, 1, HEADS, DIM_HEAD, BLOCK, storage), count, DEVICE)
    view, pages = cache.layer(0, 0), cache.index(list(range(count)))
    k, v = (torch.randn(2, count, BLOCK, INNER, device=DEVICE) for _ in range(2))
    view.write(pages, 4 * k, size * v)
    table = torch.tensor([block.row], dtype=torch.int32, device=DEVICE)
    cos, sin = torch.ones(1, BLOCK, DIM_HEAD, device=DEVICE), torch.zeros(1, BLOCK, DIM_HEAD)
    queries = torch.randn(2, BLOCK, 3 * INNER, device=DEVICE).half()
    output = paged_attention(queries, view, cos, sin.to(DEVICE), table)
    parts = queries[..., :INNER].float(), *view.read(pages, count * BLOCK)
    q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in parts)
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    error = (output.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= 6e-4


@pytest.mark.parametrize(
    ("rows", "dtype", "tile"),
    [
        (4, torch.float16, "_NARROW"),
        (4, torch.float32, "_NARROW_FLOAT32"),
        (8, torch.float16, "_WIDE"),
        (8, torch.float32, "_WIDE"),
    ],
)
def test_tiles_fit_the_batch(rows: int, dtype: torch.dtype, tile: str) -> None:
    assert attention._tile(50, 16, rows, dtype) == getattr(attention, tile)
