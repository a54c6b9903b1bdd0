"""Sections of the GPU report that run other programs: tests, and NVIDIA's tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import pytest_rows, sections
from benchmarks.gpu.pytest_rows import rows_of_tests
from benchmarks.gpu.settings import LeftOut, Settings
from benchmarks.gpu.tools import counters, kernel_counters, sanitizer

# in two parts, because the report looks for files that contain the whole name
MARK = "pytest.mark" + ".gpu"
COMPARISONS = """
import time

import pytest
import torch

pytestmark = MARK


@pytest.mark.parametrize("error", [0.25, 0.5, 0.125])
def test_numbers(error):
    assert error <= 1.0


def test_tensors():
    torch.testing.assert_close(torch.ones(2) + 0.5, torch.ones(2), atol=2.0, rtol=0.0)


def test_beyond():
    assert 3.0 <= 2.0
"""
SLOW = """
import time
from pathlib import Path

import pytest


@MARK
def test_slow():
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder that stands for the root of the project."""
    monkeypatch.setattr(pytest_rows, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(sections.__file__).parents[2]))
    # The options may name plugins that the new PYTHONPATH does not have.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    (tmp_path / "tests").mkdir()
    return tmp_path / "tests"


def test_errors_are_recorded_and_rows_come_as_files_end(folder: Path) -> None:
    paths = [folder / "test_slow.py", folder / "test_errors.py"]
    for path, text in zip(paths, (SLOW, COMPARISONS), strict=True):
        path.write_text(text.replace("MARK", MARK))

    running = rows_of_tests(paths, {})
    key, measure = next(running)
    (folder / "go").touch()

    assert [key, *(name for name, _ in running)] == ["tests/test_errors.py", "tests/test_slow.py"]
    row = measure()
    assert row["passed"] == 4
    assert "test_beyond" in row["problem"]
    assert row["lines"] == [
        "tests/test_errors.py:12 test_numbers: 5.0e-01 of 1.0e+00",
        "tests/test_errors.py:16 test_tensors: 5.0e-01 of 2.0e+00",
        "tests/test_errors.py:20 test_beyond: 3.0e+00 of 2.0e+00",
    ]


def test_files_with_rows_do_not_run_again(folder: Path) -> None:
    (folder / "test_slow.py").write_text(SLOW.replace("MARK", MARK))
    assert not list(rows_of_tests([folder / "test_slow.py"], {"tests/test_slow.py": {}}))


def test_tools_that_are_missing_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for section, name in ((sanitizer, "compute-sanitizer"), (counters, "ncu")):
        with pytest.raises(LeftOut, match=f"not installed: {name}"):
            next(section(tmp_path, Settings(), {}))


def test_nsight_compute_locks_no_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that are lent forbid it."""
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "arguments"}\nexit 1\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    [(_, measure)] = counters(tmp_path, Settings(), {})
    with pytest.raises(LeftOut, match="ncu ended with 1"):
        measure()
    assert "--clock-control none" in (tmp_path / "arguments").read_text()


@pytest.mark.parametrize(
    ("content", "left_out"),
    [
        ("import no_such_package\n", True),
        ("def test_other():\n    pass\n\n\ndef test_it():\n    import no_such_package\n", False),
    ],
)
def test_a_missing_package_explains_only_a_file_without_tests(
    folder: Path, content: str, left_out: bool
) -> None:
    head = "import pytest\n\npytestmark = MARK\n\n\n".replace("MARK", MARK)
    (folder / "test_it.py").write_text(head + content)
    [(_, measure)] = rows_of_tests([folder / "test_it.py"], {})
    if left_out:
        with pytest.raises(LeftOut, match="not installed: no_such_package"):
            measure()
    else:
        row = measure()
        assert row["passed"] == 1
        assert "test_it: ModuleNotFoundError" in row["problem"].replace("\n", " ")


def test_counters_are_summed_by_kernel() -> None:
    names = (
        "gpu__time_duration.sum",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "launch__registers_per_thread",
    )
    table = [
        ("ID", "Kernel Name", *names),
        ("", "", "ns", "%", "%", "register/thread"),
        ("0", "_paged_attention", "2,000", "40", "10", "128"),
        ("1", "gemm", "9000", "80", "50", "96"),
        ("2", "_paged_attention", "4000", "60", "20", "128"),
    ]
    lines = [",".join(f'"{cell}"' for cell in row) for row in table]

    row = kernel_counters(lines)

    assert row["calls"] == 3
    assert row["kernels"] == [
        {
            "name": "gemm",
            "ms": 0.009,
            "calls": 1,
            "memory %": 80.0,
            "arithmetic %": 50.0,
            "registers": 96,
        },
        {
            "name": "_paged_attention",
            "ms": 0.006,
            "calls": 2,
            "memory %": 50.0,
            "arithmetic %": 15.0,
            "registers": 128,
        },
    ]
