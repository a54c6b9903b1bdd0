"""The velocity of a DiT under guided attention on kernels equals its eager velocity."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from token2wav.families.streamflow.kernel_velocity import KernelVelocity
from token2wav.families.streamflow.solver import GuidedSolver
from token2wav.networks import dit
from token2wav.networks.dit import DiT
from token2wav.networks.ode import OdeTables
from token2wav.published.sizes import EstimatorConfig, GuidedAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDS, BLOCK = 8, 4
# Heads of 24 channels do not fill the tile of the rotation.
SIZES = EstimatorConfig(
    48,
    3,
    2,
    24,
    2,
    BANDS,
    BANDS,
    BANDS,
    BANDS,
    BLOCK,
    guided=GuidedAttention.assigned(3, (1,), (2,)),
)
CONFIGS = {
    "StreamFlow": SIZES,
    "Qwen2.5-Omni": dataclasses.replace(SIZES, position_convolutions=False),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    # Tolerance of mels with a spread of about 1: sums in another order, and in float16 its rounding
    ("half", "close"),
    [(False, 1e-5), (True, 5e-3)],
)
def test_windows_equal_eager_windows(
    name: str, half: bool, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two windows of different lengths, with guidance and frames that are dropped."""
    monkeypatch.setattr(dit, "_CONV_GROUPS", 2)  # for 48 channels
    estimator = DiT(CONFIGS[name]).eval().requires_grad_(False).to(DEVICE)
    tables = OdeTables.of(estimator, 2, 0.7)
    if half:
        estimator.halve()
    frames = 7 * BLOCK
    noise, mu = (torch.randn(2, BANDS, frames, device=DEVICE) for _ in range(2))
    speakers, nobody = torch.randn(2, BANDS, device=DEVICE), torch.randn(48, device=DEVICE)
    start, lengths = torch.tensor([[0, 8], [frames, frames - 3]], device=DEVICE)
    eager, kernels = (
        GuidedSolver(estimator, tables, nobody, velocity).solve(
            noise, mu, speakers, start, 2 * BLOCK, 4 * BLOCK, lengths
        )
        for velocity in (None, KernelVelocity(estimator))
    )
    assert eager.shape == (2, BANDS, 2 * BLOCK)
    torch.testing.assert_close(kernels, eager, atol=close, rtol=close)
