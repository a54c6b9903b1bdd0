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
from token2wav_client import AsyncClient, AudioChunk, Client, ClientVoice, ServerUnavailable

STREAMS = 3
RETRIES = 30
SAME_AUDIO = 1e-4  # batches sum in another order than single streams; 2e-5 seen


class Listener:
    """Listener of an utterance in two parts; the second part waits for `go_on`."""

    def __init__(self, tokens: NDArray[np.int32], voice: ClientVoice) -> None:
        self.heard = threading.Event()
        self.go_on = threading.Event()
        self._tokens, self._voice = tokens, voice

    def listen(self, client: Client) -> list[AudioChunk]:
        chunks = list[AudioChunk]()
        for chunk in client.synthesize(self._portions(), self._voice):
            chunks.append(chunk)
            self.heard.set()
        return chunks

    async def listen_in_a_loop(self, client: AsyncClient) -> list[AudioChunk]:
        async def portions() -> AsyncIterator[NDArray[np.int32]]:
            blocking = self._portions()
            while (portion := await asyncio.to_thread(next, blocking, None)) is not None:
                yield portion

        chunks = list[AudioChunk]()
        async for chunk in client.synthesize(portions(), self._voice):
            chunks.append(chunk)
            self.heard.set()
        return chunks

    def _portions(self) -> Iterator[NDArray[np.int32]]:
        yield from np.array_split(self._tokens[:60], 12)
        assert self.go_on.wait(PATIENCE_SECONDS)
        yield from np.array_split(self._tokens[60:], 7)


def assert_heard_once(chunks: list[AudioChunk], whole: NDArray[np.float32]) -> None:
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.gap_s is None for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[-1].final
    audio = np.concatenate([chunk.audio for chunk in chunks])
    assert audio.shape == whole.shape
    assert np.abs(audio - whole).max() <= SAME_AUDIO


def test_a_server_killed_in_the_middle_and_restarted(
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three retrying streams continue without a gap in their samples, and without a sample twice. A
    stream without retries fails at once.
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
        before = serving.traces
        os.kill(before.processes[1], signal.SIGKILL)
        with pytest.raises(ServerUnavailable, match="no server at"):
            lost.result(PATIENCE_SECONDS)
        for listener in listeners:
            listener.go_on.set()  # while no server is there
        assert "the server ended by itself (status 137): " in serving.wait_for_line("restart")
        for result in hopeful:
            assert_heard_once(result.result(PATIENCE_SECONDS), whole)
        assert before.remaining() == []
        assert serving.health().returncode == 0
    messages = [record.message for record in caplog.records if record.name == "token2wav_client"]
    assert len(messages) >= STREAMS
    assert all("retry " in message and f" of {RETRIES} in " in message for message in messages)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_stops_answering(
    kind: type[Client] | type[AsyncClient],
    rig: Rig,
    golden: GoldenSet,
    voice: ClientVoice,
    whole: NDArray[np.float32],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener, url = Listener(golden.tokens, voice), rig.server.grpc_url

    async def in_a_loop() -> list[AudioChunk]:
        async with AsyncClient(url, retries=RETRIES, response_timeout_s=3) as client:
            return await listener.listen_in_a_loop(client)

    def listen() -> list[AudioChunk]:
        if kind is AsyncClient:
            return asyncio.run(in_a_loop())
        with Client(url, retries=RETRIES, response_timeout_s=3) as client:
            return listener.listen(client)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(listen)
        assert listener.heard.wait(PATIENCE_SECONDS)
        os.kill(rig.server.pid, signal.SIGSTOP)
        try:
            listener.go_on.set()
            while not caplog.records:
                assert not result.done()
                time.sleep(0.02)
        finally:
            os.kill(rig.server.pid, signal.SIGCONT)
        assert_heard_once(result.result(PATIENCE_SECONDS), whole)
    assert "did not respond for 3 s; retry 1 of 30 in " in caplog.records[0].message
