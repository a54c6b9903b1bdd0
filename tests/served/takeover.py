"""Attempts of one client to take over the open stream of another, on any server of the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig
from token2wav.serving.door.sequences import CLIENT_HEADER

SENT_FIRST = 60  # tokens of the victim before the attack: enough for its first chunk


@dataclass(frozen=True)
class Identity:
    """Identity that a client shows: the name that a balancer would set, and its stream key."""

    client: str = ""
    key: str = ""

    @property
    def headers(self) -> dict[str, str] | None:
        return {CLIENT_HEADER: self.client} if self.client else None

    def parameters(self, **parameters: Any) -> dict[str, Any]:
        return parameters | ({"stream_key": self.key} if self.key else {})


@dataclass(frozen=True)
class Attack:
    """Requests that the second client sends with the id of the first client, without waiting for
    answers.
    """

    name: str
    start: bool = False
    tokens: tuple[tuple[int, ...], ...] = ()
    end: bool = False

    def __str__(self) -> str:
        return self.name


ATTACKS = (
    Attack("a whole stream", start=True, tokens=((1, 2, 3), (4, 5), (6,)), end=True),
    Attack("tokens", tokens=((1, 2, 3), (4,))),
    Attack("an end", tokens=((),), end=True),
    Attack("a bad token", tokens=((99_999,),)),
)
IDENTITIES = {
    "two keys": (Identity(key="mine"), Identity(key="yours")),
    "a key against none": (Identity(key="mine"), Identity()),
    "none against a key": (Identity(), Identity(key="yours")),
    "two names": (Identity("alice"), Identity("bob")),
    "a name against none": (Identity("alice"), Identity()),
    "two keys under one name": (Identity("alice", "mine"), Identity("alice", "yours")),
}


@dataclass
class Outcome:
    """Outcome of an attack: audio and errors of one client, chunks and errors of the other."""

    audio: NDArray[np.float32]
    errors: list[str]
    stolen: list[Any] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


def attempt(
    rig: Rig,
    golden: GoldenSet,
    attack: Attack,
    identities: tuple[Identity, Identity],
    *,
    sequence: int | str,
    keep_open: bool = False,
    model: str = "token2wav",
) -> Outcome:
    """Speaks a whole utterance in two requests, with the attack of another client between them."""
    victim, attacker = identities
    with rig.connect(model, victim.headers) as mine, rig.connect(model, attacker.headers) as theirs:
        parameters = victim.parameters(keep_open=keep_open)
        mine.send(
            golden.tokens[:SENT_FIRST], golden.voice, sequence, start=True, parameters=parameters
        )
        begun = mine.first_chunk()
        for number, tokens in enumerate(attack.tokens):
            first, last = number == 0, number == len(attack.tokens) - 1
            theirs.send(
                np.array(tokens, np.int32),
                golden.voice if attack.start and first else None,
                sequence,
                start=attack.start and first,
                end=attack.end and last,
                parameters=attacker.parameters(),
            )
        their_answers = theirs.answers(len(attack.tokens))
        mine.send(
            golden.tokens[SENT_FIRST:], None, sequence, end=True, parameters=victim.parameters()
        )
        rest = mine.answers(2)  # to both requests of the victim
    audio = [chunk for _, _, chunk in begun.chunks + rest.chunks]
    return Outcome(
        np.concatenate(audio),
        begun.errors + rest.errors,
        their_answers.chunks,
        their_answers.errors,
    )
