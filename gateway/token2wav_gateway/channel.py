"""Channel of JSON messages to the client of a WebSocket, with bounds of time in both directions."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
from fastapi import WebSocket, WebSocketDisconnect

from token2wav_gateway.errors import RequestError

CLOSE_S = 1.0  # for the last messages to a client, which may have stopped reading
POLICY, GOING_AWAY = 1008, 1001  # codes of RFC 6455


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

    async def send(self, content: dict[str, Any]) -> None:
        """Sends a message.

        Raises:
            WebSocketDisconnect: the client takes no more bytes.
        """
        await self._in_time(self._socket.send_json(content))

    async def send_bytes(self, content: bytes) -> None:
        """Sends a binary message. Raises as `send` does."""
        await self._in_time(self._socket.send_bytes(content))

    async def _in_time(self, sending: Awaitable[None]) -> None:
        try:
            with anyio.fail_after(self._idle_s):
                await sending
        except TimeoutError:
            raise WebSocketDisconnect(POLICY, "the client has stopped reading") from None

    async def receive(self) -> Any:
        """Receives a message.

        Raises:
            RequestError: the message is no JSON.
            FatalError: the client sent nothing for too long while the session was silent.
        """
        try:
            # asyncio.wait_for before Python 3.12 ignores a cancellation that meets a message.
            with anyio.fail_after(None) as self._receiving:
                self.restart_idle_clock()
                text = await self._socket.receive_text()
            return json.loads(text)
        except TimeoutError:
            raise FatalError(f"socket: no message for {self._idle_s:g} s") from None
        except (ValueError, KeyError, RecursionError):  # the last one for too many brackets
            raise RequestError(f"{self._message}: expected a JSON object as text") from None

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
