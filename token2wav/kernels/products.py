"""Linear layers fused with the operations on their results: GELU, or the norms of heads, the
rotation, and the storing of keys and values.

A kernel of this file computes each of these layers in one launch. For large products in float16,
cuBLAS is faster: then GELU with tanh is part of the launch of cuBLAS, and the other operations take
a second launch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from token2wav.cache.paged_kv_cache import LayerView
from token2wav.kernels import tiles
from token2wav.kernels.activations import gelu
from token2wav.kernels.block_table import (
    HEADER,
    NUM_CAUSAL_PAGES,
    OF_A_BATCH,
    VALID,
    rows_of,
    sizes_of,
)
from token2wav.kernels.dependent_launch import launch_options, wait_for_earlier_kernel
from token2wav.kernels.key_values import store_vectors
from token2wav.kernels.norms import NormVectors
from token2wav.kernels.tiles import ProductSize

# Tile for pages with one scale for each head (float8). It has as many rows as a block.
_BLOCK_TILE = tiles.Tile(rows=0, outputs=64, inputs=32, warps=4, stages=3)
# Tile for results of cuBLAS. The kernel only normalizes, rotates and stores them.
_STORING_TILE = tiles.Tile(rows=16, outputs=128, inputs=16, warps=4, stages=1)
# Least numbers of rows with which cuBLAS computes a product in float16, by the least number of
# inputs: any number of rows of 1,024 inputs or more, and 800 rows or more of 512 inputs or more.
# For 200 rows of 1,024 inputs cuBLAS took 5.2 us on an H200. These kernels took 7.5 us with GELU,
# and 10.4 us with rotation and stores. For 6,400 rows cuBLAS reached 641 TFLOP/s, and these kernels
# 373 and 402. For 256 inputs, the second launch is expected to cost more than it saves
# (lab/launches/table.py). No GPU has measured cuBLAS inside a layer yet. Sections products and
# first_audio of the GPU report measure it, and these kernels alone.
cublas_rows = {1024: 1, 512: 800}
# Least number of rows with which cuBLAS computes a product, and torch the exact GELU of the result.
# A tile of the kernel holds few rows, because the error function needs many registers.
_EXACT_GELU_ROWS = 1600


def _by_cublas(x: torch.Tensor, rows: int) -> bool:
    """Returns whether cuBLAS computes the product of x (..., inputs) and the weight of a layer."""
    return x.dtype == torch.float16 and any(
        x.shape[-1] >= least_inputs and rows >= least_rows
        for least_inputs, least_rows in cublas_rows.items()
    )


@triton.jit
def _multiply(
    x,  # (rows, INPUTS)
    weight,  # (OUTPUTS, INPUTS)
    bias,
    row,
    output,
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,
    OUTPUTS_OF_TILE: tl.constexpr,
    INPUTS_OF_TILE: tl.constexpr,
):
    """Computes a tile (rows, outputs) of x times the weight, plus the bias, in float32."""
    column = tl.arange(0, INPUTS_OF_TILE)
    row_mask, output_mask = (row < rows)[:, None], (output < OUTPUTS)[:, None]
    whole: tl.constexpr = INPUTS % INPUTS_OF_TILE == 0
    x_pointers = x + row.to(tl.int64)[:, None] * INPUTS + column[None, :]
    weights = weight + output[:, None] * INPUTS + column[None, :]
    result = tl.zeros((ROWS_OF_TILE, OUTPUTS_OF_TILE), tl.float32)
    for begin in range(0, INPUTS, INPUTS_OF_TILE):
        inside = (begin + column < INPUTS)[None, :]
        a = tl.load(x_pointers + begin, mask=row_mask if whole else row_mask & inside, other=0.0)
        b = tl.load(weights + begin, mask=output_mask if whole else output_mask & inside, other=0.0)
        result += tl.dot(a, tl.trans(b), input_precision="tf32x3")
    if bias is not None:
        result += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    return result


@triton.jit(do_not_specialize=("rows",))
def _gelu_product(
    x,
    weight,
    bias,
    out,  # (rows, OUTPUTS)
    rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TANH: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,
    OUTPUTS_OF_TILE: tl.constexpr,
    INPUTS_OF_TILE: tl.constexpr,
):
    wait_for_earlier_kernel()
    row = tl.program_id(0) * ROWS_OF_TILE + tl.arange(0, ROWS_OF_TILE)
    output = tl.program_id(1) * OUTPUTS_OF_TILE + tl.arange(0, OUTPUTS_OF_TILE)
    result = _multiply(
        x,
        weight,
        bias,
        row,
        output,
        rows,
        INPUTS,
        OUTPUTS,
        ROWS_OF_TILE,
        OUTPUTS_OF_TILE,
        INPUTS_OF_TILE,
    )
    out_pointers = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    result = gelu(result, TANH).to(out.dtype.element_ty)
    tl.store(out_pointers, result, mask=(row < rows)[:, None] & (output < OUTPUTS)[None, :])


def gelu_product(x: torch.Tensor, layer: torch.nn.Linear, *, tanh: bool) -> torch.Tensor:
    """Computes gelu(layer(x)).

    Args:
        x: (..., inputs) in the dtype of the layer, contiguous.
        tanh: whether GELU is approximated by tanh.
    """
    assert x.is_contiguous()
    assert layer.weight.is_contiguous()
    outputs, inputs = layer.weight.shape
    rows = x.numel() // inputs
    if not tanh and x.dtype == torch.float16 and rows >= _EXACT_GELU_ROWS:
        return F.gelu(layer(x))
    # On a CPU, `_addmm_activation` computes the exact GELU.
    if tanh and x.device.type != "cpu" and _by_cublas(x, rows):
        # cuBLAS applies GELU with tanh to the sums, in float32, in the same launch.
        flat = x.flatten(0, -2)
        out = torch._addmm_activation(layer.bias, flat, layer.weight.T, use_gelu=True)
        return out.unflatten(0, x.shape[:-1])
    out = x.new_empty(*x.shape[:-1], outputs)
    size = ProductSize(rows, outputs, inputs, x.dtype)
    tile = tiles.choose("gelu" if tanh else "gelu_exact", size, x.device)
    _gelu_product[triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs)](
        x,
        layer.weight,
        layer.bias,
        out,
        rows,
        INPUTS=inputs,
        OUTPUTS=outputs,
        TANH=tanh,
        ROWS_OF_TILE=tile.rows,
        OUTPUTS_OF_TILE=tile.outputs,
        INPUTS_OF_TILE=tile.inputs,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **launch_options(),
    )
    return out


@triton.jit
def _normed_heads(
    vectors,  # (ROWS, HEADS_OF_TILE * DIM) in float32
    shift,  # (DIM,) float32
    scale,
    epsilon,
    ROWS: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,
    DIM: tl.constexpr,
):
    """Normalizes every head to norm(x) * (1 + scale) + shift."""
    heads = tl.reshape(vectors, (ROWS, HEADS_OF_TILE, DIM))
    centred = heads - (tl.sum(heads, axis=2) / DIM)[:, :, None]
    deviation = tl.sqrt(tl.sum(centred * centred, axis=2) / DIM + epsilon)
    result = centred / deviation[:, :, None] * (1.0 + scale)[None, None, :] + shift[None, None, :]
    return tl.reshape(result, (ROWS, HEADS_OF_TILE * DIM))


@triton.jit(do_not_specialize=(*OF_A_BATCH, "rows"))
def _project_heads(
    x,  # (branches * blocks * BLOCK_FRAMES, INPUTS)
    weight,  # (3 * HEADS * DIM, INPUTS) of queries, keys and values; None if `MULTIPLIED`
    bias,
    query_shift,  # (DIM,) vector of the norm of each query, or None for no norms
    query_scale,
    key_shift,
    key_scale,
    epsilon,
    queries,  # (branches * blocks * BLOCK_FRAMES, HEADS * DIM)
    keys,  # (branches, pages, BLOCK_FRAMES, HEADS, DIM) of a layer
    values,
    key_scales,  # see `_paged_attention`
    value_scales,
    cos,  # (blocks, BLOCK_FRAMES, DIM), equal in each pair of channels
    sin,
    table,
    blocks,
    width,
    pages,  # number of pages in the cache
    rows,
    INPUTS: tl.constexpr,
    BLOCK_FRAMES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS_OF_TILE: tl.constexpr,
    HEADS_OF_TILE: tl.constexpr,  # a power of 2 that divides HEADS
    INPUTS_OF_TILE: tl.constexpr,
    BY_BLOCK: tl.constexpr,  # whether a tile has the rows of one block
    MULTIPLIED: tl.constexpr,  # whether x is the product of cuBLAS, (rows, 3 * HEADS * DIM)
):
    wait_for_earlier_kernel()
    row_of_tile = tl.arange(0, ROWS_OF_TILE)
    row = tl.program_id(0) * (BLOCK_FRAMES if BY_BLOCK else ROWS_OF_TILE) + row_of_tile
    # Counts the heads of the queries, then of the keys, then of the values.
    first_head = tl.program_id(1) * HEADS_OF_TILE
    output = tl.arange(0, HEADS_OF_TILE * DIM)
    if MULTIPLIED:
        element = row.to(tl.int64)[:, None] * (3 * HEADS * DIM) + first_head * DIM + output[None, :]
        result = tl.load(x + element, mask=(row < rows)[:, None], other=0.0)
    else:
        result = _multiply(
            x,
            weight,
            bias,
            row,
            first_head * DIM + output,
            rows,
            INPUTS,
            3 * HEADS * DIM,
            ROWS_OF_TILE,
            HEADS_OF_TILE * DIM,
            INPUTS_OF_TILE,
        ).to(queries.dtype.element_ty)
    if query_shift is not None and first_head < 2 * HEADS:
        column, of_query = tl.arange(0, DIM), first_head < HEADS
        result = _normed_heads(
            result.to(tl.float32),
            tl.where(of_query, tl.load(query_shift + column), tl.load(key_shift + column)),
            tl.where(of_query, tl.load(query_scale + column), tl.load(key_scale + column)),
            epsilon,
            ROWS_OF_TILE,
            HEADS_OF_TILE,
            DIM,
        ).to(queries.dtype.element_ty)
    row_mask = row < rows
    if BY_BLOCK:
        row_mask = row_mask & (row_of_tile < BLOCK_FRAMES)
    if first_head < HEADS:
        offset = row.to(tl.int64)[:, None] * (HEADS * DIM) + first_head * DIM + output[None, :]
        tl.store(queries + offset, result, mask=row_mask[:, None])
    else:
        frame, block = row % BLOCK_FRAMES, row // BLOCK_FRAMES % blocks
        branch = row // BLOCK_FRAMES // blocks
        header = table + block * width
        row_mask = row_mask & (frame < tl.load(header + VALID, mask=row_mask, other=0))
        last = tl.load(header + NUM_CAUSAL_PAGES, mask=row_mask, other=1) - 1
        page = tl.load(header + HEADER + last, mask=row_mask, other=0).to(tl.int64)
        page += branch * pages
        vectors = result.to(tl.float32)
        if first_head == HEADS:  # head 0 of the keys is rotated
            # Each pair of neighbouring channels (even, odd) is rotated by one angle.
            pair = tl.arange(0, HEADS_OF_TILE * DIM // 2)
            angle = (block * BLOCK_FRAMES + frame)[:, None] * DIM + 2 * pair[None, :]
            pair_mask = row_mask[:, None] & (pair < DIM // 2)[None, :]
            c = tl.load(cos + angle, mask=pair_mask, other=1.0)
            s = tl.load(sin + angle, mask=pair_mask, other=0.0)
            pairs = tl.reshape(vectors, (ROWS_OF_TILE, HEADS_OF_TILE * DIM // 2, 2))
            even, odd = tl.split(pairs)
            rotated = tl.join(even * c - odd * s, odd * c + even * s)
            vectors = tl.reshape(rotated, (ROWS_OF_TILE, HEADS_OF_TILE * DIM))
        head = first_head % HEADS
        if first_head < 2 * HEADS:
            store_vectors(
                vectors,
                keys,
                key_scales,
                page,
                frame,
                head,
                row_mask,
                BLOCK_FRAMES,
                HEADS,
                DIM,
                ROWS_OF_TILE,
                HEADS_OF_TILE,
            )
        else:
            store_vectors(
                vectors,
                values,
                value_scales,
                page,
                frame,
                head,
                row_mask,
                BLOCK_FRAMES,
                HEADS,
                DIM,
                ROWS_OF_TILE,
                HEADS_OF_TILE,
            )


def project_heads(
    x: torch.Tensor,
    projections: tuple[torch.Tensor, torch.Tensor | None],
    view: LayerView,
    cos: torch.Tensor,
    sin: torch.Tensor,
    table: torch.Tensor,
    norms: tuple[NormVectors, NormVectors] | None = None,
) -> torch.Tensor:
    """Projects x to queries, keys and values. Stores the keys and values of the valid frames of
    every block in the own page of the block, with head 0 of the keys rotated.

    Args:
        x: (branches * blocks, block_frames, inputs) in the dtype of the weights, contiguous; rows
            are branch by branch.
        projections: weight (3 * heads * dim_head, inputs) and bias of queries, keys and values.
        view: keys and values of a layer in the cache.
        cos, sin: (blocks, block_frames, dim_head) cosine and sine of the rotary angles of head 0 in
            float32, equal in each pair of channels.
        table: block table of the batch, see `execution/block_table.py`.
        norms: norm of each head of the queries, and norm of each head of the keys, over dim_head
            and with the same epsilon; None for no norms.

    Returns:
        (branches * blocks, block_frames, heads * dim_head) queries, not rotated.
    """
    weight: torch.Tensor | None
    weight, bias = projections
    query_norm, key_norm = norms or (None, None)
    assert norms is None or norms[0].epsilon == norms[1].epsilon
    assert x.is_contiguous()
    assert weight.is_contiguous()
    pages, block_frames, heads, dim_head = view.data.shape[2:]
    queries = x.new_empty(*x.shape[:-1], heads * dim_head)
    rows, inputs = x.numel() // x.shape[-1], x.shape[-1]

    size = ProductSize(rows, 3 * heads * dim_head, inputs, x.dtype)
    # A scale of a whole page needs all frames of the block in one tile.
    by_block = view.scales is not None and view.scales.shape[3] == 1
    multiplied = _by_cublas(x, rows)
    if multiplied:
        x, weight, bias = F.linear(x, weight, bias), None, None
    if by_block:
        tile = replace(_BLOCK_TILE, rows=triton.next_power_of_2(block_frames))
    elif multiplied:
        tile = _STORING_TILE
    else:
        tile = tiles.choose("heads", size, x.device)
    rows_of_program = block_frames if by_block else tile.rows
    # A power of 2, because the outputs of a tile and dim_head are powers of 2.
    heads_of_tile = math.gcd(heads, max(1, tile.outputs // dim_head))
    _project_heads[triton.cdiv(rows, rows_of_program), 3 * heads // heads_of_tile](
        x,
        weight,
        bias,
        query_norm and query_norm.shift,
        query_norm and query_norm.scale,
        key_norm and key_norm.shift,
        key_norm and key_norm.scale,
        query_norm.epsilon if query_norm else 0.0,
        queries,
        *view.parts,
        cos,
        sin,
        *rows_of(table),
        pages,
        rows,
        INPUTS=inputs,
        ROWS_OF_TILE=tile.rows,
        HEADS_OF_TILE=heads_of_tile,
        INPUTS_OF_TILE=tile.inputs,
        BY_BLOCK=by_block,
        MULTIPLIED=multiplied,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **sizes_of(view),
        **launch_options(),
    )
    return queries
