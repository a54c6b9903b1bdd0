"""Plan of provisional chunks."""

from __future__ import annotations

import itertools

import pytest

from token2wav.serving.provisional import Pace, next_end

TOKEN_S = 0.04  # of audio, and between two tokens at the pace of speech


def ends(audio_left: int, wait_for_block: int, block: int = 25) -> list[int]:
    """Returns the ends of the chunks of one block, at the pace of speech.

    Args:
        audio_left: tokens of audio that the listener has left when a chunk could end at the
            listener's position.
        wait_for_block: tokens for which the audio of the whole block comes later than that of a
            provisional chunk with the same end.
        block: tokens of a block.
    """
    pace = Pace(TOKEN_S, TOKEN_S, 0.0)
    chunk_ends: list[int] = []
    spoken = 0
    # The listener and the language model both advance by one token.
    for arrived in itertools.count():
        lead = (spoken + audio_left - arrived) * TOKEN_S
        assert lead >= 0
        if arrived == block:
            return chunk_ends
        whole = (block + wait_for_block - arrived) * TOKEN_S
        end = next_end(pace, spoken, arrived, lead, whole)
        if spoken < end <= arrived:
            chunk_ends.append(end)
            spoken = end
    raise AssertionError


def test_chunks_end_early_in_their_block_and_never_too_late() -> None:
    # one token more than in the example of the docstring, because of the slack
    assert ends(audio_left=8, wait_for_block=2) == [6, 13, 20]
    assert ends(audio_left=20, wait_for_block=2) == [8]


def test_no_chunk_is_needed_if_the_audio_lasts_until_the_block() -> None:
    pace = Pace(TOKEN_S, TOKEN_S, 0.05)
    assert next_end(pace, spoken=8, arrived=10, lead=0.5, block_seconds=0.5) == 8
    assert next_end(pace, spoken=8, arrived=10, lead=0.5, block_seconds=0.51) > 8
    assert next_end(pace, spoken=8, arrived=10, lead=float("inf"), block_seconds=9.0) == 8


@pytest.mark.parametrize("token_seconds", [0.08, 0.2])
def test_tokens_that_come_too_slowly_have_no_plan(token_seconds: float) -> None:
    pace = Pace(token_seconds, TOKEN_S, 0.05)
    assert next_end(pace, spoken=0, arrived=0, lead=0.1, block_seconds=25 * token_seconds) == 0
