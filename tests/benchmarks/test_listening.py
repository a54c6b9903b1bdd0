"""Figures of a listener, by hand-made arrivals."""

from __future__ import annotations

import pytest

from benchmarks.listening import Heard, Piece

PIECES = (Piece(0.3, 0.2, None), Piece(0.6, 0.5, 0.1), Piece(1.4, 0.3, 0.0))


def test_figures_of_an_utterance() -> None:
    heard = Heard(PIECES, lag_s=0.0)
    assert heard.first_byte_s == 0.3
    # The third piece follows 0.7 s of audio and arrives after 1.4 s.
    assert heard.first_playable_s == pytest.approx(0.7)
    assert heard.buffer_s == pytest.approx(0.4)
    assert heard.leading_silence_s == pytest.approx(0.3)
    assert heard.first_audible_s == pytest.approx(1.0)
    assert heard.complete(1.0)
    assert not heard.complete(1.01)


def test_audio_that_arrives_at_once_is_playable_at_once() -> None:
    heard = Heard((Piece(0.3, 2.0, None), Piece(1.9, 1.0, None)), lag_s=0.0)
    assert heard.buffer_s == 0
    assert heard.leading_silence_s is None
    assert heard.first_audible_s is None


@pytest.mark.parametrize("pieces", [(), PIECES])
def test_an_utterance_with_an_error_is_not_complete(pieces: tuple[Piece, ...]) -> None:
    assert not Heard(pieces, 0.0, "the server ended").complete(1.0)
    assert not Heard((), 0.0).complete(1.0)
