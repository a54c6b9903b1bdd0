"""Sequences of a server: an id has one owner from the first request of a stream to the last."""

from __future__ import annotations

import pytest

from token2wav.errors import InputError, StreamClosedError
from token2wav_server.sequences import Owner, Sequences

ALICE, BOB = Owner("alice", "key"), Owner("bob", "key")


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


def test_a_stream_is_found_by_its_owner_only() -> None:
    sequences: Sequences[str] = Sequences()
    assert sequences.started_by(1, ALICE) is None
    sequences.add(1, ALICE, "stream")
    assert sequences.find(1, ALICE) == sequences.started_by(1, ALICE) == "stream"
    with pytest.raises(InputError, match="'1' is an open stream of another client"):
        sequences.find(1, BOB)
    with pytest.raises(InputError, match="'1' is in use by an open stream of another client"):
        sequences.started_by(1, BOB)
    with pytest.raises(StreamClosedError, match="'2' is no open stream"):
        sequences.find(2, ALICE)


def test_a_stream_that_is_closed_late_does_not_take_the_id_of_the_next_one() -> None:
    sequences: Sequences[str] = Sequences()
    sequences.add(1, ALICE, "first")
    sequences.remove(1, "first", "it ended")
    with pytest.raises(StreamClosedError, match="it ended"):
        sequences.find(1, ALICE)
    sequences.add(1, BOB, "second")
    sequences.remove(1, "first", "it failed afterwards")
    assert sequences.find(1, BOB) == "second"


def test_reasons_of_a_thousand_closed_streams_are_kept() -> None:
    sequences: Sequences[int] = Sequences()
    for number in range(1, 3001):
        sequences.add(number, ALICE, number)
        sequences.remove(number, number, "it ended")
    with pytest.raises(StreamClosedError, match="it ended"):
        sequences.find(3000, ALICE)
    with pytest.raises(StreamClosedError, match="closed long ago"):
        sequences.find(1, ALICE)


def test_whole_utterances_have_no_id() -> None:
    sequences: Sequences[str] = Sequences()
    for nothing in (0, ""):
        sequences.add(nothing, ALICE, "whole")
        assert sequences.started_by(nothing, ALICE) is None
