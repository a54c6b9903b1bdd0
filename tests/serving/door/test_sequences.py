"""Sequences of a server: an id has one owner from the first request of a stream to the last."""

from __future__ import annotations

import pytest

from testkit.replies import FakeClock
from token2wav.errors import InputError, StreamClosedError
from token2wav.serving.door.sequences import Owner, Sequences

ALICE, BOB = Owner("alice", "key"), Owner("bob", "key")
NOBODY = Owner()


def test_owners_are_distinguished_by_name_and_key() -> None:
    assert ALICE.owns(Owner("alice", "key"))
    assert Owner().owns(Owner())
    for other in (
        BOB,
        Owner("alice"),
        Owner("alice", "Key"),
        Owner("", "key"),
        Owner("alice", "ключ"),
    ):
        assert not ALICE.owns(other)
    assert "key" not in repr(ALICE).replace("stream_key", "")


def test_one_warning_of_streams_that_anybody_can_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sequences: Sequences[str] = Sequences(30.0)
    for sequence_id, owner in ((1, ALICE), (2, Owner("", "key")), (3, Owner("alice")), (0, NOBODY)):
        sequences.add(sequence_id, owner, "stream")
    assert not caplog.records
    for sequence_id in (4, 5):
        sequences.add(sequence_id, NOBODY, "stream")
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "without the request parameter stream_key" in record.message


def test_a_late_close_leaves_the_id_of_the_next_stream() -> None:
    sequences: Sequences[str] = Sequences(30.0)
    sequences.add(1, ALICE, "first")
    sequences.remove(1, "first", "it ended")
    with pytest.raises(StreamClosedError, match="it ended"):
        sequences.find(1, ALICE)
    sequences.add(1, BOB, "second")
    sequences.remove(1, "first", "it failed afterwards")
    assert sequences.find(1, BOB) == "second"


def test_reasons_of_a_thousand_closed_streams_are_kept() -> None:
    sequences: Sequences[int] = Sequences(30.0)
    for number in range(1, 3001):
        sequences.add(number, ALICE, number)
        sequences.remove(number, number, "it ended")
    with pytest.raises(StreamClosedError, match="it ended"):
        sequences.find(3000, ALICE)
    with pytest.raises(StreamClosedError, match="closed long ago"):
        sequences.find(1, ALICE)


def test_a_contested_id_is_refused_while_requests_arrive() -> None:
    """Tokens of the first client must not become audio of a client that starts the id later."""
    clock = FakeClock()
    sequences: Sequences[str] = Sequences(30.0, clock)
    sequences.add(1, NOBODY, "first")
    assert sequences.started_by(1, NOBODY) == "first"
    error = sequences.start_twice(1, NOBODY)
    sequences.remove(1, "first", str(error))
    for _ in range(3):
        clock.now += 20
        with pytest.raises(InputError, match="choose another id"):
            sequences.started_by(1, NOBODY)
        clock.now += 20
        with pytest.raises(StreamClosedError, match="choose another id"):
            sequences.find(1, NOBODY)  # the first client still sends tokens
    # The tokens of the first client cannot reach a stream that has a key.
    assert sequences.started_by(1, ALICE) is None
    assert sequences.started_by(2, NOBODY) is None
    clock.now += 31
    assert sequences.started_by(1, NOBODY) is None


def test_contested_ids_are_bounded() -> None:
    sequences: Sequences[int] = Sequences(30.0, FakeClock())
    for number in range(1, 10_001):
        sequences.start_twice(number, NOBODY)
    assert sequences.started_by(1, NOBODY) is None
    with pytest.raises(InputError, match="'10000' was started a second time"):
        sequences.started_by(10_000, NOBODY)
