"""Server-sent events: a bounded reader of their data."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator

from token2wav_gateway.errors import ModelError

LONGEST_EVENT = 1 << 20  # bytes


class EventReader:
    """Reader of server-sent events in a body that arrives in pieces.

    It follows the standard of server-sent events: the text is UTF-8, a line ends with CR, LF or
    both, and an event without data is no event. Names and ids of events are not used.
    """

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._line: list[str] = []  # parts of a line that has not ended
        self._data: list[str] = []  # lines of data of an event that has not ended
        self._length = 0

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yields the data of each event that a piece of the body completes.

        Raises:
            ModelError: more than `LONGEST_EVENT` bytes follow each other without the end of an
                event that has data. These may be an event, comments or empty lines.
        """
        self._length += len(piece)
        *lines, rest = self._decoder.decode(piece).split("\n")
        for line in lines:
            if data := self._end_of_line("".join([*self._line, line])):
                self._length = len(piece)
                yield data
            self._line.clear()
        self._line.append(rest)
        if self._length > LONGEST_EVENT:
            raise ModelError(
                f"language model: an event is longer than {LONGEST_EVENT} bytes, or the events "
                "have no data"
            )

    def _end_of_line(self, line: str) -> str:
        """Adds a line to the event. Returns the data of the event if the line ends it."""
        if not line:
            data = "\n".join(self._data)
            self._data.clear()
            return data
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        return ""
