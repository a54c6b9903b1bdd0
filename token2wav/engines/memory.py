"""How much memory an engine may take where nobody said it."""

from __future__ import annotations

import os

import torch

_CPU_SHARE = 0.25
CUDA_SHARE = 0.8


def cache_bytes(mib: int, device: torch.device) -> int:
    """Bytes for the cache of keys and values: `mib`, or if that is 0 a share of what is free now.

    A CPU's memory is shared with everything else and taken only as it is used; a GPU's is ours, and taken at once.
    """
    if mib:
        return mib << 20
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * CUDA_SHARE)
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _CPU_SHARE)
