"""Device of a model: exact arithmetic, the current GPU, its loss, free memory, CUDA graphs."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from testkit.models.tiny_model import TINY
from testkit.rigs.processes import finished
from token2wav import RuntimeConfig, StreamConfig, Token2Wav, assembly
from token2wav.errors import ConfigError, DeviceLostError
from token2wav.execution.device import (
    available_bytes,
    cache_bytes,
    check_device,
    cuda_cache_bytes,
    entered,
    keep_arithmetic_exact,
    keep_compiled_operations,
    usable_cores,
)
from token2wav.families.cosyvoice3 import CosyVoice3Config

ROUNDINGS = {"cudnn TF32", "matmul TF32", "float16 sums"}


def roundings() -> set[str]:
    """Returns the names of the inexact kinds of arithmetic that torch is allowed to use."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    allowed = (cudnn.allow_tf32, matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction)
    return {
        name
        for name, on in zip(("cudnn TF32", "matmul TF32", "float16 sums"), allowed, strict=True)
        if on
    }


@pytest.fixture(autouse=True)
def _all_allowed() -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction
    cudnn.allow_tf32 = matmul.allow_tf32 = matmul.allow_fp16_reduced_precision_reduction = True
    yield
    cudnn.allow_tf32, matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize(("name", "left"), [("cuda", set()), ("cuda:1", set()), ("cpu", ROUNDINGS)])
def test_roundings_are_turned_off_for_a_gpu_only(name: str, left: set[str]) -> None:
    keep_arithmetic_exact(torch.device(name))
    assert roundings() == left


@pytest.mark.parametrize(
    ("device", "before", "after"), [("cpu", "", "16384"), ("cpu", "9", "9"), ("cuda", "", None)]
)
def test_size_of_the_cache_of_compiled_operations(
    device: str, before: str, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv(variable, before)  # so that it is restored after the test
    if not before:
        monkeypatch.delenv(variable)
    keep_compiled_operations(torch.device(device))
    assert os.environ.get(variable) == after


def _has_recent_glibc() -> bool:
    name, version = platform.libc_ver()
    return name == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)


# Prints the number of pages that the system cleared for eight tensors of 48 MiB, one after another.
# A few tensors before them take new memory.
PAGE_FAULTS = """
import resource, torch
from token2wav.execution.device import keep_freed_memory
keep_freed_memory(torch.device("cpu"))
for turn in range(24):
    if turn == 16:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**variables: str) -> int:
    removed = ("MALLOC_", "GLIBC_TUNABLES")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(removed)}
    completed = finished(sys.executable, "-c", PAGE_FAULTS, env=environment | variables)
    assert completed.returncode == 0, completed.stderr
    return int(completed.stdout)


@pytest.mark.skipif(not _has_recent_glibc(), reason="needs glibc 2.35")
def test_malloc_keeps_freed_memory_by_default() -> None:
    least = 4 * page_faults()
    assert least < page_faults(MALLOC_TRIM_THRESHOLD_="131072")
    assert least < page_faults(GLIBC_TUNABLES="glibc.malloc.top_pad=0")


def test_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact arithmetic is set before a load, because a load records CUDA graphs."""

    def load(*_: object) -> None:
        assert not roundings()
        raise InterruptedError

    monkeypatch.setattr(assembly, "load_network", load)
    monkeypatch.setattr(assembly, "device_named", lambda name: torch.device("cuda"))
    monkeypatch.setattr(assembly, "entered", lambda device: nullcontext())
    monkeypatch.setattr(assembly, "graphs_enabled", lambda device: False)
    with pytest.raises(InterruptedError):
        assembly.assemble(
            TINY, CosyVoice3Config.read(TINY), StreamConfig(), RuntimeConfig(backend="torch")
        )


