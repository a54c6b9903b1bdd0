"""Attention with relative positions over keys and values in pages, for the conformer encoder.

A score is the sum of two products: of query and key, and of the query in the space of sinusoids and
the sinusoids of the key's position. The second product depends on the distance of the two positions
alone, although both factors hold absolute positions. So no table of distances is needed, and a
stream may be of any length. All programs of a layer read the same sinusoids.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from token2wav.cache.paged_kv_cache import LayerView
from token2wav.kernels.block_table import (
    HEADER,
    NUM_PAGES,
    OF_A_BATCH,
    PROMPT_PADDING,
    VALID,
    rows_of,
)

# Tiles that keep everything in registers, compiled for compute capabilities 8.0, 9.0 and 10.0.
_QUERIES, _KEYS, _WARPS, _STAGES = 16, 32, 4, 2
_LEAST = tl.constexpr(-1.0e30)  # finite, so that a row without keys so far gives no NaN
_LOG2_E = 1 / math.log(2)


@triton.jit(do_not_specialize=OF_A_BATCH)
def _relative_attention(
    queries,  # (blocks, POSITIONS, HEADS * DIM)
    by_position,  # (HEADS, blocks, POSITIONS, HEADS * DIM)
    bias,  # (HEADS, DIM)
    keys,  # (pages, POSITIONS, HEADS * DIM)
    values,
    sinusoids,
    out,  # (blocks, POSITIONS, HEADS * DIM)
    table,
    blocks,
    width,
    scale,
    RATE: tl.constexpr,
    POSITIONS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    first, head, block = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    header = table + block * width
    valid, visible_pages, start = (
        RATE * tl.load(header + VALID),
        tl.load(header + NUM_PAGES),
        RATE * tl.load(header + PROMPT_PADDING),
    )

    column = tl.arange(0, DIM)
    position = first + tl.arange(0, QUERIES)
    query_mask = position < valid
    row = (block * POSITIONS + position).to(tl.int64)[:, None] * (HEADS * DIM)
    query = tl.load(
        queries + row + (head * DIM + column)[None, :], mask=query_mask[:, None], other=0.0
    )
    query += tl.load(bias + head * DIM + column)[None, :]
    head_queries = by_position + head.to(tl.int64) * blocks * POSITIONS * (HEADS * DIM) + row

    most = tl.full((QUERIES,), _LEAST, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, DIM), tl.float32)
    # All positions of a block attend to the same keys: from the first one after the prompt padding
    # to the valid ones of the last page.
    stop = tl.where(first < valid, (visible_pages - 1) * POSITIONS + valid, 0)
    for begin in range(start, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        index, first_index = key // POSITIONS, begin // POSITIONS
        page = tl.zeros_like(index)
        # A page is looked up once. A tile may begin with the last position of a page.
        for part in tl.static_range((KEYS + POSITIONS - 2) // POSITIONS + 1):
            page_index = first_index + part
            entry = header + HEADER + page_index
            found = tl.load(entry, mask=page_index * POSITIONS < stop, other=0)
            page = tl.where(index == page_index, found, page)
        page = page.to(tl.int64)
        visible = key < stop
        key_offset = (page * POSITIONS + key % POSITIONS)[:, None] * (HEADS * DIM)
        at = key_offset + (head * DIM + column)[None, :]

        # Zeros where keys are not visible, because a page may hold any value there.
        k = tl.load(keys + at, mask=visible[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="tf32x3")
        for part in range(0, HEADS * DIM, DIM):
            q = tl.load(
                head_queries + (part + column)[None, :], mask=query_mask[:, None], other=0.0
            )
            s = tl.load(
                sinusoids + key_offset + (part + column)[None, :], mask=visible[:, None], other=0.0
            )
            scores = tl.dot(q, tl.trans(s), scores, input_precision="tf32x3")
        scores = tl.where(visible[None, :], scores * scale, _LEAST)
        higher = tl.maximum(most, tl.max(scores, axis=1))
        # 0 where a key is not visible, because the first keys are always visible
        weight = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        v = tl.load(values + at, mask=visible[:, None], other=0.0)
        result = result * shrink[:, None] + tl.dot(weight, v, input_precision="tf32x3")
        most = higher

    result = tl.where(query_mask, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)[:, None] * result
    tl.store(
        out + row + (head * DIM + column)[None, :], result, mask=(position < POSITIONS)[:, None]
    )


def relative_attention(
    queries: torch.Tensor,
    by_position: torch.Tensor,
    bias: torch.Tensor,
    view: LayerView,
    sinusoids: torch.Tensor,
    table: torch.Tensor,
    rate: int,
) -> torch.Tensor:
    """Computes attention of every block over its pages, all in float32. The keys, values and
    sinusoids of the block itself must be in their page already.

    Args:
        queries: (blocks, positions, heads * dim) projections, contiguous.
        by_position: (heads, blocks, positions, heads * dim) queries of every head in the space of
            sinusoids, contiguous.
        bias: (heads, dim), which is added to the queries in their product with keys.
        view: view of a layer of the encoder's cache.
        sinusoids: (pages, positions, heads * dim) sinusoids of the positions in pages.
        table: block table of the batch in tokens, see `execution/block_table.py`.
        rate: positions per token.

    Returns:
        (blocks, positions, heads * dim), zeros in padding.
    """
    assert queries.is_contiguous()
    assert by_position.is_contiguous()
    blocks, positions, _ = queries.shape
    heads, dim = bias.shape
    keys, values, _, _ = view.parts
    out = torch.empty_like(queries)
    grid = (triton.cdiv(positions, _QUERIES), heads, blocks)
    _relative_attention[grid](
        queries,
        by_position,
        bias,
        keys,
        values,
        sinusoids,
        out,
        *rows_of(table),
        _LOG2_E / math.sqrt(dim),
        RATE=rate,
        POSITIONS=positions,
        HEADS=heads,
        DIM=dim,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
