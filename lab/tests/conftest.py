from __future__ import annotations

import os

# Set before torch is imported. Sums are equal only with equal numbers of threads.
os.environ["OMP_NUM_THREADS"] = "1"
import pytest
import torch

from testkit.models.front_end import demo_prompt, front_end

__all__ = ["demo_prompt", "front_end"]


@pytest.hookimpl(tryfirst=True)  # runs before fixtures, because they draw random numbers too
def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # makes rare failures repeatable
