"""Facts about the GPU and its driver, and the upload of CUDA graphs, by cuda-python.

The package cuda-bindings is optional. Without it, or with a driver that lacks a function, these
functions return fewer facts.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Names of CUcomputemode. `exclusive process` admits a single process, so neither a second server
# nor the ensemble, which has two processes, can use the GPU.
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver


def _call(name: str, *arguments: Any) -> tuple[Any, ...] | None:
    """Calls a function of the driver; None if it failed or is missing."""
    driver = _bindings()
    if driver is None:
        return None
    try:
        status, *results = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError):  # the driver, or this release of the bindings, is older
        return None
    return tuple(results) if status == driver.CUresult.CUDA_SUCCESS else None


def uploaded(graph: torch.cuda.CUDAGraph, stream: int) -> bool:
    """Uploads a CUDA graph to the GPU, so that its first replay does not have to. Returns False if
    cuda-python is missing, or this release of torch does not give the handle of a graph.
    """
    handle = getattr(graph, "raw_cuda_graph_exec", None)
    return handle is not None and _call("cuGraphUpload", handle(), stream) is not None


def nodes_in_capture(stream: int) -> int | None:
    """Returns how many nodes the capture on a stream has recorded so far; None if the stream does
    not capture, or without cuda-python.
    """
    capture = _call("cuStreamGetCaptureInfo", stream)
    if capture is None:
        return None
    _, _, graph, *_ = capture  # status, number of the capture, graph, dependencies
    nodes = _call("cuGraphGetNodes", graph, 0)
    return None if nodes is None else int(nodes[1])


def device_facts(device: torch.device) -> list[str]:
    """Returns facts about a GPU as short phrases: name, driver and compute mode."""
    facts = [torch.cuda.get_device_name(device), driver_fact()]
    driver = _bindings()
    if driver is not None:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
        if (mode := _call("cuDeviceGetAttribute", attribute, device.index or 0)) is not None:
            facts.append(f"compute mode {_COMPUTE_MODES.get(int(mode[0]), mode[0])}")
    return [fact for fact in facts if fact]


def missing_gpu(root: Path = Path("/")) -> str:
    """Returns the likely reason why torch finds no GPU although a driver is loaded; empty if no
    driver is loaded.
    """
    fact = driver_fact(root)
    if not fact:
        return ""
    if torch.version.cuda is None:
        return f"{fact}, but this torch is made for CPUs"
    return f"{fact}, but this torch is made for CUDA {torch.version.cuda}"


def driver_fact(root: Path = Path("/")) -> str:
    """Returns a phrase with the NVIDIA driver version, such as `driver 580.65.06 for CUDA 13.0`;
    empty if no driver is loaded.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    versions = re.findall(r"\b\d{3}\.\d+(?:\.\d+)?\b", text.splitlines()[0] if text else "")
    phrase = f"driver {versions[0]}" if versions else "an NVIDIA driver"
    version = _call("cuDriverGetVersion")
    if version is not None and (number := int(version[0])):
        phrase += f" for CUDA {number // 1000}.{number % 1000 // 10}"
    return phrase
