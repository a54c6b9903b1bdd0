"""Utterances that are sent again because a server is full, and those that are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.door_server import DoorServer
from token2wav_client import Client, ClientVoice

RETRIES = 30


def test_a_full_server_is_asked_again(
    limited: DoorServer, voice: ClientVoice, caplog: pytest.LogCaptureFixture
) -> None:
    leave = threading.Event()

    def dawdling() -> Iterator[list[int]]:
        yield [1, 2, 3]
        while not leave.wait(0.2):
            yield []

    url = limited.server.grpc_url
    with (
        Client(url, retries=RETRIES) as client,
        Client(url) as other,
        ThreadPoolExecutor(3) as pool,
    ):
        sitting = [pool.submit(lambda: list(other.synthesize(dawdling(), voice))) for _ in range(2)]
        while limited.model.pipeline.open_streams < 2:
            assert not any(result.done() for result in sitting)
            time.sleep(0.1)
        waiting = pool.submit(lambda: list(client.synthesize([[1, 2, 3]], voice)))
        while not caplog.records:
            assert not waiting.done()
            time.sleep(0.02)
        leave.set()
        for result in [*sitting, waiting]:
            assert sum(len(chunk.audio) for chunk in result.result(PATIENCE_SECONDS)) == 3 * 960
    assert caplog.records[0].message.startswith(
        "streams: all 2 are in use; try again later; retry 1 of 30 in "
    )
