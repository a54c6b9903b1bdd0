"""Device that a model runs on: chosen by its name, entered by every thread that launches work, and
kept exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from token2wav.errors import ConfigError, DeviceLostError

_CPU_SHARE = 0.25
# Of the container, versions 2 and 1: folder, and files of the limit and of what is taken.
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_CUDA_SHARE = 0.8
# Room for activations, convolution contexts and nodes of CUDA graphs, which are taken after the
# cache. By count, not measured: 3 GB for public CosyVoice3 with some 100,000 nodes; CosyVoice2's
# U-Net has 155,000.
_CUDA_REST = 4 << 30


def device_named(name: str) -> torch.device:
    """Device of the setting `runtime.device`; `auto` takes a GPU where torch sees one.

    Raises:
        ConfigError: torch sees no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    # torch wraps large indices around
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"runtime.device: '{name}' was asked for, but torch sees {torch.cuda.device_count()} "
            f"GPUs"
        )
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"runtime.device: '{name}' is not a device of torch") from error


@contextmanager
def entered(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one of this thread: kernels, streams and events go to the current
    GPU, not to tensors'.

    Every thread starts on GPU 0, so a model on `cuda:1` needs this around all that it launches.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


def keep_arithmetic_exact(device: torch.device) -> None:
    """Turns roundings off that torch makes on a GPU to be faster, for the whole process.

    Float32 convolutions and matrix products use no TF32, which keeps 10 bits of mantissa, and
    products of float16 matrices are summed in float32, also between the parts that a library splits
    them into. docs/parity.md says what each is worth.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def cache_bytes(mib: int, device: torch.device) -> int:
    """Bytes for the cache of keys and values: `mib`, or if that is 0 a share of what is free now.

    A CPU's memory is shared with everything else and taken only as it is used; a GPU's is ours, and
    taken at once.

    Raises:
        ConfigError: `mib` is more than is free.
    """
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_bytes()
    if mib << 20 > free:
        raise ConfigError(
            f"runtime.cache_mib: {mib} MiB, but {free >> 20} MiB of memory are free on {device}; "
            "set less, or 0 for a share of the free memory"
        )
    if mib:
        return mib << 20
    return cuda_cache_bytes(free) if on_gpu else int(free * _CPU_SHARE)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may still take: of the host, or of its container (cgroup)
    where that is less.

    Pages of files count as free in both: the kernel gives them up when memory is needed.
    """
    free = 1024 * _number("MemAvailable:", root / "proc/meminfo")
    for folder, limit, used in _CGROUPS:
        try:
            most, taken = (int((root / folder / name).read_text()) for name in (limit, used))
            files = sum(
                _number(f"{kind}_file", root / folder / "memory.stat")
                for kind in ("active", "inactive")
            )
        except (OSError, ValueError, IndexError):  # there is no such cgroup, or its limit is `max`
            continue
        free = min(free, max(0, most - taken + files))
    return free


def _number(name: str, file: Path) -> int:
    """Number behind a name at the start of a line."""
    return int(re.findall(rf"^{name} +(\d+)", file.read_text(), re.MULTILINE)[0])


def cuda_cache_bytes(free: int) -> int:
    """Share of a GPU's free bytes that the cache takes; what is left is for graphs and activations."""
    return int(max(min(_CUDA_SHARE * free, free - _CUDA_REST), free / 2))


def check_device(device: torch.device, cause: BaseException) -> None:
    """Asks a GPU whether it still works after an error.

    An illegal access or a failed assertion in a kernel makes every later call of the process fail,
    until its end.

    Raises:
        DeviceLostError: it does not, because of `cause`.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise DeviceLostError(
            f"engine: the GPU cannot be used any more by this process: {reason}"
        ) from cause
