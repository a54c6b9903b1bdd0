"""Causal convolutions of blocks on kernels equal torch, on shapes that fill no tile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from testkit.tiles import tiles_of, use_tile
from token2wav.execution.block_table import HEADER, Block
from token2wav.kernels.causal_convolution import CausalConvolution, NormedConvolution
from token2wav.kernels.norms import NormVectors
from token2wav.kernels.tiles import Tile
from token2wav.networks.unet import CausalConv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Sums run in another order. On a GPU products consist of three TF32 products.
CLOSE = 1e-5
BLOCK, INPUTS, OUTPUTS, BRANCHES = 10, 20, 24, 2  # no multiple of a tile
# Chunks of two blocks, of one block, of three blocks that end early, of a single frame, and of two
# blocks that start with prompt padding. A row without a block follows.
BLOCKS = [
    Block(start=0, valid=BLOCK, before=0, chunk=0, last=False, pages=[0]),
    Block(start=BLOCK, valid=BLOCK, before=BLOCK, chunk=0, last=True, pages=[0]),
    Block(start=3 * BLOCK, valid=BLOCK, before=0, chunk=1, last=True, pages=[0]),
    Block(start=6 * BLOCK, valid=BLOCK, before=0, chunk=2, last=False, pages=[0]),
    Block(start=7 * BLOCK, valid=BLOCK, before=BLOCK, chunk=2, last=False, pages=[0]),
    Block(start=8 * BLOCK, valid=3, before=2 * BLOCK, chunk=2, last=True, pages=[0]),
    Block(start=2 * BLOCK, valid=1, before=0, chunk=3, last=True, pages=[0]),
    Block(start=0, valid=BLOCK, before=0, chunk=4, last=False, pages=[0], prompt_padding=9),
    Block(start=BLOCK, valid=1, before=BLOCK, chunk=4, last=True, pages=[0], prompt_padding=9),
]
CHUNKS, ROWS = 5, len(BLOCKS) + 1


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def a_past() -> Any:
    """Returns a past with the state of one convolution, as it lies in a batch."""
    table = torch.zeros(ROWS, HEADER + 1, dtype=torch.int32)
    table[: len(BLOCKS)] = torch.tensor([block.row for block in BLOCKS], dtype=torch.int32)
    # of one ODE step, with room for one more chunk
    states = random(CHUNKS + 1, 3, BRANCHES, 2, INPUTS)[:, 1].transpose(-1, -2)
    return SimpleNamespace(table=table.to(DEVICE), states=[states])


def some_inputs() -> torch.Tensor:
    """Returns inputs (branches * rows, BLOCK, INPUTS), with NaN in all padding."""
    x = 4 * random(BRANCHES, ROWS, BLOCK, INPUTS)
    x[:, len(BLOCKS) :] = torch.nan
    for row, block in enumerate(BLOCKS):
        x[:, row, block.valid :] = torch.nan
        x[:, row, : max(0, block.prompt_padding - block.start)] = torch.nan
    return x.flatten(0, 1)


def a_convolution() -> CausalConv:
    conv = CausalConv(INPUTS, OUTPUTS).to(DEVICE).requires_grad_(False)
    conv.weight.mul_(3)
    return conv


def a_norm() -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(OUTPUTS, device=DEVICE).requires_grad_(False)
    norm.weight.copy_(random(OUTPUTS))
    norm.bias.copy_(random(OUTPUTS))
    return norm


def frames_of(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Returns the frames (BRANCHES, frames, channels) of a chunk in (branches * rows, ...)."""
    rows = x.unflatten(0, (BRANCHES, ROWS))
    blocks = [(row, block.valid) for row, block in enumerate(BLOCKS) if block.chunk == chunk]
    return torch.cat([rows[:, row, :valid] for row, valid in blocks], dim=1)


