from __future__ import annotations

from token2wav_server.back_off import BackOff


def test_pauses_double_until_it_is_given_up() -> None:
    back_off = BackOff(limit=5)
    assert [back_off.failed(lasted_s=1.0) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 8.0, None]


def test_a_server_that_lasted_starts_anew() -> None:
    back_off = BackOff(limit=2)
    assert [back_off.failed(lasted_s) for lasted_s in (0.0, 0.0, 61.0, 0.0, 0.0)] == [0.0, 1.0, 0.0, 1.0, None]


def test_no_restarts() -> None:
    assert BackOff(limit=0).failed(lasted_s=1000.0) is None
