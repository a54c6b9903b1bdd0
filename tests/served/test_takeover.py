"""A stream belongs to the client that started it: the requests of any other client with its id are
refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import GoldenSet
from testkit.rigs.server_rig import Rig
from tests.served.takeover import ATTACKS, IDENTITIES, Attack, Identity, attempt
from tests.served.test_streaming import SERVER_EQUALS_LIBRARY
from token2wav import Token2Wav
from token2wav_client import Client, ClientVoice

IDS = (21, "21")
REFUSED = "is in use by an open stream of another client; choose another id at random"
CONTESTED = "was started a second time while its stream was open, by a client that sent no"
NOT_YOURS = "is an open stream of another client"


@pytest.fixture(scope="module")
def whole(model: Token2Wav, golden: GoldenSet) -> NDArray[np.float32]:
    return model.synthesize(golden.tokens, golden.voice)


@pytest.mark.parametrize("keep_open", [False, True])
@pytest.mark.parametrize("sequence", IDS)
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_no_audio_for_attackers_and_no_loss_for_victims(
    attack: Attack,
    sequence: int | str,
    keep_open: bool,
    rig: Rig,
    golden: GoldenSet,
    whole: NDArray[np.float32],
) -> None:
    for name, identities in IDENTITIES.items():
        outcome = attempt(rig, golden, attack, identities, sequence=sequence, keep_open=keep_open)
        assert not outcome.errors, name
        assert np.abs(outcome.audio - whole).max() <= SERVER_EQUALS_LIBRARY, name
        assert not outcome.stolen, name
        first, *rest = outcome.refusals
        assert f"sequence_id: '21' {REFUSED if attack.start else NOT_YOURS}" in first, name
        assert len(rest) == len(attack.tokens) - 1, name
        assert all(f"sequence_id: '21' {NOT_YOURS}" in other for other in rest), name


# The server refuses each of these ids afterwards.
@pytest.mark.parametrize(
    ("sequence", "keep_open"), [(31, False), (32, True), ("33", False), ("34", True)]
)
def test_two_clients_without_name_and_key_with_one_id(
    sequence: int | str, keep_open: bool, rig: Rig, golden: GoldenSet, whole: NDArray[np.float32]
) -> None:
    """The server cannot tell them apart, so the stream is closed before a token of the second
    client reaches it.
    """
    nobody = Identity()
    outcome = attempt(
        rig, golden, ATTACKS[0], (nobody, nobody), sequence=sequence, keep_open=keep_open
    )
    assert np.abs(outcome.audio - whole[: len(outcome.audio)]).max() <= SERVER_EQUALS_LIBRARY
    assert not outcome.stolen
    for errors in (outcome.errors, outcome.refusals):
        assert errors
        assert all(CONTESTED in error for error in errors)
    # The first client may still send tokens, which must not become audio of another stream.
    with rig.connect() as connection:
        for _ in range(3):
            connection.send([1, 2, 3], golden.voice, sequence, start=True)
            [error] = connection.answers().errors
            assert f"'{sequence}' {CONTESTED}" in error
            assert "choose another id at random" in error


def test_a_second_start_of_the_same_client_closes_its_stream(rig: Rig, golden: GoldenSet) -> None:
    parameters = Identity(key="mine").parameters()
    with rig.connect() as connection:
        connection.send(
            golden.tokens[:60], golden.voice, "again", start=True, parameters=parameters
        )
        assert len(connection.answers().chunks) == 1
        connection.send(
            golden.tokens[:60], golden.voice, "again", start=True, parameters=parameters
        )
        connection.send(golden.tokens[60:], None, "again", end=True, parameters=parameters)
        answers = connection.answers(2)
        assert not answers.chunks
        assert all("'again' was started a second time" in error for error in answers.errors)
        connection.send(
            golden.tokens[:1], golden.voice, "again", start=True, end=True, parameters=parameters
        )
        assert connection.answers().audio.shape == (960,)


def test_an_id_is_free_as_soon_as_the_last_request_is_there(rig: Rig, golden: GoldenSet) -> None:
    """The next stream of the id may begin while the last audio is still being computed."""
    with rig.connect() as connection:
        for _ in range(8):
            connection.send(golden.tokens[:30], golden.voice, 21, start=True)
            connection.send(golden.tokens[30:60], None, 21, end=True)
        answers = connection.answers(16)
    assert not answers.errors
    assert sum(final for _, final, _ in answers.chunks) == 8
    assert answers.audio.shape == (8 * 60 * 960,)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "stream_key: not a text of 1 to 128 characters"),
        ("k" * 129, "stream_key: not a text of 1 to 128"),
        (7, ""),
    ],
)
def test_a_bad_key_is_refused(key: str | int, message: str, rig: Rig, golden: GoldenSet) -> None:
    with rig.connect() as connection:
        connection.send([1], golden.voice, "key", start=True, parameters={"stream_key": key})
        [error] = connection.answers().errors
        assert error.startswith(message or "stream_key: not a text")


def test_our_client_sends_a_random_key(rig: Rig, golden: GoldenSet, voice: ClientVoice) -> None:
    with rig.connect() as connection, Client(rig.server.grpc_url) as client:
        utterance = client.open(voice)
        utterance.push(golden.tokens[:60])
        heard = [next(utterance)]
        connection.send([1, 2, 3], None, utterance.id, end=True)
        [error] = connection.answers().errors
        assert f"sequence_id: '{utterance.id}' {NOT_YOURS}" in error
        utterance.finish(golden.tokens[60:])
        heard += list(utterance)
    assert sum(len(chunk.audio) for chunk in heard) == 960 * len(golden.tokens)
