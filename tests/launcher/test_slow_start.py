from __future__ import annotations

import time

import pytest

from token2wav_server.slow_start import told_if_slow


def test_shows_where_a_slow_start_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    with told_if_slow(seconds=0.05):
        hang_here()
    assert "in hang_here" in capfd.readouterr().err


def test_says_nothing_of_a_start_that_is_over(capfd: pytest.CaptureFixture[str]) -> None:
    with told_if_slow(seconds=0.3):
        pass
    time.sleep(0.6)
    assert capfd.readouterr().err == ""


def hang_here() -> None:
    time.sleep(0.5)
