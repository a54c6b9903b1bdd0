from __future__ import annotations

import subprocess
import sys
import time

import pytest

from token2wav_server.model_process import DEVICE_LOST_STATUS, told_if_slow


def test_shows_where_a_slow_start_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    with told_if_slow(seconds=0.05):
        hang_here()
    assert "in hang_here" in capfd.readouterr().err


def test_says_nothing_of_a_start_that_is_over(capfd: pytest.CaptureFixture[str]) -> None:
    with told_if_slow(seconds=0.3):
        pass
    time.sleep(0.6)
    assert capfd.readouterr().err == ""


def test_ends_itself_when_its_gpu_is_lost() -> None:
    code = "import time; from token2wav_server.model_process import end_process; end_process(); time.sleep(600)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == DEVICE_LOST_STATUS


def hang_here() -> None:
    time.sleep(0.5)
