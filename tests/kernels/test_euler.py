"""Euler steps on a kernel equal `OdeTables.advance`, and give the estimator the same inputs."""

from __future__ import annotations

import pytest
import torch

from token2wav.kernels import tiles
from token2wav.kernels.euler import integrate
from token2wav.networks.ode import OdeTables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# on a GPU, the tests belong to the tests that the GPU must pass
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
# Sums in another order, and on a GPU products of three parts.
CLOSE = 1e-5
BLOCKS, FRAMES, BANDS, OUTPUTS = 3, 18, 20, 70  # no multiple of a tile


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("steps", "guidance", "product", "dtype"),
    [
        (3, 0.7, True, torch.float16),
        (2, 0.0, True, torch.float32),
        (1, 0.7, True, torch.float32),
        (2, 0.7, False, torch.float32),
    ],
)
def test_states_and_inputs(
    steps: int,
    guidance: float,
    product: bool,
    dtype: torch.dtype,
    wide: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block without frames is NaN, and changes no other block."""
    torch.manual_seed(0)
    monkeypatch.setattr(tiles, "ENOUGH_PROGRAMS", 1 if wide else 1 << 30)
    branches = 2 if guidance else 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    x, given = random(BLOCKS, BANDS, FRAMES), random(branches, BLOCKS, FRAMES, OUTPUTS)
    x[1] = given[:, 1] = torch.nan
    # a part of a wider matrix, as in a model
    weight = random(OUTPUTS, 3 * BANDS)[:, :BANDS] if product else None
    tables = OdeTables(random(steps).tolist(), [], guidance, list(range(steps)))
    velocities = [random(branches * BLOCKS, FRAMES, BANDS).to(dtype) for _ in range(steps)]
    wanted, conditions = x.clone(), given.clone()

    def velocity(step: int, inputs: torch.Tensor) -> torch.Tensor:
        nonlocal wanted
        state = wanted.transpose(1, 2)
        if weight is None:
            own = torch.cat((state.expand(branches, -1, -1, -1), conditions[..., BANDS:]), dim=3)
        else:
            own = conditions + state @ weight.T
        torch.testing.assert_close(inputs, own, atol=CLOSE, rtol=CLOSE, equal_nan=True)
        found = velocities[step]
        wanted = tables.advance(step, wanted, found.float().transpose(1, 2))
        return found

    integrate(x, tables, given, weight, velocity)
    torch.testing.assert_close(x, wanted, atol=CLOSE, rtol=CLOSE, equal_nan=True)
    assert x[1].isnan().all()
    assert x[[0, 2]].isfinite().all()
