"""Frames between the engine and the front, of any size and at any time."""

from __future__ import annotations

import socket

import pytest

from token2wav_server.engine.connection import Connection


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
def test_what_the_other_side_has_read_is_not_unsent(size: int) -> None:
    """Else a client that answers its audio at once is refused, because it has sent too much."""
    own, other = socket.socketpair()
    connection = Connection(own)
    stream = other.makefile("rb")
    for index in range(100):
        for _ in range(3):
            connection.send(bytes([index]) * size)
        assert stream.read(3 * size) == bytes([index]) * (3 * size)
        assert connection.unsent == 0
    connection.close()
    assert not stream.read()
