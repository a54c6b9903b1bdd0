"""Utterances that survive a restart of their server: sent again from the start, heard once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.golden import TINY, GoldenSet
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.serve_command import Serving
from testkit.rigs.server_rig import Rig
from token2wav_client import AsyncClient, Client, ClientVoice, ServerUnavailable

STREAMS = 3
RETRIES = 30
SAME_AUDIO = 1e-4  # batches sum in another order than single streams; 2e-5 seen


class Listener:
    """Listener of an utterance in two parts; the second part waits for `go_on`."""

    def __init__(self, tokens: NDArray[np.int32], voice: ClientVoice) -> None:
        self.heard = threading.Event()
        self.go_on = threading.Event()
        self._tokens, self._voice = tokens, voice

    def listen(self, client: Client) -> list[NDArray[np.generic]]:
        chunks: list[NDArray[np.generic]] = []
        for index, chunk in enumerate(client.synthesize(self._portions(), self._voice)):
            assert chunk.index == index
            assert (chunk.gap_s is None) == (index == 0)
            chunks.append(chunk.audio)
            self.heard.set()
        assert chunk.final
        return chunks

    def _portions(self) -> Iterator[NDArray[np.int32]]:
        yield from np.array_split(self._tokens[:60], 12)
        assert self.go_on.wait(PATIENCE_SECONDS)
        yield from np.array_split(self._tokens[60:], 7)


def test_a_server_killed_in_the_middle_and_restarted(
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three retrying streams continue without a gap in their samples.

    A stream without retries fails at once, and no listener gets a sample twice.
    """
    listeners = [Listener(golden.tokens, voice) for _ in range(STREAMS + 1)]
    with (
        Serving.ready(TINY) as serving,
        ThreadPoolExecutor(STREAMS + 1) as pool,
        Client(serving.url, retries=RETRIES) as patient,
        Client(serving.url) as hasty,
    ):
        hopeful = [pool.submit(listener.listen, patient) for listener in listeners[:-1]]
        lost = pool.submit(listeners[-1].listen, hasty)
        for listener in listeners:
            assert listener.heard.wait(PATIENCE_SECONDS)
        os.kill(serving.traces.processes[1], signal.SIGKILL)
        with pytest.raises(ServerUnavailable, match="no server at"):
            lost.result(PATIENCE_SECONDS)
        for listener in listeners:
            listener.go_on.set()  # while no server is there
        for result in hopeful:
            audio = np.concatenate(result.result(PATIENCE_SECONDS))
            assert audio.shape == whole.shape
            assert np.abs(audio - whole).max() <= SAME_AUDIO
    messages = [record.message for record in caplog.records if record.name == "token2wav_client"]
    assert len(messages) >= STREAMS
    assert all("retry " in message and f" of {RETRIES} in " in message for message in messages)


def test_a_server_that_stops_answering(
    rig: Rig,
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Listener(golden.tokens, voice)
    with (
        Client(rig.server.grpc_url, retries=RETRIES, response_timeout_s=3) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        result = pool.submit(listener.listen, client)
        assert listener.heard.wait(PATIENCE_SECONDS)
        os.kill(rig.server.pid, signal.SIGSTOP)
        try:
            listener.go_on.set()
            while not caplog.records:
                assert not result.done()
                time.sleep(0.02)
        finally:
            os.kill(rig.server.pid, signal.SIGCONT)
        audio = np.concatenate(result.result(PATIENCE_SECONDS))
    assert audio.shape == whole.shape
    assert np.abs(audio - whole).max() <= SAME_AUDIO
    assert "did not respond for 3 s; retry 1 of 30 in " in caplog.records[0].message


def test_a_server_that_stops_answering_a_client_for_asyncio(
    rig: Rig,
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()

    async def in_two_parts() -> AsyncIterator[NDArray[np.int32]]:
        yield golden.tokens[:60]
        await go_on.wait()
        yield golden.tokens[60:]

    async def run() -> list[NDArray[np.generic]]:
        chunks: list[NDArray[np.generic]] = []
        async with AsyncClient(rig.server.grpc_url, retries=30, response_timeout_s=3) as client:
            async for chunk in client.synthesize(in_two_parts(), voice):
                assert chunk.index == len(chunks)
                chunks.append(chunk.audio)
                if chunk.index == 0:
                    os.kill(rig.server.pid, signal.SIGSTOP)
                    asyncio.get_running_loop().create_task(wake_up())
                    go_on.set()
        return chunks

    async def wake_up() -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not caplog.records and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        os.kill(rig.server.pid, signal.SIGCONT)

    try:
        audio = np.concatenate(asyncio.run(run()))
    finally:
        os.kill(rig.server.pid, signal.SIGCONT)
    assert audio.shape == whole.shape
    assert np.abs(audio - whole).max() <= SAME_AUDIO
    assert "did not respond for 3 s; retry 1 of 30 in " in caplog.records[0].message
