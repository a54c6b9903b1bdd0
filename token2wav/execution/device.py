"""Device of a model: selection by name, the current device of a thread, exact arithmetic, memory
allocation on a CPU, free memory, and usable cores.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from token2wav.errors import ConfigError, DeviceLostError, one_line
from token2wav.execution.cuda_facts import missing_gpu

log = logging.getLogger(__name__)

_CPU_SHARE = 0.25  # share of the free memory for the cache
# Where a container (cgroup version 2 or 1) has its memory limit: folder, file with the limit, file
# with the used memory.
_CGROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Where it has its quota of CPU time, in microseconds, and the period for which the quota holds.
_CGROUP_QUOTAS = (
    ("sys/fs/cgroup/cpu.max",),
    ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_CUDA_SHARE = 0.8  # largest share of the free memory for the cache
# Room on a GPU for activations, and for nodes of CUDA graphs, which are allocated after the cache.
# The number is calculated, not measured. With 64 KiB for each node, the 23,000 nodes of public
# CosyVoice3 need 1.4 GiB, and the 66,000 nodes of CosyVoice2's U-Net 4.0 GiB.
_CUDA_REST = 4 << 30
# Capacity of oneDNN's cache of compiled operations, and the variable that sets it. An entry belongs
# to one layer and one shape of its input, and the number of streams in a batch changes the shape.
# The default of oneDNN, 1024, holds about ten shapes of a decoder.
_PRIMITIVES = 16384
_PRIMITIVES_VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
# Parameters of glibc's `mallopt` (malloc.h), and environment variables that set the same values.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_MOST_KEPT_BYTES, _GLIBC_KEPT_BYTES = 1 << 30, 32 << 20


def device_named(name: str) -> torch.device:
    """Returns the device of the setting `runtime.device`; `auto` is a GPU if torch sees one. Raises
    ConfigError if torch does not see the device.
    """
    if name == "auto":
        has_gpu = torch.cuda.is_available()
        if not has_gpu and (reason := missing_gpu()):
            log.warning("torch finds no GPU, so the model runs on the CPU: %s", reason)
        return torch.device("cuda" if has_gpu else "cpu")
    kind, _, index = name.partition(":")
    # Checked here, because torch wraps large indices around and selects another GPU.
    if kind == "cuda" and int(index or 0) >= (count := torch.cuda.device_count()):
        reason = missing_gpu() if not count else ""
        raise ConfigError(
            f"runtime.device: '{name}' is not available; torch finds {count} GPUs"
            + (f": {reason}" if reason else "")
        )
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"runtime.device: '{name}' is not a valid torch device") from error


@contextmanager
def entered(device: torch.device) -> Iterator[None]:
    """Prepares this thread for work on a device.

    A GPU becomes the current GPU of this thread, which kernels, CUDA streams and events use, even
    if their tensors are on another GPU. Every thread starts with GPU 0. A model on `cuda:1`
    therefore needs this context around all its work.

    A caller of the library may run a language model in this thread. Autocast, which would round the
    operands of a decoder, and a default device, which would move tensors of the host, are off.

    Raises:
        ConfigError: the default dtype of torch is not float32. It cannot be set here, because it is
            the same in all threads.
    """
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        raise ConfigError(
            f"torch: the default dtype is {dtype}, expected torch.float32; reset it with "
            "torch.set_default_dtype before you load or use a model"
        )
    with ExitStack() as entries:
        entries.enter_context(torch.autocast(device.type, enabled=False))
        if torch.get_default_device().type != "cpu":  # the context below slows every call of torch
            entries.enter_context(torch.device("cpu"))
        if device.type == "cuda":
            entries.enter_context(torch.cuda.device(device))
        yield


def keep_arithmetic_exact(device: torch.device) -> None:
    """Turns off the reduced precision that torch uses on a GPU for speed, for the whole process.

    Float32 convolutions and matrix products then do not use TF32, which keeps only 10 bits of the
    mantissa. Products of float16 matrices are summed in float32 (errors: docs/parity.md).
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def keep_compiled_operations(device: torch.device) -> None:
    """Enlarges the cache of operations that torch compiles on a CPU, for the whole process.

    The call has no effect after the first convolution or matrix product of the process, or if the
    environment sets the capacity.
    """
    if device.type == "cpu":
        os.environ.setdefault(_PRIMITIVES_VARIABLE, str(_PRIMITIVES))


