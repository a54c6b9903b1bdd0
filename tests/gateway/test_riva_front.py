"""Front of Riva's interface: the streams whose unfinished messages it follows."""

from __future__ import annotations

import pytest

from token2wav_gateway.riva_front import FrameError, Unfinished

PREFACE = bytes(24)
DATA, HEADERS = 0, 1
END_STREAM, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def test_headers_without_an_answer_take_no_memory() -> None:
    """The library ignores headers of old streams, and those after the end of an answer."""
    unfinished, part = Unfinished(), frame(DATA, 0, 3, bytes([0, 0, 0, 0, 9]) + b"1234")
    unfinished.requests.feed(PREFACE + frame(HEADERS, END_HEADERS, 3) + part)
    assert unfinished.size == 4
    unfinished.responses.feed(frame(HEADERS, END_STREAM | END_HEADERS, 3))
    assert unfinished.size == 0
    unfinished.requests.feed((frame(HEADERS, END_HEADERS, 1) + frame(HEADERS, END_HEADERS, 3)) * 9)
    unfinished.requests.feed(part)
    assert unfinished.size == 0
    with pytest.raises(FrameError, match="even number"):
        unfinished.requests.feed(frame(HEADERS, END_HEADERS, 8))
