"""Client for asyncio: synthesizes utterances in tasks of an event loop.

The classes have names like the classes of `client.py`, the client for threads. The methods have the
same names.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import numpy.typing as npt
from tenacity import AsyncRetrying

from token2wav_client.audio import AudioChunk, AudioFormat
from token2wav_client.base import SENDER_GRACE_S, BaseClient, retry_policy
from token2wav_client.health import Examination, Health
from token2wav_client.tokens import as_batches
from token2wav_client.utterance import CLOSE_GRACE_S, BaseUtterance
from token2wav_client.voice import ClientVoice
from token2wav_client.wire import Opening, SpeechOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

TokenBatches = AsyncIterable[npt.ArrayLike] | Iterable[npt.ArrayLike]


class AsyncUtterance(
    BaseUtterance, AsyncIterator[AudioChunk], AbstractAsyncContextManager["AsyncUtterance"]
):
    """Utterance on a gRPC stream of an event loop: takes tokens and yields chunks of audio.

    `AsyncClient.open` creates an utterance. Use it in an `async with` statement, and iterate with
    `async for`.

    `push`, `finish`, `cancel` and `fail` never wait, so they are plain functions. Call them in the
    event loop in which the utterance was opened. Only one task may iterate.

    Iteration ends after the final chunk, or after `cancel`. If the utterance fails, iteration
    raises the error. Chunks are kept in memory until the iteration takes them.
    """

    _new_outbox = asyncio.Queue

    async def close(self) -> None:
        """Ends the utterance and waits for its task.

        An utterance whose final chunk has arrived ends gracefully. Any other utterance is cancelled
        on the server before this method waits.
        """
        try:
            if self.complete:
                await asyncio.wait([self._receiver], timeout=CLOSE_GRACE_S)
        finally:
            self.cancel()
            self._on_close(self)
        await asyncio.wait([self._receiver])

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def __anext__(self) -> AudioChunk:
        while (chunk := self._next_chunk(StopAsyncIteration)) is None:
            self._changed.clear()
            patience_s = self._patience_s()
            if patience_s is None or patience_s > 0:
                await self._change(patience_s)
            else:
                self._break_off()
        return chunk

    async def _change(self, seconds: float | None) -> None:
        """Waits for a change, or for a time."""
        # asyncio.wait_for before Python 3.12 ignores a cancellation that meets a change.
        timer = (
            asyncio.get_running_loop().call_later(seconds, self._changed.set)
            if seconds is not None
            else None
        )
        try:
            await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _begin(self, retries: int) -> None:
        self._changed = asyncio.Event()
        self._retrying = AsyncRetrying(**retry_policy(retries))
        self._receiver = asyncio.create_task(self._receive(), name=f"utterance-{self.id}")

    async def _receive(self) -> None:
        with self._final_errors():
            await self._retrying(self._attempt)

    async def _attempt(self) -> None:
        with self._attempting() as rpc:
            async for message in rpc:
                self._accept(message)

    async def _requests(self, outbox: asyncio.Queue[bool]) -> AsyncIterator[Any]:
        while await outbox.get():
            if (request := self._next_request(outbox)) is not None:
                yield request

    def _notify(self) -> None:
        self._changed.set()

    def _hang_up(self) -> None:
        if self._rpc is not None:
            self._rpc.cancel()

    def _stop(self) -> None:
        # The receiving task may also be in the pause between two attempts.
        self._receiver.cancel()
        self._notify()


class AsyncClient(BaseClient[AsyncUtterance], AbstractAsyncContextManager["AsyncClient"]):
    """Client of a Triton server with the model `token2wav`: opens utterances in an event loop.

        async with AsyncClient("localhost:8001") as client:
            async for chunk in client.synthesize(batches_of_tokens, voice):
                await play(chunk.audio)

    Create the client in the event loop in which you use it. The constructor takes the arguments of
    `BaseClient`. The methods raise the same errors as the methods of `Client`. If a task is
    cancelled while it iterates over audio, the server stops computing its utterance.
    """

    _library, _kind = grpc.aio, AsyncUtterance

    async def health(
        self, *, timeout_s: float = 10.0, audio_format: AudioFormat = "float32"
    ) -> Health:
        """Checks that the server works by synthesizing three tokens.

        The arguments and errors are the same as for `Client.health`.
        """
        began, metadata = time.monotonic(), None
        await self._await_ready(retries=0)
        with suppress(grpc.RpcError):
            metadata = await self._ask("ModelMetadata")
        examination = Examination(metadata, timeout_s - (time.monotonic() - began))
        opening = Opening(examination.voice, audio_format)
        with examination.judging():
            async with self._new_utterance(opening, 0, examination.timeout_s) as utterance:
                utterance.finish(examination.tokens)
                async for chunk in utterance:
                    examination.check(chunk)
        return examination.result()

    async def vocabulary(self) -> tuple[int, ...]:
        """Asks the server for the number of different tokens, or of the codes of each codebook.

        Returns:
            The numbers; () for latents, and if the server or a proxy in front of it does not tell
            them.
        """
        with suppress(grpc.RpcError):
            parameters: Mapping[str, Any] = (await self._ask("ModelConfig")).config.parameters
            published = parameters["vocabulary"].string_value if "vocabulary" in parameters else ""
            if re.fullmatch(r"\d{1,9}(,\d{1,9})*", published):
                return tuple(map(int, published.split(",")))
        return ()

    async def open(
        self, voice: ClientVoice | str | None = None, **options: Unpack[SpeechOptions]
    ) -> AsyncUtterance:
        """Opens an utterance on a gRPC stream of its own.

        The arguments and errors are the same as for `Client.open`.
        """
        return await self._open(Opening(voice, **options))

    def synthesize(
        self,
        token_batches: TokenBatches,
        voice: ClientVoice | str | None = None,
        **options: Unpack[SpeechOptions],
    ) -> AsyncIterator[AudioChunk]:
        """Synthesizes one utterance: sends batches when they are ready, yields chunks on arrival.

        A separate task iterates over the batches. If you leave the loop early, this task and the
        utterance are cancelled.

        The arguments and errors are the same as for `Client.synthesize`. The batches may also come
        from an asynchronous iterable. An ordinary iterable must not block, because it would block
        the event loop.
        """
        batches = (
            token_batches if isinstance(token_batches, AsyncIterable) else as_batches(token_batches)
        )
        return self._speak(batches, Opening(voice, **options))

    async def _open(self, opening: Opening) -> AsyncUtterance:
        await self._await_ready(self._retries)
        return self._new_utterance(opening, self._retries)

    async def _speak(self, batches: TokenBatches, opening: Opening) -> AsyncIterator[AudioChunk]:
        utterance = await self._open(opening)
        sender = asyncio.create_task(send_all(utterance, batches))
        try:
            async for chunk in utterance:
                yield chunk
        finally:
            sender.cancel()
            await utterance.close()
            await asyncio.wait([sender], timeout=SENDER_GRACE_S)

    async def close(self) -> None:
        """Cancels all open utterances and disconnects."""
        self._closed.set()
        for utterance in self._utterances.copy():
            await utterance.close()
        await self._channel.close()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _await_ready(self, retries: int) -> None:
        if not self._model_seen_ready:
            await AsyncRetrying(**retry_policy(retries))(self._check_ready)

    async def _check_ready(self) -> None:
        with self._grpc_errors():
            self._note_ready(await self._ask("ModelReady"))


async def send_all(utterance: AsyncUtterance, token_batches: TokenBatches) -> None:
    """Pushes batches and finishes the utterance. An error fails the utterance."""
    try:
        if isinstance(token_batches, AsyncIterable):
            async for batch in token_batches:
                utterance.push(batch)
        else:
            for batch in token_batches:
                utterance.push(batch)
                await asyncio.sleep(0)
        utterance.finish()
    except asyncio.CancelledError:
        if not utterance.complete:  # else it ends gracefully, see `AsyncUtterance.close`
            utterance.cancel()
        raise
    except BaseException as error:  # any error must be raised in the task that iterates
        utterance.fail(error)
    finally:
        # A failed push leaves the generator suspended, and its connections open, until it is
        # garbage.
        if isinstance(token_batches, AsyncGenerator):
            await token_batches.aclose()
