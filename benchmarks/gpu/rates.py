"""How fast this device reads memory and multiplies matrices: the rates of the floor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import synchronize

_SECONDS = 0.2  # of each measurement, at least
_LEAST_CALLS = 3


def measure(device: torch.device, copy_mib: int, matrix: int) -> dict[str, Any]:
    """Best of several calls each, for a floor is what nothing can beat.

    Args:
        device: to measure.
        copy_mib: size of the tensors that are read and written.
        matrix: rows and columns of those that are multiplied.
    """
    return {
        "copy_mib": copy_mib,
        "matrix": matrix,
        "bytes_per_s": bandwidth(device, copy_mib << 20),
        "operations_per_s": products(device, matrix),
    }


def bandwidth(device: torch.device, size: int) -> dict[str, float]:
    """Bytes read and written per second: a copy (one read, one written) and a triad (two read, one written)."""
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    copy = best_seconds(lambda: b.copy_(a), device)
    triad = best_seconds(lambda: torch.add(a, b, alpha=2.0, out=c), device)
    return {"copy": 2 * size / copy, "triad": 3 * size / triad}


def products(device: torch.device, size: int) -> dict[str, float]:
    """Operations per second of square matrix products, by type; tf32 is float32 with its products rounded."""
    operations, rates = 2.0 * size**3, {}
    for name, dtype, tf32 in (
        ("float16", torch.float16, False),
        ("tf32", torch.float32, True),
        ("float32", torch.float32, False),
        ("float64", torch.float64, False),
    ):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        with _tf32(tf32):
            rates[name] = operations / best_seconds(partial(torch.mm, a, b, out=out), device)
    return rates


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of calls that go on for a while."""
    work()
    synchronize(device)
    times: list[float] = []
    while sum(times) < _SECONDS or len(times) < _LEAST_CALLS:
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
