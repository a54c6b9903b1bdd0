"""A stream belongs to the client that started it: other clients with its id get none of its audio,
and cost it none. `tests/served/test_takeover.py` sends the same attacks to a real server.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from testkit.door import Door, audio_of
from testkit.models.tiny_model import demo_tokens
from testkit.replies import FIRST, Expected, FakeClock
from testkit.takeover import ATTACKS, IDENTITIES, NOBODY, Attack, Identity
from token2wav import Token2Wav, Voice
from token2wav.errors import InputError, StreamClosedError
from token2wav.serving.door.sequences import Owner, Sequences

TOKENS = 40
REFUSED = "is in use by an open stream of another client; choose another id at random"
CONTESTED = "was started a second time while its stream was open, by a client that sent no"
NOT_YOURS = "is an open stream of another client"


@pytest.fixture
def door(model: Token2Wav) -> Iterator[Door]:
    with Door.open(model) as door:
        yield door


def attacked(door: Door, voice: Voice, attack: Attack, attacker: Identity) -> list[str]:
    """Returns the errors of an attack on the stream 21."""
    return [
        door.refusal(
            tokens,
            voice if start else None,
            21,
            start=start,
            end=end,
            parameters=attacker.parameters(header=True),
        )
        for tokens, start, end in attack.requests()
    ]


@pytest.mark.parametrize("keep_open", [False, True])
@pytest.mark.parametrize("identities", IDENTITIES.values(), ids=IDENTITIES)
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_no_audio_for_attackers_and_no_loss_for_victims(
    door: Door,
    voice: Voice,
    expected: Expected,
    attack: Attack,
    identities: tuple[Identity, Identity],
    keep_open: bool,
) -> None:
    victim, attacker = identities
    mine, tokens = victim.parameters(header=True), demo_tokens(TOKENS)
    first = mine | {"keep_open": keep_open}
    begun = door.send(tokens[:FIRST], voice, 21, start=True, parameters=first)
    refusal, *rest = attacked(door, voice, attack, attacker)
    assert refusal.startswith(f"sequence_id: '21' {REFUSED if attack.start else NOT_YOURS}")
    assert all(other.startswith(f"sequence_id: '21' {NOT_YOURS}") for other in rest)
    ended = door.send(tokens[FIRST:], None, 21, end=True, parameters=mine)
    assert np.array_equal(audio_of([begun, ended]), expected(TOKENS))


@pytest.mark.parametrize("keep_open", [False, True])
def test_two_clients_without_name_and_key_with_one_id(
    door: Door, voice: Voice, keep_open: bool
) -> None:
    """The server cannot tell them apart, so the stream is closed before a token of the second
    client reaches it. The first client may still send tokens, which must not become audio of
    another stream.
    """
    tokens, kept = demo_tokens(TOKENS), {"keep_open": keep_open}
    begun = door.send(tokens[:FIRST], voice, 21, start=True, parameters=kept)
    errors = attacked(door, voice, ATTACKS[0], NOBODY)
    errors += [door.refusal(tokens[FIRST:], None, 21, end=True)]
    errors += [door.refusal([1, 2, 3], voice, 21, start=True) for _ in range(3)]
    if keep_open:
        errors.append(str(begun.failed()))
    assert all(f"'21' {CONTESTED}" in error for error in errors)
    assert all("choose another id at random" in error for error in errors)
    assert sum(len(chunk.audio) for chunk in begun.chunks) <= TOKENS * 960


def test_a_second_start_of_the_same_client_closes_its_stream(door: Door, voice: Voice) -> None:
    mine = Identity(key="mine").parameters(header=True)
    door.send(demo_tokens(FIRST), voice, "again", start=True, parameters=mine).succeeded()
    second = door.refusal(demo_tokens(FIRST), voice, "again", start=True, parameters=mine)
    late = door.refusal([1], None, "again", end=True, parameters=mine)
    assert "'again' was started a second time" in second
    assert second in late
    spoken = door.send([1], voice, "again", start=True, end=True, parameters=mine)
    assert audio_of([spoken]).shape == (960,)


def test_an_id_is_free_as_soon_as_the_last_request_is_there(door: Door, voice: Voice) -> None:
    """The next stream of the id may begin while the last audio is still being computed."""
    tokens = demo_tokens(60)
    streams = [
        [
            door.send(tokens[:30], voice, 21, start=True),
            door.send(tokens[30:], None, 21, end=True),
        ]
        for _ in range(4)
    ]
    assert [len(audio_of(stream)) for stream in streams] == [60 * 960] * 4


# Registry of the open streams.

ALICE, ANYBODY = Owner("alice", "key"), Owner()


def test_a_key_may_be_any_text_and_is_never_printed() -> None:
    assert not ALICE.owns(Owner("alice", "ключ"))
    assert "key" not in repr(ALICE).replace("stream_key", "")


def test_one_warning_of_streams_that_anybody_can_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sequences: Sequences[str] = Sequences(30.0)
    for sequence_id, owner in (
        (1, ALICE),
        (2, Owner("", "key")),
        (3, Owner("alice")),
        (0, ANYBODY),
    ):
        sequences.add(sequence_id, owner, "stream")
    assert not caplog.records
    for sequence_id in (4, 5):
        sequences.add(sequence_id, ANYBODY, "stream")
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "without the request parameter stream_key" in record.message


def test_a_late_close_leaves_the_id_of_the_next_stream() -> None:
    sequences: Sequences[str] = Sequences(30.0)
    bob = Owner("bob", "key")
    sequences.add(1, ALICE, "first")
    sequences.remove(1, "first", "it ended")
    with pytest.raises(StreamClosedError, match="it ended"):
        sequences.find(1, ALICE)
    sequences.add(1, bob, "second")
    sequences.remove(1, "first", "it failed afterwards")
    assert sequences.find(1, bob) == "second"


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
    sequences.add(1, ANYBODY, "first")
    assert sequences.started_by(1, ANYBODY) == "first"
    error = sequences.start_twice(1, ANYBODY)
    sequences.remove(1, "first", str(error))
    for _ in range(3):
        clock.now += 20
        with pytest.raises(InputError, match="choose another id"):
            sequences.started_by(1, ANYBODY)
        clock.now += 20
        with pytest.raises(StreamClosedError, match="choose another id"):
            sequences.find(1, ANYBODY)  # the first client still sends tokens
    # The tokens of the first client cannot reach a stream that has a key.
    assert sequences.started_by(1, ALICE) is None
    assert sequences.started_by(2, ANYBODY) is None
    clock.now += 31
    assert sequences.started_by(1, ANYBODY) is None


def test_contested_ids_are_bounded() -> None:
    sequences: Sequences[int] = Sequences(30.0, FakeClock())
    for number in range(1, 10_001):
        sequences.start_twice(number, ANYBODY)
    assert sequences.started_by(1, ANYBODY) is None
    with pytest.raises(InputError, match="'10000' was started a second time"):
        sequences.started_by(10_000, ANYBODY)
