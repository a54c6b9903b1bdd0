"""Clients with a server, mostly the one for asyncio: cancelled tasks, limits and errors leave no
stream, and a full server is asked again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit.models.tiny_model import demo_tokens, demo_voice
from testkit.patience import PATIENCE_SECONDS
from testkit.rigs.door_server import DoorServer
from token2wav import Token2Wav
from token2wav_client import (
    AsyncClient,
    AsyncUtterance,
    AudioChunk,
    Client,
    ClientVoice,
    InputError,
    ModelNotReadyError,
    ResponseTimeoutError,
    ServerError,
    ServerUnavailable,
    TokenError,
    UtteranceClosedError,
)

TOKENS = demo_tokens(180)
SAME_AUDIO = 1e-4  # batches sum in another order than single streams; 2e-5 seen


def test_push_finish_and_lists(rig: DoorServer, voice: ClientVoice) -> None:
    async def run() -> None:
        async with AsyncClient(rig.server.grpc_url) as client:
            async with await client.open(voice, audio_format="int16") as utterance:
                utterance.push([1, 2])
                utterance.finish([3])
                with pytest.raises(UtteranceClosedError):
                    utterance.push([4])
                [chunk] = [chunk async for chunk in utterance]
                assert utterance.complete
            assert chunk.audio.shape == (3 * 960,)
            assert chunk.audio.dtype == np.int16
            [chunk] = [chunk async for chunk in client.synthesize([[1, 2], [3]], voice.id)]
            assert chunk.audio.shape == (3 * 960,)
            health = await client.health(timeout_s=PATIENCE_SECONDS)
            assert health.first_audio_s is not None
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_cancelled_task_frees_its_stream_at_once(rig: DoorServer, voice: ClientVoice) -> None:
    heard = asyncio.Event()

    async def never_ending() -> AsyncIterator[NDArray[np.int32]]:
        yield TOKENS[:60]
        await asyncio.Event().wait()

    async def listen(client: AsyncClient) -> None:
        async for _ in client.synthesize(never_ending(), voice):
            heard.set()

    async def leave(client: AsyncClient) -> None:
        async for _ in client.synthesize(never_ending(), voice):
            break

    async def run() -> None:
        async with AsyncClient(rig.server.grpc_url) as client:
            task = asyncio.create_task(listen(client))
            await heard.wait()
            assert rig.model.pipeline.open_streams == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(rig.wait_until_empty)
            await leave(client)
            await asyncio.to_thread(rig.wait_until_empty)

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(4))
def test_a_cancellation_that_meets_a_chunk_is_not_lost(
    rig: DoorServer, voice: ClientVoice, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """The event loop takes a few turns to tell the listener of a chunk: it is cancelled in each."""

    async def listen(client: AsyncClient) -> None:
        async with await client.open(voice) as utterance:
            utterance.finish(np.zeros(60, np.int32))
            async for _ in utterance:
                pass

    async def run() -> None:
        accept = AsyncUtterance._accept

        def cancel_after(left: int) -> None:
            if left:
                asyncio.get_running_loop().call_soon(cancel_after, left - 1)
            else:
                task.cancel()

        def accept_and_cancel(utterance: AsyncUtterance, message: Any) -> None:
            accept(utterance, message)
            monkeypatch.undo()
            cancel_after(turns)

        monkeypatch.setattr(AsyncUtterance, "_accept", accept_and_cancel)
        async with AsyncClient(rig.server.grpc_url) as client:
            task = asyncio.create_task(listen(client))
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, PATIENCE_SECONDS)

    asyncio.run(run())
    rig.wait_until_empty()


def test_a_limit_of_the_server_stops_the_tokens(
    rig: DoorServer, voice: ClientVoice, model: Token2Wav
) -> None:
    """A language model that repeats a token for ever, at 100 tokens a second."""
    stopped = asyncio.Event()

    async def repeating() -> AsyncIterator[NDArray[np.int32]]:
        try:
            yield TOKENS[:60]
            while True:
                yield TOKENS[59:60]
                await asyncio.sleep(0.01)
        finally:
            stopped.set()

    async def run() -> list[AudioChunk]:
        async with AsyncClient(rig.server.grpc_url) as client:
            chunks = client.synthesize(repeating(), voice, end_after_repeats=8)
            return [chunk async for chunk in chunks]

    before = rig.ended()
    chunks = asyncio.run(run())
    assert stopped.is_set()
    assert [chunk.end_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["repeats"]
    audio = np.concatenate([chunk.audio for chunk in chunks])
    whole = model.synthesize(np.append(TOKENS[:60], np.repeat(TOKENS[59], 7)), demo_voice(30))
    assert audio.shape == whole.shape
    assert np.abs(audio - whole).max() <= SAME_AUDIO
    rig.wait_until_empty()
    assert rig.ended() - before == {"repeats": 1}


def test_errors_equal_the_synchronous_client(rig: DoorServer, voice: ClientVoice) -> None:
    async def broken() -> AsyncIterator[list[int]]:
        yield [1]
        raise KeyError("the source")

    async def all_of(client: AsyncClient, batches: object) -> None:
        async for _ in client.synthesize(batches, voice):  # type: ignore[arg-type]
            pass

    async def run() -> None:
        async with AsyncClient(rig.server.grpc_url) as client:
            for batches, error, sentence in (
                ([[9999]], ServerError, "outside the vocabulary"),
                ([[0.5]], TokenError, "dtype float64"),
                ([], InputError, "tokens: 0 sent"),
                (broken(), KeyError, "the source"),
            ):
                with pytest.raises(error, match=sentence):
                    await all_of(client, batches)
            with pytest.raises(ResponseTimeoutError, match="did not synthesize 3 tokens within"):
                await client.health(timeout_s=1e-6)
        with pytest.raises(UtteranceClosedError, match="the client is closed"):
            await client.open(voice)
        async with AsyncClient(rig.server.grpc_url, model="nobody") as client:
            with pytest.raises(ModelNotReadyError, match="'nobody'"):
                await client.open(voice)
        async with AsyncClient("127.0.0.1:1") as client:
            with pytest.raises(ServerUnavailable, match="no server at"):
                await client.open(voice)

    asyncio.run(run())


def test_a_generator_of_wrong_tokens_is_closed(rig: DoorServer, voice: ClientVoice) -> None:
    closed = False

    async def wrong() -> AsyncIterator[list[Any]]:
        nonlocal closed
        try:
            yield [1, 2]
            yield [[1, 2]]
        finally:
            closed = True

    async def run() -> None:
        async with AsyncClient(rig.server.grpc_url) as client:
            # The error refers to the generator, which is therefore not garbage yet.
            with pytest.raises(TokenError) as caught:
                [chunk async for chunk in client.synthesize(wrong(), voice)]
            assert closed, caught

    asyncio.run(run())


def test_flat_tokens_are_a_single_batch_and_text_is_none(
    rig: DoorServer, voice: ClientVoice
) -> None:
    flat = TOKENS[:30]

    async def spoken(tokens: Any) -> list[NDArray[Any]]:
        async with AsyncClient(rig.server.grpc_url) as client:
            return [chunk.audio async for chunk in client.synthesize(tokens, voice)]

    with Client(rig.server.grpc_url) as client:
        expected = np.concatenate([chunk.audio for chunk in client.synthesize([flat], voice)])
        for tokens in (flat, flat.tolist()):
            in_threads = np.concatenate([chunk.audio for chunk in client.synthesize(tokens, voice)])
            in_a_loop = np.concatenate(asyncio.run(spoken(tokens)))
            assert np.array_equal(in_threads, expected)
            assert np.array_equal(in_a_loop, expected)
        for wrong in ("<|s_1|>", ["<|s_1|>"], [["1"]], 7):
            with pytest.raises(TokenError, match=r"^tokens: "):
                list(client.synthesize(wrong, voice))  # type: ignore[arg-type]
            with pytest.raises(TokenError, match=r"^tokens: "):
                asyncio.run(spoken(wrong))


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
        Client(url, retries=30) as client,
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
