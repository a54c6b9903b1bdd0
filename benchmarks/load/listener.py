"""Utterances as clients of a server or of a gateway hear them.

A client measures with `token2wav_client.listening`, which docs/benchmarking.md describes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from benchmarks.load.subject import Subject
from testkit.rigs.gateway_rig import VOICE
from token2wav_client import AsyncClient, ClientError
from token2wav_client.bench import paced
from token2wav_client.listening import Recording, record

GATEWAY_RATE_HZ = 24_000
REQUEST = {"model": "token2wav", "voice": VOICE, "input": "Hello.", "response_format": "pcm"}
_ROUNDING_S = 1e-4  # allowed difference of the length of the audio

# Audio of a chunk, its sample rate, and the seconds since the request that made it possible.
Chunk = tuple[npt.NDArray[Any], int, float | None]
# Speaks one utterance, and yields its chunks.
Speak = Callable[[], AsyncIterator[Chunk]]


@dataclass(frozen=True)
class Heard:
    """Utterance as a client heard it.

    Attributes:
        lag_s: time by which the client began it too late.
        after_tokens_s: time from the request that made the first chunk possible to this chunk,
            which is the time of the server alone. None without a chunk, and through a gateway.
    """

    recording: Recording
    lag_s: float
    after_tokens_s: float | None


async def from_server(
    client: AsyncClient, subject: Subject, size: int, tokens_per_second: float
) -> AsyncIterator[Chunk]:
    """Sends the tokens of an utterance to a token2wav server, and yields its audio.

    The other arguments are those of `paced`; without a pace all tokens are sent at once.
    """
    tokens = subject.tokens
    batches = paced(tokens, tokens_per_second, size) if tokens_per_second else [tokens]
    async for chunk in client.synthesize(batches, subject.voice, audio_format="int16"):
        yield chunk.audio, chunk.sample_rate, chunk.latency_s


async def from_gateway(http: httpx.AsyncClient) -> AsyncIterator[Chunk]:
    """Sends a text to a gateway, and yields its audio."""
    rest = b""
    async with http.stream("POST", "/v1/audio/speech", json=REQUEST) as response:
        response.raise_for_status()
        async for content in response.aiter_raw():
            content = rest + content
            whole, rest = content[: len(content) // 2 * 2], content[len(content) // 2 * 2 :]
            yield np.frombuffer(whole, "<i2"), GATEWAY_RATE_HZ, None


async def hear(speak: Speak, audio_s: float, lag_s: float = 0.0) -> Heard:
    """Returns an utterance as heard. Errors of the server are a part of the result.

    Args:
        audio_s: expected length of the audio.
        lag_s: time by which it begins too late.
    """
    began, chunks, rate, error = time.monotonic(), list[tuple[float, Any]](), 1, ""
    after_tokens_s = None
    try:
        async for audio, chunk_rate, latency_s in speak():
            if not chunks:
                rate, after_tokens_s = chunk_rate, latency_s
            chunks.append((time.monotonic() - began, audio))
    except (ClientError, httpx.HTTPError) as problem:
        error = str(problem)
    ended_s = time.monotonic() - began
    arrived_s = sum(len(audio) for _, audio in chunks) / rate
    complete = not error and abs(arrived_s - audio_s) <= _ROUNDING_S
    recording = record(chunks, rate, ended_s, complete=complete, error=error)
    return Heard(recording, lag_s, after_tokens_s)


def quantiles(times: dict[str, float] | None, *names: str) -> str:
    """Formats quantiles for a line."""
    return " / ".join(f"{times[name]:.0f}" for name in names) if times else "-"
