from __future__ import annotations

from token2wav_server.back_off import BackOff


def test_pauses_double_until_it_is_given_up() -> None:
    back_off = BackOff(limit=5)
    assert [back_off.failed(1.0, served=False) for _ in range(6)] == [0.0, 1.0, 2.0, 4.0, 8.0, None]


def test_a_server_that_lasted_starts_anew() -> None:
    back_off = BackOff(limit=2)
    pauses = [back_off.failed(lasted_s, served=False) for lasted_s in (0.0, 0.0, 61.0, 0.0, 0.0)]
    assert pauses == [0.0, 1.0, 0.0, 1.0, None]


def test_servers_that_served_are_never_given_up_and_their_pauses_grow_to_a_bound() -> None:
    back_off = BackOff(limit=1)
    pauses = [back_off.failed(5.0, served=True) for _ in range(9)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert back_off.failed(0.0, served=False) is None


def test_no_restarts() -> None:
    assert BackOff(limit=0).failed(1000.0, served=True) is None
