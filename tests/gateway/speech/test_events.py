"""Server-sent events: the standard's rules, in any pieces, and bounds."""

from __future__ import annotations

import pytest

from token2wav_gateway.errors import ModelError
from token2wav_gateway.speech.events import LONGEST_EVENT, EventReader


def read(body: bytes, size: int) -> list[str]:
    reader = EventReader()
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return [data for piece in pieces for data in reader.feed(piece)]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("body", "events"),
    [
        ("data: a\n\ndata:b\n\n", ["a", "b"]),
        ("data: a\r\n\r\ndata: b\r\rdata: c\n\n", ["a", "b", "c"]),
        ("data:  two spaces\ndata: and lines\ndata\n\n", [" two spaces\nand lines\n"]),
        ("\ufeffdata: after a mark\n\n", ["after a mark"]),
        (": a comment\n\ndata: a\n: a comment\n\n", ["a"]),
        ("event: ping\n\nid: 1\n\nretry: 5\n\ndata:\n\ndata\n\n", []),
        ("event: error\ndata: a\n\n", ["a"]),
        ("dat: a\ndatas: b\n data: c\n\n", []),
        ("data: ü\n\n", ["ü"]),
        ("data: the end is missing\n", []),
    ],
)
def test_events_do_not_depend_on_the_pieces(body: str, events: list[str], size: int) -> None:
    # A carriage return at the end may be half of the end of a line.
    assert read(body.encode() + b":", size) == events


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert read(b"data: \xff\xed\xa0\x80\n\n", 1) == ["\ufffd" * 4]


@pytest.mark.parametrize(
    "filler", ["x", "data: x\n", "\n", "\r\n", ": comment\n", ": comment\n\n", "event: ping\n\n"]
)
def test_bytes_without_an_event_are_bounded(filler: str) -> None:
    piece = (filler * 60_000)[:60_000].encode()
    reader = EventReader()
    for _ in range(LONGEST_EVENT // len(piece)):
        assert list(reader.feed(piece)) == []
    with pytest.raises(ModelError, match="an event is longer than 1048576 bytes, or the events"):
        list(reader.feed(piece))


def test_any_number_of_events_is_read() -> None:
    piece = b": comment\n" * 1000 + b"data: a\n\n"
    reader, count = EventReader(), 3 * LONGEST_EVENT // len(piece)
    assert sum(len(list(reader.feed(piece))) for _ in range(count)) == count