def keep_freed_memory(device: torch.device) -> None:
    """Lets the process keep freed memory on a CPU for its next tensors.

    By default glibc returns each freed block above 32 MiB to the operating system, which clears the
    pages of the next block. Batches with such tensors then take up to twice as long.

    In threads other than the main thread, blocks above 64 MiB are still returned, because such
    threads have heaps of that size.

    The call has no effect in three cases: another C library, a glibc before 2.35 (it rejects the
    value), or an environment that sets the same values.
    """
    if device.type != "cpu" or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is None:
        return
    threshold = min(_MOST_KEPT_BYTES, available_bytes() // 16)
    if threshold > _GLIBC_KEPT_BYTES and mallopt(_MMAP_THRESHOLD, threshold):
        mallopt(_TRIM_THRESHOLD, threshold)


def cache_bytes(mib: int, device: torch.device) -> int:
    """Returns the number of bytes for the key-value cache: `mib`, or a share of the free memory if
    `mib` is 0. Raises ConfigError if `mib` is more than the free memory.

    The share is small on a CPU, because other programs use the memory too. There the operating
    system allocates a part of the cache only when it is first written. On a GPU the share is large,
    and is allocated at once.
    """
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else available_bytes()
    if mib << 20 > free:
        raise ConfigError(
            f"runtime.cache_mib: {mib} MiB, but only {free >> 20} MiB are free on {device}; "
            "set a smaller value, or 0 for a share of the free memory"
        )
    if mib:
        return mib << 20
    return cuda_cache_bytes(free) if on_gpu else int(free * _CPU_SHARE)


@contextmanager
def enough_memory(device: torch.device) -> Iterator[None]:
    """Context of the loading of a model, which allocates its cache, weights and CUDA graphs. It
    raises ConfigError if the memory of the GPU is used up.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device)[0] >> 20
        size = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        raise ConfigError(
            f"runtime.cache_mib: {device} has no room for {size[1] if size else 'a tensor'} "
            f"of the model or its CUDA graphs beside the cache, because only {free} MiB are free; "
            "set a smaller value, or a smaller limits.streams"
        ) from error


def available_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that this process may still allocate: the free memory on the host, or in
    its container (cgroup) if that is less.

    The operating system's file cache counts as free in both numbers, because it is dropped when
    memory is needed.
    """
    free = 1024 * _number("MemAvailable:", root / "proc/meminfo")
    for folder, limit, used in _CGROUPS:
        try:
            most, used_bytes = (int((root / folder / name).read_text()) for name in (limit, used))
            files = sum(
                _number(f"{kind}_file", root / folder / "memory.stat")
                for kind in ("active", "inactive")
            )
        except (OSError, ValueError, IndexError):  # no such cgroup, or its limit is the word "max"
            continue
        free = min(free, max(0, most - used_bytes + files))
    return free


def usable_cores(root: Path = Path("/")) -> int:
    """Returns the CPU cores that this process may use, or the whole cores of the quota of its
    container (cgroup) if they are fewer; at least 1.
    """
    cores = len(os.sched_getaffinity(0))
    for files in _CGROUP_QUOTAS:
        try:
            quota, period = (
                int(word) for file in files for word in (root / file).read_text().split()
            )
        except (OSError, ValueError):  # no such cgroup, or its quota is the word "max"
            continue
        if quota > 0 and period > 0:  # version 1 has a quota of -1 for no limit
            cores = min(cores, max(1, quota // period))
    return cores


def cpu_threads() -> int:
    """Returns the number of threads for one operation on a CPU: that of torch (OMP_NUM_THREADS), or
    `usable_cores` if they are fewer. More threads than a quota allows would wait for each other.
    """
    return min(torch.get_num_threads(), usable_cores())


def _number(name: str, file: Path) -> int:
    return int(re.findall(rf"^{name} +(\d+)", file.read_text(), re.MULTILINE)[0])


def cuda_cache_bytes(free: int) -> int:
    """Returns the cache's part of a GPU's free bytes."""
    return int(max(min(_CUDA_SHARE * free, free - _CUDA_REST), free / 2))


def check_device(device: torch.device, cause: BaseException) -> None:
    """Raises DeviceLostError, from the `cause`, if a GPU no longer works after an error.

    After an illegal memory access or a failed assertion in a kernel, every later CUDA call of the
    process fails, until the process ends.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        reason = one_line(error)[:200]
        raise DeviceLostError(
            f"backend: this process can no longer use the GPU: {reason}"
        ) from cause
