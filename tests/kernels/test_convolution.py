"""Every tile of the vocoder's convolutions equals torch, on shapes that fill no tile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from testkit.tiles import tiles_of, use_tile
from token2wav.kernels.convolution import (
    FAR,
    Convolution,
    PieceTensors,
    Signal,
    SignalLayout,
    rounded_weights,
)
from token2wav.kernels.tiles import Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
CLOSE = 1e-5  # sums run in another order
CHANNELS, OUTPUTS, TAPS, DILATIONS, PIECES = 24, 72, 3, (1, 4), (150, 0, 70)


@pytest.mark.parametrize(("dtype", "tile"), tiles_of("vocoder"))
def test_branches_with_residual_and_activation(
    dtype: torch.dtype, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a batch have different lengths; one is empty. Branches have different dilations."""
    use_tile(monkeypatch, tile)
    torch.manual_seed(0)
    delays, halo = (0,) * len(DILATIONS), (TAPS - 1) * max(DILATIONS)
    incoming = SignalLayout(CHANNELS, 1, delays, halo=halo, dtype=dtype)
    outgoing = SignalLayout(OUTPUTS, 1, delays, dtype=dtype)
    states = {dtype: torch.zeros(len(PIECES), 16, dtype=dtype, device=DEVICE)}
    pieces = torch.tensor([[FAR, rows, FAR, 0] for rows in PIECES], dtype=torch.int32)
    batch = PieceTensors(max(PIECES), pieces.to(DEVICE), states, states)
    x, residual = Signal.empty(incoming, batch), Signal.empty(outgoing, batch)
    x.data.normal_()
    residual.data.normal_()
    weights = torch.randn(
        len(DILATIONS), OUTPUTS, TAPS, CHANNELS, dtype=dtype, device=DEVICE
    )  # of the signal's rows, one tap after the other
    bias = torch.randn(len(DILATIONS), OUTPUTS, dtype=dtype, device=DEVICE)
    geometry = [
        (TAPS, dilation * CHANNELS, incoming.first((TAPS - 1) * dilation), 0, 0)
        for dilation in DILATIONS
    ]
    convolution = Convolution(
        weights.flatten(2),
        bias,
        torch.tensor(geometry, dtype=torch.int32, device=DEVICE),
        CHANNELS,
        step=CHANNELS,
        rate=1,
        raw=outgoing,
        out=outgoing,
        activation="leaky",
        slope=0.1,
        precision="ieee",
    )
    raw, out = convolution(batch, x, residual)
    assert raw is not None
    assert out is not None
    for branch, dilation in enumerate(DILATIONS):
        before = halo - (TAPS - 1) * dilation
        kernel = weights[branch].transpose(1, 2)
        for stream, rows in enumerate(PIECES):
            if rows:
                read = x.data[branch, stream, before : halo + rows].T
                expected = F.conv1d(read, kernel, bias[branch], dilation=dilation).T
                expected = expected + residual.data[branch, stream, :rows]
                for signal, values in ((raw, expected), (out, F.leaky_relu(expected, 0.1))):
                    result = signal.data[branch, stream, :rows]
                    torch.testing.assert_close(result, values, atol=CLOSE, rtol=CLOSE)


def test_operands_beyond_the_range_of_float16() -> None:
    """They become its largest number, and NaN stays NaN, so that no error is hidden."""
    layout = SignalLayout(16, 1, (0,))
    states = {torch.float32: torch.zeros(1, 16, device=DEVICE)}
    pieces = torch.tensor([[FAR, 4, FAR, 0]], dtype=torch.int32, device=DEVICE)
    batch = PieceTensors(4, pieces, states, states)
    x = Signal.empty(layout, batch)
    values = torch.tensor([1e6, -1e6, torch.nan, 1.0], device=DEVICE)
    x.data[0, 0, :4] = values[:, None]
    weights = rounded_weights(torch.eye(16, device=DEVICE)[None], "float16")
    geometry = torch.tensor([[1, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    bias = torch.zeros(1, 16, device=DEVICE)
    convolution = Convolution(
        weights, bias, geometry, 16, step=16, rate=1, raw=layout, precision="float16"
    )
    raw, _ = convolution(batch, x)
    assert raw is not None
    expected = torch.tensor([65504.0, -65504.0, torch.nan, 1.0])
    torch.testing.assert_close(raw.data[0, 0, :4, 0].cpu(), expected, equal_nan=True)
