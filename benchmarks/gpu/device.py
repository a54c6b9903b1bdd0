"""The device under test: its name and versions, its memory, and when it is done."""

from __future__ import annotations

import gc
import shutil
import subprocess
from typing import Any

import torch


def describe_device(name: str) -> dict[str, Any]:
    """GPU, driver and CUDA, as far as there is a GPU; `gpu` is None on a CPU."""
    device = torch.device(name)
    if device.type != "cuda":
        return {"device": name, "gpu": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": name,
        "gpu": properties.name,
        "memory_mib": properties.total_memory >> 20,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0].strip() or None


def synchronize(device: torch.device) -> None:
    """Waits for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Gives a device back the memory of models that are gone: the next one's cache is a share of what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated_bytes(device: torch.device, *, peak: bool = False) -> int:
    """Of torch's tensors on a GPU, now or at their most since `forget_peak`; 0 on a CPU, which nobody counts."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
