"""Folders in /tmp that a killed Python backend leaves: removed with its server, unless they may be of another one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from token2wav_server.launcher import reaper

STARTED = 1e9  # seconds since the epoch: no server of this machine is as old


@pytest.fixture
def backend_folder() -> Iterator[Path]:
    """Made two seconds after the server started."""
    folder = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
    os.utime(folder, (STARTED + 2, STARTED + 2))
    yield folder
    if folder.exists():
        folder.rmdir()


@pytest.fixture
def private_folder(tmp_path: Path) -> Path:
    """The server's own."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / reaper.PID_FILE).write_text("1")
    os.utime(folder / reaper.PID_FILE, (STARTED, STARTED))
    return folder


def test_it_goes_with_its_server(backend_folder: Path, private_folder: Path) -> None:
    for _ in range(2):
        reaper.remove_leftovers(private_folder, "nobody's segments")
        assert not backend_folder.exists()
        assert not private_folder.exists()


@pytest.mark.parametrize(("other_started", "stays"), [(1.0, True), (-10.0, True), (20.0, False), (-60.0, False)])
def test_it_stays_if_it_may_be_of_a_running_server(
    other_started: float, stays: bool, backend_folder: Path, private_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "running_servers", lambda: {1: STARTED + other_started})
    reaper.remove_leftovers(private_folder, "nobody's segments")
    assert backend_folder.exists() == stays
    assert not private_folder.exists()
