"""Log of the gateway: one line a second for each kind of error, and quiet libraries."""

from __future__ import annotations

import io
import logging

from token2wav_gateway.log import LineLimit


def test_one_line_a_second_for_each_kind_of_error() -> None:
    now, stream = 0.0, io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(LineLimit(lambda: now))
    log = logging.Logger("gateway")
    log.addHandler(handler)

    def fail(times: int) -> None:
        for number in range(times):
            log.error("no descriptor for %d", number)

    fail(1000)
    log.warning("another kind")
    now = 0.9
    fail(1)
    now = 1.0
    fail(3)
    now = 2.0
    fail(1)
    now = 9.0
    fail(1)
    assert stream.getvalue().splitlines() == [
        "no descriptor for 0",
        "another kind",
        "no descriptor for 0 (and 1000 more of this kind)",
        "no descriptor for 0 (and 2 more of this kind)",
        "no descriptor for 0",
    ]
