"""Folders in /tmp that killed Python backends leave: the last server of a machine removes them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from token2wav_server.launcher import reaper


@pytest.fixture
def backend_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="python_env_", dir="/tmp"))
    yield folder
    if folder.exists():
        folder.rmdir()


@pytest.mark.parametrize("servers", [set(), {1}])
def test_folders_stay_while_another_server_may_need_them(
    servers: set[int], backend_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaper, "running_servers", lambda: servers)
    monkeypatch.setattr(
        Path, "glob", lambda self, _: [backend_folder] if self == Path("/tmp") else []
    )
    private = tmp_path / "server"
    private.mkdir()
    for _ in range(2):
        reaper.remove_leftovers(private, "nobody's segments")
        assert backend_folder.exists() == bool(servers)
        assert not private.exists()
