"""Linear layer with GELU on its result, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from token2wav.execution.kernels.activations import gelu
from token2wav.execution.kernels.tiles import fills_gpu

# Tiles that keep everything in registers, for compute capabilities 8.0, 9.0 and 10.0: rows, outputs
# and inputs of a product. The narrow tile gives a batch of few rows enough programs.
_WIDE, _NARROW = (64, 128, 32), (16, 64, 64)
_WARPS, _STAGES = 4, 3


@triton.jit(do_not_specialize=("rows",))
def _gelu_product(
    x,  # (rows, INPUTS)
    weight,  # (OUTPUTS, INPUTS)
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
    row = tl.program_id(0) * ROWS_OF_TILE + tl.arange(0, ROWS_OF_TILE)
    output = tl.program_id(1) * OUTPUTS_OF_TILE + tl.arange(0, OUTPUTS_OF_TILE)
    column = tl.arange(0, INPUTS_OF_TILE)
    there, real = (row < rows)[:, None], (output < OUTPUTS)[:, None]
    given = x + row.to(tl.int64)[:, None] * INPUTS + column[None, :]
    weights = weight + output[:, None] * INPUTS + column[None, :]
    result = tl.zeros((ROWS_OF_TILE, OUTPUTS_OF_TILE), tl.float32)
    for begin in range(0, INPUTS, INPUTS_OF_TILE):
        inside = (begin + column < INPUTS)[None, :]
        a = tl.load(given + begin, mask=there & inside, other=0.0)
        b = tl.load(weights + begin, mask=real & inside, other=0.0)
        result += tl.dot(a, tl.trans(b), input_precision="tf32x3")
    result += tl.load(bias + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    result = gelu(result, TANH).to(out.dtype.element_ty)
    tl.store(place, result, mask=there & (output < OUTPUTS)[None, :])


def gelu_product(x: torch.Tensor, layer: torch.nn.Linear, *, tanh: bool) -> torch.Tensor:
    """Computes gelu(layer(x)).

    Args:
        x: (..., inputs) in the dtype of the layer, contiguous.
        layer: linear layer with a bias.
        tanh: whether GELU is approximated with tanh.
    """
    assert x.is_contiguous()
    assert layer.weight.is_contiguous()
    outputs, inputs = layer.weight.shape
    out = x.new_empty(*x.shape[:-1], outputs)
    rows = x.numel() // inputs

    def grid(tile: tuple[int, int, int]) -> tuple[int, int]:
        return triton.cdiv(rows, tile[0]), triton.cdiv(outputs, tile[1])

    tile = _WIDE if fills_gpu(grid(_WIDE)) else _NARROW
    _gelu_product[grid(tile)](
        x,
        layer.weight,
        layer.bias,
        out,
        rows,
        INPUTS=inputs,
        OUTPUTS=outputs,
        TANH=tanh,
        ROWS_OF_TILE=tile[0],
        OUTPUTS_OF_TILE=tile[1],
        INPUTS_OF_TILE=tile[2],
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
