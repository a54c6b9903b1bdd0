from __future__ import annotations

import os

import pytest
import torch

# Before triton is imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the Triton language is not installed: pip install 'token2wav[gpu]'")
