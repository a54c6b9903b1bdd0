"""Facts from the driver, with and without cuda-python. No test here needs a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from token2wav.errors import ConfigError
from token2wav.execution import cuda_facts, device

GPU = torch.device("cuda:1")


class FakeDriver:
    """Driver of a GPU in exclusive mode. Its interface has the names of the real bindings.

    Attributes:
        calls: names and arguments of all calls.
        fails: names of functions that return an error.
    """

    def __init__(self, real: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.CUresult, self.CUdevice_attribute = real.CUresult, real.CUdevice_attribute
        results: dict[str, tuple[Any, ...]] = {
            "cuDriverGetVersion": (12040,),
            "cuDeviceGetAttribute": (3,),
            "cuGraphUpload": (),
            "cuStreamGetCaptureInfo": ("active", 1, "graph", [], [], 0),
            "cuGraphGetNodes": ([], 216),
        }
        for name, result in results.items():
            assert hasattr(real, name)
            setattr(self, name, self._function(name, result))

    def _function(self, name: str, result: tuple[Any, ...]) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            failed = name in self.fails
            kind = self.CUresult
            return (kind.CUDA_ERROR_INVALID_VALUE if failed else kind.CUDA_SUCCESS, *result)

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    real = pytest.importorskip("cuda.bindings.driver", reason="needs: pip install cuda-bindings")
    fake = FakeDriver(real)
    monkeypatch.setattr(cuda_facts, "_bindings", lambda: fake)
    return fake


def a_graph() -> Any:
    return SimpleNamespace(raw_cuda_graph_exec=lambda: 42)


def with_driver(root: Path, line: str) -> Path:
    file = root / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(f"{line}\nGCC version: gcc 12.3.0\n")
    return root


def test_upload_of_a_graph(driver: FakeDriver) -> None:
    assert cuda_facts.uploaded(a_graph(), 7)
    assert driver.calls == [("cuGraphUpload", 42, 7)]
    driver.fails = {"cuGraphUpload"}
    assert not cuda_facts.uploaded(a_graph(), 7)
    older: Any = object()  # older releases of torch do not give the handle
    assert not cuda_facts.uploaded(older, 7)


def test_nodes_of_a_capture(driver: FakeDriver) -> None:
    assert cuda_facts.nodes_in_capture(7) == 216
    assert driver.calls[-1] == ("cuGraphGetNodes", "graph", 0)
    driver.fails = {"cuStreamGetCaptureInfo"}
    assert cuda_facts.nodes_in_capture(7) is None


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024", "550.54.15"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
        ),
    ],
)
def test_version_of_the_driver(driver: FakeDriver, tmp_path: Path, line: str, version: str) -> None:
    root = with_driver(tmp_path, line)
    assert cuda_facts.driver_fact(root) == f"driver {version} for CUDA 12.4"
    driver.fails = {"cuDriverGetVersion"}
    assert cuda_facts.driver_fact(root) == f"driver {version}"


def test_facts_about_a_gpu(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 MIG 1g.10gb")
    monkeypatch.setattr(cuda_facts, "driver_fact", lambda: "driver 580.65.06 for CUDA 13.0")
    assert cuda_facts.device_facts(GPU) == [
        "NVIDIA H100 MIG 1g.10gb",
        "driver 580.65.06 for CUDA 13.0",
        "compute mode exclusive process",
    ]
    assert driver.calls[-1][2] == 1  # of this GPU


@pytest.mark.parametrize(
    ("made_for", "reason"), [("13.0", "made for CUDA 13.0"), (None, "made for CPUs")]
)
def test_a_driver_that_is_too_old_for_torch(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    made_for: str | None,
    reason: str,
) -> None:
    root = with_driver(tmp_path, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15")
    monkeypatch.setattr(torch.version, "cuda", made_for)
    expected = f"driver 550.54.15 for CUDA 12.4, but this torch is {reason}"
    assert cuda_facts.missing_gpu(root) == expected
    assert cuda_facts.missing_gpu(tmp_path / "nothing") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(device, "missing_gpu", lambda: expected)
    with pytest.raises(ConfigError, match=f"torch finds 0 GPUs: {expected}"):
        device.device_named("cuda")
    assert device.device_named("auto") == torch.device("cpu")
    assert f"so the model runs on the CPU: {expected}" in caplog.text


def test_without_cuda_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_facts, "_bindings", lambda: None)
    assert not cuda_facts.uploaded(a_graph(), 7)
    assert cuda_facts.nodes_in_capture(7) is None
    assert cuda_facts.driver_fact(tmp_path) == ""
    root = with_driver(tmp_path, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15")
    assert cuda_facts.driver_fact(root) == "driver 550.54.15"
