"""Outages of the servers behind the gateway of a soak, made by a proxy in front of each server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from testkit.rigs.raw_server import resets
from token2wav_server.launcher.ports import LOOPBACK, reserved

# As if a server was killed, as if its machine rejects connections after it has accepted them, and
# as if the network loses everything.
MANNERS = ("refuses", "resets", "stalls")
# Texts that begin within this time after an outage may fail too, because gRPC connects again after
# at most a second.
RECOVERY_S = 1.5
_PAUSE_S = (4.0, 12.0)  # between outages
_OUTAGE_S = (1.0, 5.0)
_STALL_S = (1.0, 18.0)  # time-outs of the gateway begin in the longest ones
_PIECE_BYTES = 65_536


class Proxy:
    """TCP proxy of one server. It passes bytes on, unless there is an outage.

    Args:
        target: port of the server.
    """

    def __init__(self, target: int) -> None:
        # Reserves the port while the proxy refuses connections.
        self._reserved = reserved(LOOPBACK)
        self.port: int = self._reserved.getsockname()[1]
        self._target = target
        self._listener: asyncio.Server | None = None
        self._resets = False
        self._flows = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Begins to work, or works again after an outage."""
        self._resets = False
        self._flows.set()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._connect, LOOPBACK, self.port)

    async def fail(self, manner: str) -> None:
        """Begins an outage, in one of `MANNERS`."""
        if manner == "stalls":
            self._flows.clear()
            return
        self._resets = True
        if manner == "refuses" and self._listener is not None:
            self._listener.close()
            self._listener = None
        for writer in self._open:
            _reset(writer)

    async def close(self) -> None:
        await self.fail("refuses")
        self._reserved.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._resets:
            _reset(writer)
            return
        server_reader, server_writer = await asyncio.open_connection(LOOPBACK, self._target)
        both = {writer, server_writer}
        self._open |= both
        pumps = {
            asyncio.create_task(self._pump(reader, server_writer)),
            asyncio.create_task(self._pump(server_reader, writer)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        self._open -= both
        for end in both:
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    resets(writer.get_extra_info("socket"))
    writer.transport.abort()


@dataclass
class Outage:
    """Outage of a server, from its beginning to its end in monotonic seconds."""

    server: str
    manner: str
    began: float
    ended: float | None = None


class Outages(threading.Thread):
    """Thread with the proxies of some servers, which makes one outage after the other.

    Args:
        targets: ports of the servers, by their names.

    Attributes:
        ports: ports of the proxies, by the names of the servers.
    """

    def __init__(self, targets: dict[str, int], random: Random) -> None:
        super().__init__(name="soak-outages", daemon=True)
        self._proxies = {server: Proxy(port) for server, port in targets.items()}
        self.ports = {server: proxy.port for server, proxy in self._proxies.items()}
        self.all: list[Outage] = []
        self._random = random
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def __enter__(self) -> Outages:
        self.start()
        for proxy in self._proxies.values():
            self._in_loop(proxy.start()).result()
        return self

    def __exit__(self, *error: object) -> None:
        for proxy in self._proxies.values():
            self._in_loop(proxy.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join()

    def run(self) -> None:
        self._loop.run_forever()

    def begin(self) -> None:
        """Makes outages until `end`."""
        self._making = self._in_loop(self._make())

    def end(self) -> None:
        """Ends the last outage."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._making.result()

    def since(self, began: float) -> bool:
        """Returns whether a text that began at a time may have met an outage."""
        return any(outage.ended is None or outage.ended + RECOVERY_S > began for outage in self.all)

    async def _make(self) -> None:
        kinds: list[tuple[str, str]] = []
        while not await self._over_after(self._random.uniform(*_PAUSE_S)):
            if not kinds:
                kinds = [(server, manner) for server in self._proxies for manner in MANNERS]
                self._random.shuffle(kinds)
            server, manner = kinds.pop()
            outage = Outage(server, manner, time.monotonic())
            self.all.append(outage)
            await self._proxies[server].fail(manner)
            seconds = _STALL_S if manner == "stalls" else _OUTAGE_S
            await self._over_after(self._random.uniform(*seconds))
            await self._proxies[server].start()
            outage.ended = time.monotonic()

    async def _over_after(self, seconds: float) -> bool:
        """Waits for a time, or for the end, and returns whether the end has come."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
