"""Sections of the GPU report that run tests, and the section of engines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.gpu import pytest_rows, sections
from benchmarks.gpu.engines import engines
from benchmarks.gpu.pytest_rows import rows_of_tests
from benchmarks.gpu.settings import LeftOut, Settings
from testkit.models.golden import TINY

# in two parts, because the report looks for files that contain the whole name
MARK = "pytest.mark" + ".gpu"
COMPARISONS = """
import pytest

pytestmark = MARK


@pytest.mark.parametrize("error", [0.25, 0.5, 0.125])
def test_numbers(error):
    assert error <= 1.0


def test_beyond():
    assert 3.0 <= 2.0
"""
SLOW = """
import time
import shutil
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


def test_rows_come_as_files_end(folder: Path) -> None:
    paths = [folder / "test_slow.py", folder / "test_errors.py"]
    for path, text in zip(paths, (SLOW, COMPARISONS), strict=True):
        path.write_text(text.replace("MARK", MARK))

    running = rows_of_tests(paths, {})
    key, measure = next(running)
    (folder / "go").touch()

    assert [key, *(name for name, _ in running)] == ["tests/test_errors.py", "tests/test_slow.py"]
    row = measure()
    assert row["passed"] == 3
    assert "test_beyond" in row["problem"]


def test_files_with_rows_do_not_run_again(folder: Path) -> None:
    (folder / "test_slow.py").write_text(SLOW.replace("MARK", MARK))
    assert not list(rows_of_tests([folder / "test_slow.py"], {"tests/test_slow.py": {}}))


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


def test_an_engine_is_left_out_without_a_gpu_and_torch_is_timed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    settings = Settings(tmp_path, "cpu").rehearsal()
    rows = dict(engines(folder, settings, {}))

    assert list(rows)[:3] == ["ONNX step float32", "ONNX vocoder float32", "TensorRT step float16"]
    for step, reason in (
        ("verified", "TensorRT runs engines only on a GPU"),
        ("the model", "TensorRT runs engines only on a GPU"),
        ("1 streams, 25 tokens after 2 s", "the model was not loaded"),
    ):
        with pytest.raises(LeftOut, match=reason):
            rows[f"tensorrt float16: {step}"]()
    assert rows["torch float32: the model"]()["graphs"] == 0
    assert rows["torch float32: 1 streams, 25 tokens after 2 s"]()["total_ms"][0] > 0
