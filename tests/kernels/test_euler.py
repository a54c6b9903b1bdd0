"""Euler steps on a kernel equal `OdeTables.advance`, and give the estimator the same inputs."""

from __future__ import annotations

import pytest
import torch

from token2wav.kernels import tiles
from token2wav.kernels.euler import integrate
from token2wav.networks.ode import OdeTables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("fused_products")
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
    monkeypatch.setattr(tiles, "ENOUGH_PROGRAMS", 1 if wide else 1 << 30)
    branches = 2 if guidance else 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    x, condition = random(BLOCKS, BANDS, FRAMES), random(branches, BLOCKS, FRAMES, OUTPUTS)
    x[1] = condition[:, 1] = torch.nan
    # a part of a wider matrix, as in a model
    weight = random(OUTPUTS, 3 * BANDS)[:, :BANDS] if product else None
    tables = OdeTables(random(steps).tolist(), [], guidance, list(range(steps)))
    velocities = [random(branches * BLOCKS, FRAMES, BANDS).to(dtype) for _ in range(steps)]
    expected, conditions = x.clone(), condition.clone()

    def velocity(step: int, inputs: torch.Tensor) -> torch.Tensor:
        nonlocal expected
        state = expected.transpose(1, 2)
        if weight is None:
            expected_inputs = torch.cat(
                (state.expand(branches, -1, -1, -1), conditions[..., BANDS:]), dim=3
            )
        else:
            expected_inputs = conditions + state @ weight.T
        torch.testing.assert_close(inputs, expected_inputs, atol=CLOSE, rtol=CLOSE, equal_nan=True)
        step_velocity = velocities[step]
        expected = tables.advance(step, expected, step_velocity.float().transpose(1, 2))
        return step_velocity

    integrate(x, tables, condition, weight, velocity)
    torch.testing.assert_close(x, expected, atol=CLOSE, rtol=CLOSE, equal_nan=True)
    assert x[1].isnan().all()
    assert x[[0, 2]].isfinite().all()
