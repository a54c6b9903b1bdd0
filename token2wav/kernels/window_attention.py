"""Attention with a sliding window (`WindowAttention`). One launch rotates queries and keys, stores
keys and values, and attends.

The keys and values of a stream are a ring buffer (*ring*) in the state store. The kernel uses the
ring where it is stored. A CUDA graph has fixed addresses, and streams come and go, so the kernel
reads the address of each ring from a tensor.

A long step is computed in parts. A ring has room for the new positions of a part, and for the whole
window of its first position. So no program overwrites a key that another one reads.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from token2wav.layers.streaming import StatesInPlace

# Queries of a program, and keys of an iteration. A step has few queries, so its time is that of
# reading keys.
_QUERIES, _WARPS = 16, 4
MOST_CHANNELS = 256  # of a head; the keys of an iteration must fit into shared memory
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
def _attended(q, k, v, visible, highest, total, result):
    """Adds keys and values to a running softmax: its highest scores, sums and results.

    In the first call, every query must attend to at least one key. Otherwise its highest score
    stays -inf, and -inf minus -inf is NaN.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weight = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(highest - higher)
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
    position_row = tl.where(rows == 1, 0, stream) * times + start
    # Positions count from the first one of the part. Those of a stream, and even more those of the
    # scratch slot, may exceed 32 bits.
    first = tl.load(positions + position_row)
    first_slot = (first % ring).to(tl.int32)
    past = tl.minimum(first, window - 1).to(tl.int32)  # old keys of a window
    # torch aligns each ring to more than 16 elements.
    stored = rings + tl.multiple_of(tl.load(offsets + stream), 16) + head * DIM
    stored_values = stored + ring * (HEADS * DIM)

    # Heads of queries that share a head of keys are further queries.
    query = tile * QUERIES + tl.arange(0, QUERIES)
    inside = query < count * SHARED
    time = tl.minimum(query // SHARED, count - 1)
    query_head = head * SHARED + query % SHARED
    queries += stream * query_stream + ((start + time) * query_time + query_head * DIM)[:, None]
    query_mask = inside[:, None] & present
    angle = (position_row + time)[:, None]
    q = _rotated(queries, cos, sin, angle, channel, query_mask, DIM) * scale

    highest = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, DIM_UP), tl.float32)

    # The new keys come first: each query attends at least to its own.
    new = tl.arange(0, NEW)
    new_time = (start + new)[:, None]
    new_mask = (new < count)[:, None] & present
    angle = (position_row + new)[:, None]
    keys += stream * key_stream + new_time * key_time + head * DIM
    values += stream * value_stream + new_time * value_time + head * DIM
    new_keys = _rotated(keys, cos, sin, angle, channel, new_mask, DIM)
    new_values = tl.load(values + channel, mask=new_mask, other=0.0)
    if tile == 0:
        slot = ((first_slot + new) % ring)[:, None] * (HEADS * DIM) + channel
        tl.store(stored + slot, new_keys, mask=new_mask)
        tl.store(stored_values + slot, new_values, mask=new_mask)
    distance = time[:, None] - new[None, :]
    visible = (distance >= 0) & (distance < window)
    highest, total, result = _attended(q, new_keys, new_values, visible, highest, total, result)

    # the oldest key that the first query of the tile attends to
    oldest = tl.maximum(tile * QUERIES // SHARED - window + 1, -past)
    for begin in range(oldest, 0, KEYS):
        position = begin + tl.arange(0, KEYS)
        old = position < 0
        key_mask = old[:, None] & present
        at = ((first_slot + ring + position) % ring)[:, None] * (HEADS * DIM) + channel
        k = tl.load(stored + at, mask=key_mask, other=0.0)
        v = tl.load(stored_values + at, mask=key_mask, other=0.0)
        in_window = time[:, None] - position[None, :] < window
        highest, total, result = _attended(
            q, k, v, old[None, :] & in_window, highest, total, result
        )
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
    width = max(_NARROWEST, triton.next_power_of_2(dim))
    assert width <= MOST_CHANNELS
    # Numbers for less than 99 KiB of shared memory, which all GPUs of capability 8.0 or more have.
    key_count, stages = (64, 3) if width <= 64 else (32, 2)
    part_length = ring - window + 1  # positions that a ring has room for besides a window
    for start in range(0, times, part_length):
        count = min(part_length, times - start)
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
            _LOG2_E / math.sqrt(dim),  # the softmax has powers of 2
            HEADS=heads,
            SHARED=shared,
            DIM=dim,
            DIM_UP=width,
            QUERIES=_QUERIES,
            NEW=max(_NARROWEST, triton.next_power_of_2(count)),
            KEYS=key_count,
            num_warps=_WARPS,
            num_stages=stages,
        )
    return out
