"""Attention with a sliding window over rings that stay where they are stored, in one launch: it
rotates queries and keys, stores keys and values in the rings, and attends (`WindowAttention`).

A CUDA graph has fixed addresses, and streams come and go. So a launch reads the place of the ring
of each stream from a tensor.

A ring has room for the new positions of a part of a step besides all that a query attends to. So no
program stores where another one reads, and programs need not wait for each other.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from token2wav.layers.streaming import StatesInPlace

# Queries of a program, and keys of an iteration. Few queries are limited by the bytes of the keys.
_QUERIES, _KEYS, _WARPS, _STAGES = 16, 64, 4, 3
_NARROWEST = 16  # smallest matrix of the tensor cores
_LOG2_E = 1 / math.log(2)


@triton.jit
def _rotated(vectors, cos, sin, angle, channel, mask, DIM: tl.constexpr):
    """Loads vectors and rotates them. A pair is a channel of the first half and one of the second
    half.
    """
    x = tl.load(vectors + channel, mask=mask, other=0.0)
    other = (channel + DIM // 2) % DIM
    partner = tl.load(vectors + other, mask=mask, other=0.0)
    partner = tl.where(channel < DIM // 2, -partner, partner)
    c = tl.load(cos + angle * DIM + channel, mask=mask, other=0.0)
    s = tl.load(sin + angle * DIM + channel, mask=mask, other=0.0)
    return x * c + partner * s


@triton.jit
def _attended(q, k, v, visible, most, total, result):
    """Adds keys and values to a running softmax: its largest scores, sums and results. Each query
    attends to one of the first keys.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, axis=1))
    weight = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(most - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    result = result * shrink[:, None] + tl.dot(weight, v, input_precision="tf32x3")
    return higher, total, result


@triton.jit(do_not_specialize=("times", "rows", "start", "count", "window", "ring"))
def _window_attention(
    queries,  # (streams, times, HEADS * SHARED, DIM), the first two strided
    query_stream,
    query_time,
    keys,  # (streams, times, HEADS, DIM), the first two strided
    key_stream,
    key_time,
    values,
    value_stream,
    value_time,
    cos,  # (rows, times, DIM)
    sin,
    positions,  # (rows, times)
    rings,  # (2, ring, HEADS, DIM) keys and values of the scratch slot
    offsets,  # (streams,) of the ring of each stream from there
    out,  # (streams, times, HEADS * SHARED, DIM)
    times,
    rows,  # streams, or 1 if all streams have the same positions
    start,  # first time of the part
    count,  # times of the part
    window,
    ring,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # heads of queries for each head of keys
    DIM: tl.constexpr,
    DIM_UP: tl.constexpr,
    QUERIES: tl.constexpr,
    NEW: tl.constexpr,  # a power of two, at least `count`
    KEYS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    stream = tl.program_id(2).to(tl.int64)
    channel = tl.arange(0, DIM_UP)[None, :]
    present = channel < DIM
    table = tl.where(rows == 1, 0, stream) * times + start
    first = tl.load(positions + table).to(tl.int32)  # position of the first time of the part
    stored = rings + tl.multiple_of(tl.load(offsets + stream), 16) + head * DIM
    stored_values = stored + ring * (HEADS * DIM)

    # Heads that share their keys are further queries.
    query = tile * QUERIES + tl.arange(0, QUERIES)
    inside = query < count * SHARED
    time = tl.minimum(query // SHARED, count - 1)
    query_head = head * SHARED + query % SHARED
    queries += stream * query_stream + ((start + time) * query_time + query_head * DIM)[:, None]
    query_mask = inside[:, None] & present
    angle = (table + time)[:, None]
    q = _rotated(queries, cos, sin, angle, channel, query_mask, DIM) * scale

    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, DIM_UP), tl.float32)

    # The new keys come first: each query attends at least to its own.
    new = tl.arange(0, NEW)
    new_time = (start + new)[:, None]
    new_mask = (new < count)[:, None] & present
    angle = (table + new)[:, None]
    keys += stream * key_stream + new_time * key_time + head * DIM
    values += stream * value_stream + new_time * value_time + head * DIM
    new_keys = _rotated(keys, cos, sin, angle, channel, new_mask, DIM)
    new_values = tl.load(values + channel, mask=new_mask, other=0.0)
    if tile == 0:
        slot = ((first + new) % ring)[:, None] * (HEADS * DIM) + channel
        tl.store(stored + slot, new_keys, mask=new_mask)
        tl.store(stored_values + slot, new_values, mask=new_mask)
    distance = time[:, None] - new[None, :]
    visible = (distance >= 0) & (distance < window)
    most, total, result = _attended(q, new_keys, new_values, visible, most, total, result)

    oldest = tl.maximum(first + tile * QUERIES // SHARED - window + 1, 0)
    for begin in range(oldest, first, KEYS):
        position = begin + tl.arange(0, KEYS)
        old = position < first
        key_mask = old[:, None] & present
        at = (position % ring)[:, None] * (HEADS * DIM) + channel
        k = tl.load(stored + at, mask=key_mask, other=0.0)
        v = tl.load(stored_values + at, mask=key_mask, other=0.0)
        in_window = (first + time)[:, None] - position[None, :] < window
        most, total, result = _attended(q, k, v, old[None, :] & in_window, most, total, result)
    row = ((stream * times + start + time) * HEADS * SHARED + query_head)[:, None]
    tl.store(out + row * DIM + channel, result / total[:, None], mask=query_mask)


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    rings: StatesInPlace,
    window: int,
) -> torch.Tensor:
    """Computes attention of a step, and stores its keys and values.

    Args:
        q: (B, T, query heads, dim_head). The heads of a position follow each other in memory.
        k, v: (B, T, heads, dim_head), as q.
        positions: (B, T) int64, or (1, T) if all streams have the same positions.
        angles: cosines and sines of the positions.
        rings: (2, ring, heads, dim_head) keys and values of each stream.
        window: positions that a position attends to, itself included.

    Returns:
        Attention, in the shape of q.
    """
    streams, times, heads, dim = k.shape
    ring, shared = rings.scratch.shape[1], q.shape[2] // heads
    out = q.new_empty(q.shape)
    assert all(tensor.dtype == torch.float32 for tensor in (q, k, v, rings.scratch))
    assert all(tensor.stride()[2:] == (dim, 1) for tensor in (q, k, v))
    assert all(tensor.is_contiguous() for tensor in (positions, *angles, rings.scratch))
    most = ring - window + 1
    for start in range(0, times, most):
        count = min(most, times - start)
        _window_attention[triton.cdiv(count * shared, _QUERIES), heads, streams](
            q,
            *q.stride()[:2],
            k,
            *k.stride()[:2],
            v,
            *v.stride()[:2],
            *angles,
            positions,
            *rings,
            out,
            times,
            len(positions),
            start,
            count,
            window,
            ring,
            _LOG2_E / math.sqrt(dim),
            HEADS=heads,
            SHARED=shared,
            DIM=dim,
            DIM_UP=max(_NARROWEST, triton.next_power_of_2(dim)),
            QUERIES=_QUERIES,
            NEW=max(_NARROWEST, triton.next_power_of_2(count)),
            KEYS=_KEYS,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
    return out
