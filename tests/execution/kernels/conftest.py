from __future__ import annotations

import os

import pytest
import torch

from token2wav.execution.device import keep_arithmetic_exact

# Before triton is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _exact_references() -> None:
    """Computes the reference of every kernel in exact float32, without TF32, on a GPU too."""
    keep_arithmetic_exact(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
