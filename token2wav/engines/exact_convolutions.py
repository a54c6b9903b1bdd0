"""Float32 that is float32: on a GPU torch rounds the inputs of convolutions to TF32 unless it is told not to."""

from __future__ import annotations

import torch


def keep_convolutions_exact(device: torch.device) -> None:
    """Turns TF32 off for convolutions on a GPU, for the whole process.

    It keeps 10 bits of mantissa; what that does to the audio stands in docs/precision.md. Matrix products are left
    as they are: torch does not use TF32 for them unless somebody asked for it.

    Args:
        device: that a model is to be loaded on.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
