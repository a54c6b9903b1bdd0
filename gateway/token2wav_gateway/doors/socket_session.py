"""Session of one WebSocket: what both protocols of WebSockets share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from fastapi import WebSocket

from token2wav_gateway.edge.channel import Channel, run_until_one_ends
from token2wav_gateway.errors import GatewayError
from token2wav_gateway.gateway import Caller

_WaitingT = TypeVar("_WaitingT")


class SocketSession(ABC, Generic[_WaitingT]):
    """Session of one socket: one task reads messages, another one speaks what waits.

    A wrong message gets an error, and the session goes on.

    Args:
        caller: client of the socket.
        ending: event after which the session ends as soon as everything that waits was spoken.
        message: noun for a message in errors.
    """

    def __init__(
        self, caller: Caller, socket: WebSocket, ending: asyncio.Event, message: str
    ) -> None:
        self._caller = caller
        self._gateway = caller.gateway
        self._limits = caller.gateway.settings.limits
        self._waiting: asyncio.Queue[_WaitingT] = asyncio.Queue()
        self._channel = Channel(socket, self._limits.idle_s, self._speaks, message)
        self._ending = ending

    async def run(self) -> None:
        """Serves the socket until the session ends.

        Raises:
            GatewayError: the session is refused, or the client sent nothing for too long while
                nothing was spoken.
            WebSocketDisconnect: the client has left.
        """
        await self._begin()
        await run_until_one_ends(self._read(), self._speak_all(), self._drain())

    @abstractmethod
    async def _begin(self) -> None:
        """Opens the session. Raises GatewayError to refuse it."""

    @abstractmethod
    async def _take(self, message: Any) -> None:
        """Takes a message of the client. Raises RequestError for a wrong one."""

    @abstractmethod
    async def _report(self, error: GatewayError, message: Any) -> None:
        """Sends the error of a message; the message is None if it is no JSON."""

    @abstractmethod
    async def _speak_all(self) -> None:
        """Speaks what waits, until the session ends."""

    @abstractmethod
    def _speaks(self) -> bool:
        """Returns whether something is spoken or waits. The client may be silent then."""

    async def _read(self) -> None:
        while True:
            await self._channel.take(self._take, self._refuse)

    async def _refuse(self, error: GatewayError, message: Any) -> None:
        self._gateway.metrics.refused.labels(error.status).inc()
        await self._report(error, message)

    async def _drain(self) -> None:
        """Closes the socket after everything that waits was spoken, if the gateway ends."""
        await self._ending.wait()
        await self._waiting.join()
        await self._channel.close()
