"""Harmonic source: sines of F0, whose phase goes on from step to step."""

from __future__ import annotations

import math

import torch

from token2wav.networks.source import HarmonicSource, frame_sines
from token2wav.published.sizes import HiFTConfig

SAMPLES = 480


def test_sines_at_the_ends_of_frames() -> None:
    increments = torch.tensor([[[0.25 / SAMPLES], [0.5 / SAMPLES], [0.0]]])  # cycles per sample
    sines, phase = frame_sines(increments, SAMPLES, "exact", None)
    angles = 2 * math.pi * torch.tensor([0.25, 0.75, 0.75])
    assert torch.allclose(sines[0, :, 0], angles.sin(), atol=1e-6)
    assert torch.allclose(phase, torch.tensor([[0.75]]).double())


def test_the_phase_goes_on_in_the_next_step() -> None:
    increments = torch.rand(2, 50, 3, generator=torch.Generator().manual_seed(0)) / 100
    whole, end = frame_sines(increments, SAMPLES, "exact", None)
    first, carry = frame_sines(increments[:, :20], SAMPLES, "exact", None)
    second, after = frame_sines(increments[:, 20:], SAMPLES, "exact", carry)
    assert torch.allclose(torch.cat((first, second), 1), whole, atol=1e-6)
    assert torch.allclose(after, end, rtol=0, atol=1e-12)  # no step rounds the phase to float32


def test_only_the_rounding_of_the_public_code_drifts() -> None:
    """A phase that is a whole number of cycles at the end of every frame has sines of zero."""
    increments = torch.full((1, 20_000, 1), 100 / SAMPLES)
    exact, reference = (
        frame_sines(increments, SAMPLES, phase, None)[0] for phase in ("exact", "reference")
    )
    rounding = abs(float(increments[0, 0, 0]) * SAMPLES - 100) * 20_000 * 2 * math.pi
    assert float(exact.abs().max()) <= rounding + 1e-6
    assert float(reference.abs().max()) > 0.1


def test_silence_where_there_is_no_pitch() -> None:
    torch.manual_seed(0)
    config = HiFTConfig()
    source = HarmonicSource(config).requires_grad_(False)
    sines, noise, _ = source.frames(torch.tensor([[200.0, 0.0]]), "exact")
    assert sines[0, 0].any()
    assert not sines[0, 1].any()
    voiced, unvoiced = noise[0].tolist()
    assert math.isclose(voiced, config.nsf_sigma, rel_tol=1e-6)
    assert math.isclose(unvoiced, config.nsf_alpha / 3, rel_tol=1e-6)