def test_work_goes_to_the_gpu_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []

    @contextmanager
    def enter(name: torch.device) -> Iterator[None]:
        current.append(name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", enter)
    with entered(torch.device("cuda:1")):
        assert current == [torch.device("cuda:1")]
    with entered(torch.device("cpu")):
        assert not current


def test_a_lost_gpu_is_distinguished_from_other_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    cause = RuntimeError("out of memory")
    check_device(torch.device("cpu"), cause)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    check_device(torch.device("cuda"), cause)

    def refuse(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(
        DeviceLostError, match="this process can no longer use the GPU: CUDA error: an illegal"
    ) as lost:
        check_device(torch.device("cuda"), cause)
    assert lost.value.__cause__ is cause


@pytest.mark.parametrize(("free_gib", "cache_gib"), [(130, 104), (22, 17.6), (10, 6), (6, 3)])
def test_the_cache_leaves_room_for_graphs(free_gib: float, cache_gib: float) -> None:
    assert cuda_cache_bytes(int(free_gib * 2**30)) / 2**30 == pytest.approx(cache_gib)


@pytest.mark.parametrize(
    ("cgroup", "available_mib"),
    [
        ({}, 8000),
        ({"memory.max": "max", "memory.current": 900}, 8000),
        ({"memory.max": 2000, "memory.current": 900}, 2000 - 900 + 300),
        ({"memory.max": 20000, "memory.current": 900}, 8000),
        ({"memory.max": 800, "memory.current": 1200}, 0),
        (
            {"memory/memory.limit_in_bytes": 1000, "memory/memory.usage_in_bytes": 900},
            1000 - 900 + 300,
        ),
    ],
    ids=["no limits", "unlimited", "limited", "more than the host has", "lowered", "version 1"],
)
def test_free_memory_of_a_cpu_respects_host_and_container(
    tmp_path: Path, cgroup: dict[str, int | str], available_mib: int
) -> None:
    (tmp_path / "proc").mkdir()
    text = f"MemTotal:  99999 kB\nMemFree:  1024 kB\nMemAvailable:  {8000 << 10} kB\n"
    (tmp_path / "proc/meminfo").write_text(text)
    for name, value in cgroup.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value if value == 'max' else int(value) << 20}\n")
        (file.parent / "memory.stat").write_text(
            f"anon 5\ninactive_file {100 << 20}\nactive_file {200 << 20}\n"
        )
    assert available_bytes(tmp_path) == available_mib << 20


@pytest.mark.parametrize(
    ("cgroup", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_the_cpu_quota_of_a_container_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, value in cgroup.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    assert usable_cores(tmp_path) == cores


def test_a_cache_that_does_not_fit_into_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("token2wav.execution.device.available_bytes", lambda: 800 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (300 << 20, 1000 << 20))
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    assert [cache_bytes(mib, cpu) >> 20 for mib in (0, 1, 800)] == [200, 1, 800]
    assert cache_bytes(300, gpu) == 300 << 20
    with pytest.raises(
        ConfigError,
        match=r"^runtime\.cache_mib: 801 MiB, but only 800 MiB are free on cpu; set",
    ):
        cache_bytes(801, cpu)
    with pytest.raises(
        ConfigError, match=r"^runtime\.cache_mib: 301 MiB, but only 300 MiB are free on cuda:1"
    ):
        cache_bytes(301, gpu)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", "2.50 GiB"), ("", "a tensor")],
)
def test_a_model_that_does_not_fit_into_free_memory(
    error: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError(error)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (300 << 20, 1000 << 20))
    monkeypatch.setattr("token2wav.execution.runner.BucketRunner", full)
    with pytest.raises(ConfigError) as caught:
        Token2Wav.load(TINY)
    assert str(caught.value) == (
        f"runtime.cache_mib: cpu has no room for {wanted} of the model or its CUDA graphs beside "
        "the cache, because only 300 MiB are free; set a smaller value, or a smaller limits.streams"
    )


def test_a_model_is_summed_up_in_three_lines() -> None:
    model = Token2Wav.load(TINY, runtime=RuntimeConfig(device="cpu"))
    assert str(model).splitlines() == [
        f"model    {TINY} (cosyvoice3), 25 tokens and 24000 samples per second",
        "device   cpu",
        "backend  torch, float32",
    ]
