"""Soak of the gateway for some seconds, as in `make soak`, and what its clients would notice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.soak.crowd import Plan
from benchmarks.soak.gateway import soak
from benchmarks.soak.gateway_clients import Spoken, WrongAudioError
from benchmarks.soak.lines import Line
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.failing_proxy import MANNERS, Proxy
from testkit.rigs.raw_server import raw_server

# With this seed misdeeds of all kinds come within some seconds.
PLAN = Plan(minutes=0.4, clients=10, seed=3)
SAMPLES = np.arange(1, 4801, dtype=np.int16)
FAILURE = "502 language model: gone"


@pytest.mark.slow
def test_some_seconds_of_attacks_and_outages(tmp_path: Path) -> None:
    """Honest clients lose no sample, and the gateway keeps no descriptor, task or text."""
    result = soak(PLAN, tmp_path)
    assert result["problems"] == [], f"{PLAN}"
    assert result["misbehaved"].keys() == {"leave", "stall", "garbage", "flood", "language model"}
    assert result["behaved"]["utterances"] > 0
    assert result["outages"]


def spoken(samples: NDArray[np.int16], failure: str) -> Spoken:
    line = Line("a line", np.zeros(5, np.int32), None, (SAMPLES / 32767).astype(np.float32))
    return Spoken(line, "pcm", bytearray(samples.tobytes()), failure)


@pytest.mark.parametrize("failure", ["", FAILURE])
@pytest.mark.parametrize(
    "samples",
    [
        np.where(SAMPLES == 4000, 0, SAMPLES),
        np.roll(SAMPLES, 1),
        np.concatenate([SAMPLES, SAMPLES[:1]]),
        SAMPLES[960:],
    ],
    ids=["another sample", "a sample late", "a sample more", "a chunk lost"],
)
def test_wrong_samples_are_noticed(samples: NDArray[np.int16], failure: str) -> None:
    with pytest.raises(WrongAudioError):
        spoken(samples, failure).check()


def test_only_a_failure_excuses_samples_that_are_missing_at_the_end() -> None:
    spoken(SAMPLES, "").check()
    for count in (0, 960):
        spoken(SAMPLES[:count], FAILURE).check()
        with pytest.raises(WrongAudioError):
            spoken(SAMPLES[:count], "").check()


@pytest.fixture
def echo() -> Iterator[int]:
    """Server that sends everything back."""

    def reply(connection: socket.socket) -> None:
        while piece := connection.recv(4096):
            connection.sendall(piece)

    with raw_server(reply) as port:
        yield port


def exchange(connection: socket.socket) -> str:
    """Sends a byte, and returns the byte or the error that comes back."""
    try:
        connection.sendall(b"x")
        return connection.recv(1).decode() or "closed"
    except OSError as error:
        return type(error).__name__


@pytest.mark.parametrize("manner", MANNERS)
def test_an_outage_fails_old_and_new_connections_until_its_end(echo: int, manner: str) -> None:
    async def run() -> None:
        proxy = Proxy(echo)
        await proxy.start()
        with closing(await opened(proxy.port)) as old:
            assert await asyncio.to_thread(exchange, old) == "x"
            await proxy.fail(manner)
            if manner == "stalls":
                waiting = asyncio.create_task(asyncio.to_thread(exchange, old))
                done, _ = await asyncio.wait({waiting}, timeout=0.2)
                assert not done
                await proxy.start()
                assert await waiting == "x"
            else:
                assert await asyncio.to_thread(exchange, old) == "ConnectionResetError"
                new = "ConnectionRefusedError" if manner == "refuses" else "ConnectionResetError"
                assert await asyncio.to_thread(attempt, proxy.port) == new
                await proxy.start()
        assert await asyncio.to_thread(attempt, proxy.port) == "x"
        await proxy.close()

    asyncio.run(run())


async def opened(port: int) -> socket.socket:
    address = ("127.0.0.1", port)
    return await asyncio.to_thread(socket.create_connection, address, PATIENCE_SECONDS)


def attempt(port: int) -> str:
    """Opens a connection and exchanges a byte."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as connection:
            return exchange(connection)
    except OSError as error:
        return type(error).__name__
