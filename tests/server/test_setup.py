"""Command `token2wav setup`: it says what it does, and repeats nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from token2wav.commands import main
from token2wav_server import setup
from token2wav_server.launcher import binaries


def test_it_repeats_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The environment of the tests has tritonserver already."""
    assert main(["setup"]) == 0
    assert capsys.readouterr().out.startswith(
        f"token2wav setup: {binaries.WHEEL} is already in {binaries.WHEEL_FOLDER}\n"
    )


def test_pip_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "WHEEL_FOLDER", tmp_path / "triton")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["setup"]) == 3
    shown = capfd.readouterr()
    assert shown.out.startswith(f"token2wav setup: installing {binaries.WHEEL} into {tmp_path}")
    assert shown.err.endswith(
        f"token2wav setup: error: {binaries.WHEEL} was not installed, see above\n"
    )
