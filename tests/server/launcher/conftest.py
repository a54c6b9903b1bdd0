from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""

MODEL = """
import os, signal, sys, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        raise NotImplementedError
"""

CRASH = """
        open({starts!r}, 'a').write('.')
        if os.path.getsize({starts!r}) <= {times}:
            os.kill(os.getppid(), signal.SIGABRT)
            time.sleep(60)
"""


@pytest.fixture(autouse=True)
def private_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes this process and its children create temporary files in a folder of the test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Creates a model repository. Its model writes its start parameters into ``started.txt``."""
    notes = tmp_path / "started.txt"
    names = '"TOKEN2WAV_MODEL", "TOKEN2WAV_CONFIG"'
    return _repository(
        tmp_path,
        f"open({str(notes)!r}, 'w').write(repr([sys.prefix, *map(os.environ.get, ({names}))]))",
    )


@pytest.fixture
def failing_repository(tmp_path: Path) -> Path:
    """Creates a model repository with a model that raises an error when it is loaded."""
    return _repository(tmp_path, "raise ValueError('hop of 7 tokens: must be a multiple of 25')")


@pytest.fixture
def crashing_repository(tmp_path: Path) -> Callable[[int], Path]:
    """Returns a function that creates a repository with a crashing model.

    The model kills the server at each of its first `times` loads.
    """
    return lambda times: _repository(
        tmp_path, CRASH.format(starts=str(tmp_path / "starts"), times=times)
    )


def _repository(folder: Path, initialize: str) -> Path:
    version = folder / "repository" / "echo" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(MODEL.format(initialize=initialize))
    return version.parent.parent
