"""The face of the package for asyncio: `Client` with the same names, in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from functools import partial
from types import TracebackType
from typing import Any

import grpc
import numpy.typing as npt
from tenacity import AsyncRetrying
from tritonclient.grpc import service_pb2_grpc

from token2wav_client.aio_stream import AsyncUtterance
from token2wav_client.audio import AudioChunk, AudioFormat
from token2wav_client.base import BaseClient
from token2wav_client.faults import explain
from token2wav_client.health import Health, speak_a_little_async, tokens_for, voice_of
from token2wav_client.retry import policy
from token2wav_client.tokens import as_batches
from token2wav_client.voice import ClientVoice

_SENDER_GRACE_S = 0.5

TokenBatches = AsyncIterable[npt.ArrayLike] | Iterable[npt.ArrayLike]


class AsyncClient(BaseClient):
    """A connection to a Triton server that runs the model `token2wav`. Made and used in one event loop.

        async with AsyncClient("localhost:8001") as client:
            async for chunk in client.synthesize(batches_of_tokens, voice):
                await play(chunk.audio)

    Arguments are those of `BaseClient`, errors those of `Client`. A task that is cancelled while it listens cancels its
    utterance, on the server too.
    """

    def _connect(self) -> None:
        self._closed = False
        self._utterances: set[AsyncUtterance] = set()
        self._channel = self._endpoint.aio_channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def health(self, *, timeout_s: float = 10.0, audio_format: AudioFormat = "float32") -> Health:
        """Find out whether the server works; see `Client.health`."""
        clock = asyncio.get_running_loop().time
        began = clock()
        voice = voice_of(await self._metadata())
        utterance = await self._open(voice, audio_format, keep_open=True, steps=None, retries=0)
        return await speak_a_little_async(utterance, tokens_for(voice), timeout_s - (clock() - began))

    async def open(
        self,
        voice: ClientVoice | str,
        *,
        audio_format: AudioFormat = "float32",
        keep_open: bool = True,
        steps: int | None = None,
    ) -> AsyncUtterance:
        """Open an utterance on a gRPC stream of its own; see `Client.open`."""
        return await self._open(voice, audio_format, keep_open, steps, self._retries)

    async def synthesize(
        self,
        token_batches: TokenBatches,
        voice: ClientVoice | str,
        *,
        audio_format: AudioFormat = "float32",
        keep_open: bool = True,
        steps: int | None = None,
    ) -> AsyncIterator[AudioChunk]:
        """Speak one utterance: send each batch as soon as it is there, yield each chunk as it arrives.

        The batches are taken in a task of their own. Leaving the loop early cancels both.

        Args:
            token_batches: each of shape (tokens,), integers; or a flat array or sequence of integers as a single batch.
                An ordinary iterable must not wait for anything.
            voice: the voice to speak in, or the id or name of one that the server knows.
            audio_format: dtype of the chunks' samples.
            keep_open: as in `open`.
            steps: as in `open`.

        Raises:
            Exception: as `Client.synthesize` does.
        """
        batches = token_batches if isinstance(token_batches, AsyncIterable) else as_batches(token_batches)
        utterance = await self.open(voice, audio_format=audio_format, keep_open=keep_open, steps=steps)
        sender = asyncio.create_task(_send_all(utterance, batches))
        try:
            async for chunk in utterance:
                yield chunk
        finally:
            sender.cancel()
            await utterance.close()
            await asyncio.wait([sender], timeout=_SENDER_GRACE_S)

    async def close(self) -> None:
        """Cancel what still runs and disconnect."""
        self._closed = True
        for utterance in list(self._utterances):
            await utterance.close()
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(
        self, voice: ClientVoice | str, audio_format: AudioFormat, keep_open: bool, steps: int | None, retries: int
    ) -> AsyncUtterance:
        self._check_open()
        exchange = self._exchange(voice, audio_format, keep_open, steps, retries)
        if not self._model_seen_ready:
            await AsyncRetrying(**policy(retries))(self._ask_readiness)
        utterance = AsyncUtterance(
            partial(self._stub.ModelStreamInfer, metadata=self._endpoint.metadata),
            exchange,
            url=self._endpoint.url,
            response_timeout_s=self._response_timeout_s,
            retries=retries,
            on_close=self._utterances.discard,
        )
        self._utterances.add(utterance)
        return utterance

    @property
    def _is_closed(self) -> bool:
        return self._closed

    async def _metadata(self) -> Any | None:
        """What the server says of the model's inputs; None if it does not say it."""
        self._check_open()
        if not self._model_seen_ready:
            await self._ask_readiness()
        try:
            return await self._stub.ModelMetadata(
                self._metadata_question(), timeout=self._connect_timeout_s, metadata=self._endpoint.metadata
            )
        except grpc.RpcError:
            return None

    async def _ask_readiness(self) -> None:
        self._check_open()
        try:
            answer = await self._stub.ModelReady(
                self._readiness_question(), timeout=self._connect_timeout_s, metadata=self._endpoint.metadata
            )
        except grpc.RpcError as error:
            raise explain(error, self._endpoint.url) from None
        self._note_readiness(answer)


async def _send_all(utterance: AsyncUtterance, token_batches: TokenBatches) -> None:
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
        utterance.cancel()
        raise
    except BaseException as error:  # the task that iterates must learn of it, whatever it is
        utterance.fail(error)
