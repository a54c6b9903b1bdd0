"""Attempts to take over the stream of another client, on a real server.
`tests/serving/door/test_takeover.py` has every attack under every identity.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig
from testkit.takeover import ATTACKS, IDENTITIES, Attack, Identity
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav_client import Client, ClientVoice

SENT_FIRST = 60  # tokens of the victim before the attack: enough for its first chunk


@pytest.mark.parametrize(
    ("attack", "identities", "sequence"),
    [
        (ATTACKS[0], IDENTITIES["two names"], 21),
        (ATTACKS[1], IDENTITIES["a key against none"], "21"),
        (ATTACKS[2], IDENTITIES["a name against none"], "21"),
        (ATTACKS[3], IDENTITIES["two keys under one name"], 21),
    ],
    ids=str,
)
def test_no_audio_for_attackers_and_no_loss_for_victims(
    rig: Rig,
    name: str,
    golden: GoldenSet,
    whole: NDArray[np.float32],
    attack: Attack,
    identities: tuple[Identity, Identity],
    sequence: int | str,
) -> None:
    """The victim speaks an utterance in two requests, and the attack comes between them."""
    victim, attacker = identities
    with rig.connect(name, victim.headers) as mine, rig.connect(name, attacker.headers) as theirs:
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
        refused = theirs.answers(len(attack.tokens))
        mine.send(tokens[SENT_FIRST:], None, sequence, end=True, parameters=victim.parameters())
        rest = mine.answers(2)  # to both requests of the victim
    assert not begun.errors + rest.errors
    assert np.abs(np.concatenate((begun.audio, rest.audio)) - whole).max() <= SERVER_EQUALS_LIBRARY
    assert not refused.chunks
    assert len(refused.errors) == len(attack.tokens)
    assert all("an open stream of another client" in error for error in refused.errors)


def test_our_client_sends_a_random_key(rig: Rig, golden: GoldenSet, voice: ClientVoice) -> None:
    with rig.connect() as connection, Client(rig.server.grpc_url) as client:
        utterance = client.open(voice)
        utterance.push(golden.tokens[:60])
        heard = [next(utterance)]
        connection.send([1, 2, 3], None, utterance.id, end=True)
        [error] = connection.answers().errors
        assert f"sequence_id: '{utterance.id}' is an open stream of another client" in error
        utterance.finish(golden.tokens[60:])
        heard += list(utterance)
    assert sum(len(chunk.audio) for chunk in heard) == 960 * len(golden.tokens)
