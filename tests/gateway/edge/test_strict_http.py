"""Strict parser of HTTP/1.1: what another server may read differently is refused."""

from __future__ import annotations

import h11
import pytest

from token2wav_gateway.edge.strict_http import StrictParser

CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
VALID = {
    "no body": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "http 1.0": b"GET / HTTP/1.0\r\n\r\n",
    "length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n\n\n\r\r",
    "chunked": CHUNKED + b"2;name=value\r\n\n\n\r\n1\r\n\r\r\n0\r\n\r\n",
}
REFUSED = {
    "line feed in the request line": b"GET / HTTP/1.1\nHost: x\r\n\r\n",
    "line feed in a header": b"GET / HTTP/1.1\r\nHost: x\na: b\r\n\r\n",
    "line feed before the end": b"GET / HTTP/1.1\r\nHost: x\n\r\n",
    "only line feeds": b"GET / HTTP/1.1\nHost: x\n\n",
    "carriage return in a header": b"GET / HTTP/1.1\r\nHost: x\ra: b\r\n\r\n",
    "continued header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "continued request line": b"GET / HTTP/1.1\r\n\tx: y\r\nHost: x\r\n\r\n",
    "version 0.9": b"GET / HTTP/0.9\r\nHost: x\r\n\r\n",
    "version 1.2": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "version 2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "no version": b"GET /\r\nHost: x\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\nab",
    "length and chunked": CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "unknown coding": CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n",
    "chunk that ends with a line feed": CHUNKED + b"1\r\nx\n0\r\n\r\n",
    "size that ends with a line feed": CHUNKED + b"1\nx\r\n0\r\n\r\n",
    "trailer": CHUNKED + b"0\r\nA: b\r\n\r\n",
    "trailer that ends with a line feed": CHUNKED + b"0\r\n\n",
    "space before a colon": b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "129 headers": b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 128 + b"\r\n",
}


def parse(content: bytes, step: int) -> bool:
    """Parses a request that arrives in steps; returns whether it is complete."""
    parser = StrictParser(h11.SERVER)
    for start in range(0, len(content), step):
        parser.receive_data(content[start : start + step])
        while (event := parser.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage):
                return True
    return False


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("case", VALID)
def test_valid_requests_are_parsed(case: str, step: int) -> None:
    assert parse(VALID[case], step)


@pytest.mark.parametrize("step", [1, 2, 1000])
@pytest.mark.parametrize("case", REFUSED)
def test_ambiguous_requests_are_refused(case: str, step: int) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        parse(REFUSED[case], step)