def convolved(
    conv: CausalConv, x: torch.Tensor, before: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the convolution (BRANCHES, frames, OUTPUTS) of a chunk, and its new state."""
    frames = frames_of(x, chunk).nan_to_num()  # prompt padding counts as zeros
    extended = torch.cat((before[chunk], frames.transpose(1, 2)), dim=2)
    output = F.conv1d(extended, conv.weight, conv.bias).transpose(1, 2)
    return output, extended[:, :, -2:]


@pytest.mark.parametrize(("dtype", "tile"), tiles_of("convolution"))
def test_convolution_continues_from_its_state(
    dtype: torch.dtype, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dtype == torch.float32
    use_tile(monkeypatch, tile)
    conv, past, x = a_convolution(), a_past(), some_inputs()
    before = past.states[0].clone()
    output = CausalConvolution(conv, "tf32x3")(x, past)
    for chunk in range(CHUNKS):
        expected, state = convolved(conv, x, before, chunk)
        torch.testing.assert_close(frames_of(output, chunk), expected, atol=CLOSE, rtol=CLOSE)
        assert torch.equal(past.states[0][chunk], state)
    assert torch.equal(past.states[0][CHUNKS], before[CHUNKS]), "a chunk that does not exist"


def test_float16_inputs() -> None:
    """Products have rounded operands. The state keeps the inputs as they are."""
    conv, past, x = a_convolution(), a_past(), some_inputs()
    before = past.states[0].clone()
    output = CausalConvolution(conv, "float16")(x, past)
    conv.weight.copy_(conv.weight.half())
    for chunk in range(CHUNKS):
        _, state = convolved(conv, x, before, chunk)
        expected, _ = convolved(conv, x.half().float(), before.half().float(), chunk)
        torch.testing.assert_close(frames_of(output, chunk), expected, atol=CLOSE, rtol=CLOSE)
        assert torch.equal(past.states[0][chunk], state)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, CLOSE), (torch.float16, 2e-3)])
def test_sum_and_its_norm_follow_the_convolution(dtype: torch.dtype, close: float) -> None:
    conv, norm, following, past = a_convolution(), a_norm(), a_norm(), a_past()
    x, residual = some_inputs(), random(BRANCHES * ROWS, BLOCK, OUTPUTS)
    before = past.states[0].clone()
    total, normed = NormedConvolution(conv, norm, "tf32x3").with_residual(
        x, past, residual, NormVectors.of(following), dtype
    )
    assert normed.dtype == dtype
    for chunk in range(CHUNKS):
        expected, state = convolved(conv, x, before, chunk)
        expected = F.mish(norm(expected)) + frames_of(residual, chunk)
        torch.testing.assert_close(frames_of(total, chunk), expected, atol=CLOSE, rtol=CLOSE)
        torch.testing.assert_close(
            frames_of(normed, chunk).float(), following(expected), atol=close, rtol=close
        )
        assert torch.equal(past.states[0][chunk], state)


def test_gated_sum_and_its_norm_follow_the_convolution() -> None:
    """As in Step-Audio2, where the residual is replaced by the sum."""
    conv, following, past, x = a_convolution(), a_norm(), a_past(), some_inputs()
    residual, gate = random(BRANCHES * ROWS, BLOCK, OUTPUTS), random(OUTPUTS)
    before, total = past.states[0].clone(), residual.clone()
    normed = CausalConvolution(conv, "tf32x3").add_gated(
        x, past, total, gate, NormVectors.of(following), torch.float32
    )
    for chunk in range(CHUNKS):
        expected, state = convolved(conv, x, before, chunk)
        expected = gate * expected + frames_of(residual, chunk)
        torch.testing.assert_close(frames_of(total, chunk), expected, atol=CLOSE, rtol=CLOSE)
        torch.testing.assert_close(
            frames_of(normed, chunk), following(expected), atol=CLOSE, rtol=CLOSE
        )
        assert torch.equal(past.states[0][chunk], state)
