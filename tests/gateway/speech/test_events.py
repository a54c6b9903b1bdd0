"""Server-sent events: the standard's rules, in any pieces, and bounds."""

from __future__ import annotations

import pytest

from token2wav_gateway.errors import ModelError
from token2wav_gateway.speech import events
from token2wav_gateway.speech.events import EventReader

MOST = 1 << 16  # bytes without an event; the gateway reads more


def read(body: bytes, size: int) -> list[str]:
    reader = EventReader()
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return [data for piece in pieces for data in reader.feed(piece)]


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("body", "data"),
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
def test_events_do_not_depend_on_the_pieces(body: str, data: list[str], size: int) -> None:
    # A carriage return at the end may be half of the end of a line.
    assert read(body.encode() + b":", size) == data


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert read(b"data: \xff\xed\xa0\x80\n\n", 1) == ["\ufffd" * 4]


@pytest.mark.parametrize(
    "filler", ["x", "data: x\n", "\n", "\r\n", ": comment\n", ": comment\n\n", "event: ping\n\n"]
)
def test_bytes_without_an_event_are_bounded(filler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT", MOST)
    piece = (filler * 6000)[:6000].encode()
    reader = EventReader()
    for _ in range(MOST // len(piece)):
        assert list(reader.feed(piece)) == []
    with pytest.raises(ModelError, match="an event is longer than 65536 bytes, or the events"):
        list(reader.feed(piece))


def test_any_number_of_events_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "LONGEST_EVENT", MOST)
    piece = b": comment\n" * 1000 + b"data: a\n\n"
    reader, count = EventReader(), 3 * MOST // len(piece)
    assert sum(len(list(reader.feed(piece))) for _ in range(count)) == count
