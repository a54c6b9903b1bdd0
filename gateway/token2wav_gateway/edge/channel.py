"""Channel of JSON messages to the client of a WebSocket, with bounds of time in both directions."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

import anyio
from fastapi import WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

from token2wav_gateway.edge.connections import Connection
from token2wav_gateway.errors import GatewayError, RequestError

CLOSE_S = 1.0  # for the last messages to a client, which may have stopped reading
POLICY, GOING_AWAY = 1008, 1001  # codes of RFC 6455

Handler: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
# Answers a message that is refused.
Refusal: TypeAlias = Callable[[GatewayError, Any], Coroutine[Any, Any, None]]


class FatalError(RequestError):
    """Error that ends a session."""


class Channel:
    """Channel to the client of a session.

    Args:
        idle_s: seconds in which the client must send a message while the gateway is silent, and
            must read a message.
        speaks: function that returns whether the session speaks. The client may be silent then.
        message: noun for a message in errors.
    """

    def __init__(
        self, socket: WebSocket, idle_s: float, speaks: Callable[[], bool], message: str
    ) -> None:
        self._socket = socket
        self._idle_s = idle_s
        self._speaks = speaks
        self._message = message
        self._receiving = anyio.CancelScope()
        self._connection: Connection = socket.state.connection

    async def send(self, content: dict[str, Any]) -> None:
        """Sends a message.

        Raises:
            WebSocketDisconnect: the client takes no more bytes.
        """
        self._check_open()
        await self._in_time(self._socket.send_json(content))

    async def send_bytes(self, content: bytes) -> None:
        """Sends a binary message. Raises as `send` does."""
        self._check_open()
        await self._in_time(self._socket.send_bytes(content))

    def _check_open(self) -> None:
        """Raises WebSocketDisconnect if another task has noticed that the client has left."""
        if self._socket.application_state is WebSocketState.DISCONNECTED:
            raise WebSocketDisconnect(GOING_AWAY)

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            with anyio.fail_after(self._idle_s):
                await sending
        except TimeoutError:
            raise WebSocketDisconnect(POLICY, "the client has stopped reading") from None

    async def take(self, handle: Handler, refuse: Refusal | None = None) -> None:
        """Receives a message, and handles it in turn with the messages of other connections.

        Args:
            refuse: answers an error of the handler, with the message, or None for a message that is
                no JSON; None to raise the error.

        Raises:
            FatalError: the client sent nothing for too long while the session was silent.
        """
        text = await self._receive()
        await self._connection.in_turn(self._handle(text, handle, refuse))

    async def _handle(self, text: str, handle: Handler, refuse: Refusal | None) -> None:
        message = None
        try:
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):  # the last one for too many brackets
                raise RequestError(f"{self._message}: expected a JSON object as text") from None
            await handle(message)
        except GatewayError as error:
            if refuse is None or isinstance(error, FatalError):
                raise
            await refuse(error, message)

    async def _receive(self) -> str:
        """Receives a text; an empty one in place of bytes."""
        try:
            # asyncio.wait_for before Python 3.12 ignores a cancellation that meets a message.
            with anyio.fail_after(None) as self._receiving:
                self.restart_idle_clock()
                return await self._socket.receive_text()
        except TimeoutError:
            raise FatalError(f"socket: no message for {self._idle_s:g} s") from None
        except KeyError:
            return ""

    def restart_idle_clock(self) -> None:
        """Starts the idle clock of the client anew, or stops it while the session speaks."""
        deadline = math.inf if self._speaks() else anyio.current_time() + self._idle_s
        self._receiving.deadline = deadline

    async def close(self) -> None:
        """Closes the socket because the gateway ends, unless the client has closed it."""
        with suppress(RuntimeError), anyio.move_on_after(CLOSE_S):
            await self._socket.close(GOING_AWAY)


async def run_until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Runs the parts of a session until one of them ends, and cancels the others.

    Raises:
        Exception: the error of the part that ended.
    """
    tasks = {asyncio.create_task(part) for part in parts}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
