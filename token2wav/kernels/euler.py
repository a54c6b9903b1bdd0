"""Euler steps of the ODE with classifier-free guidance, and the next input of the estimator.

One launch computes the state after a step, and its part of the estimator's next input. This part is
a product of the state with a narrow matrix, or a copy. Every program of a product computes the new
state of its frames again, which takes less time than a second launch. One of them stores it, in new
memory, because other programs may still read the old state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from token2wav.execution.step_boundary import step_boundary
from token2wav.kernels.tiles import fills_gpu
from token2wav.networks.ode import OdeTables

# Tiles that fit into the registers of compute capabilities 8.0, 9.0 and 10.0: frames and outputs.
_WIDE, _NARROW = (64, 64), (16, 64)
_BANDS_OF_TILE = 16
_WARPS, _STAGES = 4, 2


@triton.jit(do_not_specialize=("blocks",))
def _euler_step(
    x,  # (blocks, BANDS, BLOCK_FRAMES) state
    velocity,  # (BRANCHES * blocks, BLOCK_FRAMES, BANDS), or None before the first step
    out,  # of the shape of x: state after the step
    conditions,  # (BRANCHES, blocks, BLOCK_FRAMES, OUTPUTS) summand of the product
    weight,  # (OUTPUTS, BANDS), its rows strided; None to copy the state
    inputs,  # (BRANCHES, blocks, BLOCK_FRAMES, OUTPUTS) next input, or None after the last step
    blocks,
    weight_stride,
    step_width,
    guidance,
    BRANCHES: tl.constexpr,
    BANDS: tl.constexpr,
    BLOCK_FRAMES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    FRAMES_OF_TILE: tl.constexpr,
    OUTPUTS_OF_TILE: tl.constexpr,
    BANDS_OF_TILE: tl.constexpr,
):
    block = tl.program_id(2).to(tl.int64)
    frame = tl.program_id(0) * FRAMES_OF_TILE + tl.arange(0, FRAMES_OF_TILE)
    output = tl.program_id(1) * OUTPUTS_OF_TILE + tl.arange(0, OUTPUTS_OF_TILE)
    frame_mask, output_mask = (frame < BLOCK_FRAMES)[:, None], output < OUTPUTS
    row = (block * BLOCK_FRAMES + frame)[:, None]
    branch_rows = blocks * BLOCK_FRAMES
    result = tl.zeros((FRAMES_OF_TILE, OUTPUTS_OF_TILE), tl.float32)
    for begin in range(0, BANDS, BANDS_OF_TILE):
        band = begin + tl.arange(0, BANDS_OF_TILE)
        inside = frame_mask & (band < BANDS)[None, :]
        at = (block * BANDS + band)[None, :] * BLOCK_FRAMES + frame[:, None]
        state = tl.load(x + at, mask=inside, other=0.0)
        if velocity is not None:
            velocities = velocity + row * BANDS + band[None, :]
            v = tl.load(velocities, mask=inside, other=0.0).to(tl.float32)
            if BRANCHES == 2:
                unconditional = tl.load(velocities + branch_rows * BANDS, mask=inside, other=0.0)
                v = (1.0 + guidance) * v - guidance * unconditional.to(tl.float32)
            state += step_width * v
            if tl.program_id(1) == 0:
                tl.store(out + at, state, mask=inside)
        if weight is not None:
            w = tl.load(
                weight + output[:, None] * weight_stride + band[None, :],
                mask=output_mask[:, None] & (band < BANDS)[None, :],
                other=0.0,
            )
            result += tl.dot(state, tl.trans(w), input_precision="tf32x3")
        elif inputs is not None:
            for branch in tl.static_range(BRANCHES):
                element = (branch * branch_rows + row) * OUTPUTS + band[None, :]
                tl.store(inputs + element, state, mask=inside)
    if weight is not None:
        mask = frame_mask & output_mask[None, :]
        for branch in tl.static_range(BRANCHES):
            element = (branch * branch_rows + row) * OUTPUTS + output[None, :]
            summand = tl.load(conditions + element, mask=mask, other=0.0)
            tl.store(inputs + element, result + summand, mask=mask)


def integrate(
    x: torch.Tensor,
    tables: OdeTables,
    conditions: torch.Tensor,
    weight: torch.Tensor | None,
    velocity: Callable[[int, torch.Tensor], torch.Tensor],
) -> None:
    """Integrates the state of a batch in place, from noise to mel. Between two ODE steps it calls
    `step_boundary`.

    Args:
        x: (blocks, bands, block_frames) float32, contiguous: noise.
        conditions: (branches, blocks, block_frames, outputs) float32, contiguous: the part of the
            estimator's input that depends on the conditions.
        weight: (outputs, bands) float32. The input is the product of the state and the weight, plus
            `conditions`. None if the state is the first channels of the input. These channels of
            `conditions` are then replaced at every step.
        velocity: evaluates the estimator, from the index of a step and the input (branches,
            blocks, block_frames, outputs). Returns (branches * blocks, block_frames, bands),
            contiguous.
    """
    state, last = x, len(tables.widths) - 1
    inputs = _launch(state, None, None, conditions, weight, 0.0, tables.guidance)
    for step, width in enumerate(tables.widths):
        velocities = velocity(step, inputs)
        if step == last:
            _launch(state, velocities, x, conditions, None, width, tables.guidance, is_last=True)
        else:
            after = torch.empty_like(x)
            inputs = _launch(state, velocities, after, conditions, weight, width, tables.guidance)
            state = after
            step_boundary()


def _launch(
    x: torch.Tensor,
    velocity: torch.Tensor | None,
    out: torch.Tensor | None,
    conditions: torch.Tensor,
    weight: torch.Tensor | None,
    step_width: float,
    guidance: float,
    *,
    is_last: bool = False,
) -> torch.Tensor:
    """Launches the kernel, and returns the next input. After the last step there is no input."""
    assert x.is_contiguous()
    assert conditions.is_contiguous()
    assert velocity is None or velocity.is_contiguous()
    branches, blocks, frames, outputs = conditions.shape
    inputs = conditions if weight is None else torch.empty_like(conditions)

    def grid(tile: tuple[int, int]) -> tuple[int, int, int]:
        return triton.cdiv(frames, tile[0]), triton.cdiv(outputs, tile[1]), blocks

    tile = _WIDE if fills_gpu(grid(_WIDE)) else _NARROW
    frame_tiles, output_tiles, _ = grid(tile)
    _euler_step[(frame_tiles, 1 if weight is None else output_tiles, blocks)](
        x,
        velocity,
        out,
        conditions,
        weight,
        None if is_last else inputs,
        blocks,
        0 if weight is None else weight.stride(0),
        step_width,
        guidance,
        BRANCHES=branches,
        BANDS=x.shape[1],
        BLOCK_FRAMES=frames,
        OUTPUTS=outputs,
        FRAMES_OF_TILE=tile[0],
        OUTPUTS_OF_TILE=tile[1],
        BANDS_OF_TILE=_BANDS_OF_TILE,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return inputs
