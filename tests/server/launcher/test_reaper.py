"""Folders in /tmp that killed Python backends leave: the last server of a machine removes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from token2wav_server.launcher import reaper


@pytest.mark.parametrize("servers", [set(), {1}])
def test_folders_stay_while_another_server_may_need_them(
    servers: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (backend_folder := tmp_path / "python_env_1").mkdir()
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
