"""Clients that load a server or a gateway: N clients, or utterances that start at random times.

N clients are a closed loop: each begins its next utterance when the last one has ended. Utterances
at random times (Poisson) are an open loop: they start even if the server falls behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier

import httpx
import numpy as np

from benchmarks.load.listener import Heard, Speak, from_gateway, from_server, hear
from benchmarks.load.subject import Subject
from token2wav_client import AsyncClient

CLIENTS_PER_PROCESS = 64  # a quarter of a core: a client takes 3 to 6 ms of CPU time a second


@dataclass(frozen=True)
class Load:
    """Load that clients generate: a closed loop, or an open one if `clients` is 0."""

    clients: int
    rate: float  # tokens per second of an utterance; 0 sends all of its tokens at once
    starts_s: float = 1.0  # seconds in which the clients of a closed loop begin, one by one
    seconds: float = 20.0  # time in which utterances start
    portion: int = 5  # tokens of a message
    buffer_s: float = 0.5  # seconds of audio that a player collects before it starts
    utterances_per_s: float = 0.0  # that start on average, in an open loop

    @property
    def label(self) -> str:
        number = f"{self.clients} clients" if self.clients else f"{self.utterances_per_s:g}/s"
        return f"{number}, {f'{self.rate:g} tokens/s' if self.rate else 'unpaced'}"

    def starts(self) -> list[float]:
        """Returns the times at which the first utterances start, in seconds."""
        if self.clients:
            return np.linspace(0, self.starts_s, self.clients, endpoint=False).tolist()
        most = max(1, round(2 * self.utterances_per_s * self.seconds))
        gaps = np.random.default_rng(0).exponential(1 / self.utterances_per_s, most)
        return [at for at in np.cumsum(gaps).tolist() if at < self.seconds] or [0.0]


@dataclass(frozen=True)
class Target:
    """Running server, or a gateway in front of it, and the utterance of every client."""

    grpc_url: str
    model: str
    subject: Subject
    gateway_url: str | None = None  # None for clients of the server

    @asynccontextmanager
    async def connected(self, load: Load) -> AsyncIterator[Speak]:
        """Connects to the server or to the gateway, and yields a function that speaks an utterance.

        All utterances of a process share the connection to the server.
        """
        if self.gateway_url is not None:
            no_limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=self.gateway_url, timeout=60.0, limits=no_limits
            ) as http:
                yield partial(from_gateway, http)
            return
        async with AsyncClient(self.grpc_url, model=self.model) as client:
            await client.vocabulary()  # opens the connection before time zero
            yield partial(from_server, client, self.subject, load.portion, load.rate)

    async def speak_once(self, load: Load) -> Heard:
        """Speaks one utterance, after which the server has the prompt of the voice."""
        async with self.connected(load) as speak:
            return await hear(speak, self.subject.audio_s)


def run_load(target: Target, load: Load) -> tuple[list[Heard], float]:
    """Runs a load. Many clients are spread over processes, because a process uses one core.

    Returns:
        All utterances as heard, and the time until the last one ended.
    """
    starts, count = load.starts(), max(1, -(-load.clients // CLIENTS_PER_PROCESS))
    parts = [starts[part::count] for part in range(count)]
    # gRPC does not work in a process that was forked. All processes read the same clock.
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, _begin, (context.Barrier(count),)) as pool:
        list(pool.map(time.sleep, [0.0] * count))  # ends when all processes have begun
        began = time.monotonic() + 0.5
        run = partial(_run_clients, target, load, began)
        heard = [utterance for part in pool.map(run, parts) for utterance in part]
        return heard, time.monotonic() - began


def _begin(barrier: Barrier) -> None:
    """Waits until all processes of the pool have begun, and have imported this module, because a
    late one would begin its clients late.
    """
    barrier.wait()


def _run_clients(target: Target, load: Load, began: float, starts: Sequence[float]) -> list[Heard]:
    """Runs the clients of one process, which begin some seconds after `began`."""

    async def client(speak: Speak, at: float) -> list[Heard]:
        await asyncio.sleep(began + at - time.monotonic())
        lag_s = time.monotonic() - began - at
        heard = [await hear(speak, target.subject.audio_s, lag_s)]
        while load.clients and time.monotonic() < began + load.seconds:
            heard.append(await hear(speak, target.subject.audio_s))
        return heard

    async def clients() -> list[list[Heard]]:
        async with target.connected(load) as speak:
            return await asyncio.gather(*(client(speak, at) for at in starts))

    return [utterance for heard in asyncio.run(clients()) for utterance in heard]
