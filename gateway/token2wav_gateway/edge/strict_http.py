"""Parser of HTTP/1.1 requests that refuses everything that another server may read differently."""

from __future__ import annotations

import re

import h11

_VERSIONS = (b"1.0", b"1.1")
_MOST_LINES = 128
_BARE_LINE_END = re.compile(rb"(?<!\r)\n|\r[^\n]")  # line ends of which one half is missing
_FOLD = re.compile(rb"\n[ \t]")


class StrictParser(h11.Connection):
    """Parser of the requests of a connection.

    A proxy in front of the gateway may find the end of such a request elsewhere, and a client could
    hide a second request from it. RFC 9112 asks servers to refuse the request or allows it; h11
    accepts it.

    Attributes:
        problem: why the last request was refused.
    """

    problem = "request: no valid HTTP/1.1"

    def next_event(self) -> type[h11.NEED_DATA] | type[h11.PAUSED] | h11.Event:
        """Parses the next event."""
        unread, _ = self.trailing_data
        if self.their_state is h11.IDLE:
            self._check_head(unread.partition(b"\r\n\r\n")[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._check_framing(event)
        elif isinstance(event, h11.EndOfMessage):
            rest, _ = self.trailing_data
            trailer = unread[: len(unread) - len(rest)]
            if event.headers or (trailer and not trailer.endswith(b"\r\n")):
                raise self._refused("body: trailer fields are not accepted")
        return event

    def _check_head(self, head: bytes) -> None:
        if _BARE_LINE_END.search(head):
            raise self._refused("request: a line does not end with CR LF")
        if _FOLD.search(head):
            raise self._refused("request: a header is continued on the next line")
        if head.count(b"\n") > _MOST_LINES:
            raise self._refused(f"request: more than {_MOST_LINES} headers")

    def _check_framing(self, request: h11.Request) -> None:
        if request.http_version not in _VERSIONS:
            raise self._refused("request: HTTP version is not 1.0 or 1.1")
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names:
            if b"content-length" in names:
                raise self._refused("request: Content-Length and Transfer-Encoding are both set")
            if request.http_version == b"1.0":
                raise self._refused("request: HTTP/1.0 has no Transfer-Encoding")

    def _refused(self, problem: str) -> h11.RemoteProtocolError:
        self.problem = problem
        return h11.RemoteProtocolError(problem)
