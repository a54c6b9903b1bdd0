"""Checks of torch, of the driver and of GPUs, and of the packages that only a GPU needs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from token2wav_server.findings import Finding, error, ok, warning

# Distributions of the extras, and of the image of NVIDIA.
_TENSORRT = ("tensorrt-rtx-cu13", "tensorrt-cu13", "tensorrt")
_MIB = 1 << 20


def gpus() -> Iterator[Finding]:
    """Checks torch, the driver of NVIDIA, and every GPU."""
    torch = importlib.import_module("torch")
    from token2wav.execution.cuda_facts import driver_fact, missing_gpu

    made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
    yield ok(f"{torch.__version__}, for {made_for}", "torch")
    if not torch.cuda.is_available():
        if reason := missing_gpu():
            remedy = (
                "docs/deployment.md names the torch for each driver"
                if torch.version.cuda
                else "install the torch for CUDA, as docs/deployment.md shows"
            )
            yield warning(f"{reason}, so models run on the CPU; {remedy}", "driver")
        else:
            yield ok("no NVIDIA driver; models run on the CPU", "driver")
        return
    yield ok(driver_fact() or "an NVIDIA driver", "driver")
    for index in range(torch.cuda.device_count()):
        yield gpu(torch.device("cuda", index))


def gpu(device: Any) -> Finding:
    """Checks that torch can run on a GPU."""
    torch = importlib.import_module("torch")
    from token2wav.execution.cuda_facts import device_facts, driver_fact

    name = f"gpu {device.index or 0}"
    try:
        capability = torch.cuda.get_device_capability(device)
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as refusal:  # for example if its compute mode admits no further process
        reason = str(refusal).partition("\n")[0]
        return error(f"{reason}; check it with nvidia-smi", name)
    facts = [fact for fact in device_facts(device) if fact != driver_fact()]
    text = (
        f"{', '.join(facts)}, compute capability {capability[0]}.{capability[1]}, "
        f"{free / _MIB:,.0f} of {total / _MIB:,.0f} MiB free"
    )
    if not runs_on(capability, torch.cuda.get_arch_list()):
        return error(
            f"{text}: this torch has no code for it; install a torch whose release notes name this "
            "GPU, or set runtime.device: cpu",
            name,
        )
    return ok(text, name)


def runs_on(capability: tuple[int, int], architectures: Iterable[str]) -> bool:
    """Returns whether a GPU can run a torch.

    Args:
        architectures: the architectures of torch, such as `sm_90` (machine code) and `compute_120`
            (code that the driver translates for newer GPUs).
    """
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        digits = digits.rstrip("af")  # `sm_90a` has features of this GPU alone
        major, minor = int(digits[:-1]), int(digits[-1])
        newer = (major, minor) <= capability
        if newer and (kind == "compute" or major == capability[0]):
            return True
    return False


def kernels() -> Finding:
    """Checks whether the kernels of GPUs can run, which need the Triton language."""
    torch: Any = importlib.import_module("torch")
    release = _release("triton")
    if not torch.cuda.is_available():
        return ok(f"{release or 'not installed'}; only a GPU needs it")
    if release is None:
        return warning(
            "not installed, so models run without kernels; run: pip install 'token2wav[gpu]'"
        )
    from token2wav.backends import gpu_runs_kernels

    if not gpu_runs_kernels(torch.device("cuda", 0)):
        return warning(
            f"{release}, but models run without kernels: they need release 3.5, compute "
            "capability 8.0, a C compiler (gcc or clang) and the headers of Python"
        )
    return ok(release)


def tensorrt(names: Sequence[str] = _TENSORRT) -> Finding:
    """Reports which TensorRT is installed."""
    releases = [f"{name} {release}" for name in names if (release := _release(name))]
    installed = ", ".join(releases) or "not installed"
    return ok(f"{installed}; only runtime.backend: tensorrt needs it")


def _release(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
