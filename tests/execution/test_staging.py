"""Copies between host and device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from token2wav.execution.staging import copy_to, frames_to_device, to_device, to_host

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("name", DEVICES)
def test_round_trip(name: str) -> None:
    values = np.arange(6, dtype=np.float32)
    on_device = to_device(values, torch.device(name))
    copy_to(on_device[:2], np.array([7, 8], np.float32))
    first, empty, rest = to_host([on_device[:3], on_device[:0], on_device[3:]])
    assert first.tolist() == [7, 8, 2]
    assert empty.shape == (0,)
    assert rest.tolist() == [3, 4, 5]


def test_nothing_to_copy() -> None:
    assert to_host([]) == []


@pytest.mark.parametrize("name", DEVICES)
def test_frames_from_host_and_device(name: str) -> None:
    """Tensors on the device stay as they are. Tensors of the host may be views and empty."""
    device, codes = torch.device(name), torch.arange(8.0).view(4, 2).T
    there = torch.ones(2, 3, device=device)
    parts = frames_to_device([codes[:, :3], there, codes[:, 3:], codes[:, :0]], device)
    assert parts[1] is there
    assert {part.device.type for part in parts} == {name}
    expected = [codes[:, :3], torch.ones(2, 3), codes[:, 3:], codes[:, :0]]
    for part, values in zip(parts, expected, strict=True):
        assert torch.equal(part.cpu(), values)
