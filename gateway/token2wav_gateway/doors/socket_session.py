"""Session of one WebSocket: the part that both protocols of WebSockets share."""

from __future__ import annotations

import asyncio
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

import anyio
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

from token2wav_gateway.edge.connections import Connection
from token2wav_gateway.edge.tasks import first_of
from token2wav_gateway.errors import GatewayError, RequestError
from token2wav_gateway.gateway import Caller

CLOSE_S = 1.0  # for the last messages to a client, which may have stopped reading
POLICY, GOING_AWAY = 1008, 1001  # codes of RFC 6455

_WaitingT = TypeVar("_WaitingT")


class FatalError(RequestError):
    """Error that ends a session."""


class SocketSession(ABC, Generic[_WaitingT]):
    """Session of one socket: one task reads messages, another one speaks the waiting texts.

    A wrong message gets an error, and the session goes on. The client must send a message within
    `limits.idle_s` while the session is silent, and must read a message within this time.

    Args:
        caller: client of the socket.
        ending: event after which the session ends as soon as everything that waits was spoken.
    """

    message_noun: ClassVar[str]  # in errors

    def __init__(self, caller: Caller, socket: WebSocket, ending: asyncio.Event) -> None:
        self._caller = caller
        self._gateway = caller.gateway
        self._limits = caller.gateway.settings.limits
        self._waiting: asyncio.Queue[_WaitingT] = asyncio.Queue()
        self._socket = socket
        self._connection: Connection = socket.state.connection
        self._receiving = anyio.CancelScope()
        self._ending = ending

    async def run(self) -> None:
        """Serves the socket until the session ends.

        Raises:
            GatewayError: the session is refused, or the client sent nothing for too long while
                nothing was spoken.
            WebSocketDisconnect: the client has left, or takes no more bytes.
        """
        await first_of(self._serve(), self._drain())

    async def _serve(self) -> None:
        await self._begin()
        await first_of(self._read(), self._speak_all())

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
        """Speaks the waiting texts, until the session ends."""

    @abstractmethod
    def _speaks(self) -> bool:
        """Returns whether something is spoken or waits. The client may be silent then."""

    async def _read(self) -> None:
        while True:
            text = await self._receive()
            await self._connection.in_turn(self._handle(text))

    async def _receive(self) -> str:
        """Receives a text; an empty one in place of bytes."""
        try:
            # asyncio.wait_for before Python 3.12 ignores a cancellation that meets a message.
            with anyio.fail_after(None) as self._receiving:
                self._restart_idle_clock()
                return await self._socket.receive_text()
        except TimeoutError:
            raise FatalError(f"socket: no message for {self._limits.idle_s:g} s") from None
        except KeyError:
            return ""

    def _restart_idle_clock(self) -> None:
        """Starts the idle clock of the client anew, or stops it while the session speaks."""
        deadline = math.inf if self._speaks() else anyio.current_time() + self._limits.idle_s
        self._receiving.deadline = deadline

    async def _handle(self, text: str) -> None:
        message = None
        try:
            message = self._parsed(text)
            await self._take(message)
        except FatalError:
            raise
        except GatewayError as error:
            self._gateway.metrics.refused.labels(error.status).inc()
            await self._report(error, message)

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # the last one for too many brackets
            raise RequestError(f"{self.message_noun}: expected a JSON object as text") from None

    async def _send_json(self, content: dict[str, Any]) -> None:
        self._check_open()
        await self._in_time(self._socket.send_json(content))

    async def _send_bytes(self, content: bytes) -> None:
        self._check_open()
        await self._in_time(self._socket.send_bytes(content))

    def _check_open(self) -> None:
        """Raises WebSocketDisconnect if another task has noticed that the client has left."""
        if self._socket.application_state is WebSocketState.DISCONNECTED:
            raise WebSocketDisconnect(GOING_AWAY)

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            with anyio.fail_after(self._limits.idle_s):
                await sending
        except TimeoutError:
            raise WebSocketDisconnect(POLICY, "the client has stopped reading") from None

    async def _drain(self) -> None:
        """Closes the socket after everything that waits was spoken, if the gateway ends."""
        await self._ending.wait()
        await self._waiting.join()
        with suppress(RuntimeError), anyio.move_on_after(CLOSE_S):
            await self._socket.close(GOING_AWAY)
