"""Attempts of one client to take over the open stream of another, on any server of the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig
from testkit.takeover import Attack, Identity

SENT_FIRST = 60  # tokens of the victim before the attack: enough for its first chunk


@dataclass
class Outcome:
    """Outcome of an attack: audio and errors of one client, chunks and errors of the other."""

    audio: NDArray[np.float32]
    errors: list[str]
    stolen: list[Any]
    refusals: list[str]


def attempt(
    rig: Rig,
    golden: GoldenSet,
    attack: Attack,
    identities: tuple[Identity, Identity],
    *,
    sequence: int | str,
    model: str,
) -> Outcome:
    """Speaks a whole utterance in two requests, with the attack of another client between them."""
    victim, attacker = identities
    with rig.connect(model, victim.headers) as mine, rig.connect(model, attacker.headers) as theirs:
        tokens, parameters = golden.tokens, victim.parameters() | {"keep_open": True}
        mine.send(tokens[:SENT_FIRST], golden.voice, sequence, start=True, parameters=parameters)
        begun = mine.first_chunk()
        for their_tokens, start, end in attack.requests():
            theirs.send(
                their_tokens,
                golden.voice if start else None,
                sequence,
                start=start,
                end=end,
                parameters=attacker.parameters(),
            )
        their_answers = theirs.answers(len(attack.tokens))
        mine.send(tokens[SENT_FIRST:], None, sequence, end=True, parameters=victim.parameters())
        rest = mine.answers(2)  # to both requests of the victim
    return Outcome(
        np.concatenate([chunk for _, _, chunk in begun.chunks + rest.chunks]),
        begun.errors + rest.errors,
        their_answers.chunks,
        their_answers.errors,
    )
