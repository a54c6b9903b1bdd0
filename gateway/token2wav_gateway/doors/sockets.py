"""WebSockets: the open connections of a gateway, their number and their end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeAlias

import anyio
from fastapi import APIRouter, WebSocket, WebSocketDisconnect

from token2wav_gateway.doors.realtime import RealtimeSession
from token2wav_gateway.doors.session import Session, error_event
from token2wav_gateway.doors.socket_session import CLOSE_S, GOING_AWAY, POLICY
from token2wav_gateway.errors import INTERNAL, BusyError, GatewayError
from token2wav_gateway.gateway import Gateway

# Codes of the registry of RFC 6455.
_INTERNAL, _TRY_LATER = 1011, 1013
_FIRST_SERVER_ERROR = 500  # HTTP status
# Subprotocols of OpenAI's client for browsers; the second one is the start of its key.
_REALTIME, _KEY = "realtime", "openai-insecure-api-key."


router = APIRouter()


SessionType: TypeAlias = type[Session] | type[RealtimeSession]


class Sockets:
    """Open WebSockets of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._open: set[WebSocket] = set()
        self._ending = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self._open)

    def drain(self) -> None:
        """Ends each session after the sentences that it has received, and refuses new ones."""
        self._ending.set()

    async def serve(self, socket: WebSocket, session: SessionType) -> None:
        """Serves a socket until it is closed.

        Args:
            session: type of its session.
        """
        gateway = self._gateway
        try:
            offered = socket.scope.get("subprotocols", [])
            await socket.accept(_REALTIME if _REALTIME in offered else None)
            self._check_room()
            async with gateway.admitted(_headers(socket)) as caller:
                self._check_room()  # others may have come meanwhile
                self._open.add(socket)
                gateway.metrics.sockets.set(len(self._open))
                await session(caller, socket, self._ending).run()
        except WebSocketDisconnect:
            pass
        except GatewayError as error:
            await self._refuse(socket, error)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a library in Rust is no Exception
            await self._refuse(socket, GatewayError(INTERNAL))
            raise
        finally:
            self._open.discard(socket)
            gateway.metrics.sockets.set(len(self._open))
            with suppress(RuntimeError, WebSocketDisconnect), anyio.move_on_after(CLOSE_S):
                await socket.close()

    async def _refuse(self, socket: WebSocket, error: GatewayError) -> None:
        """Sends an error, and closes the socket."""
        self._gateway.metrics.refused.labels(error.status).inc()
        with suppress(RuntimeError, WebSocketDisconnect), anyio.move_on_after(CLOSE_S):
            await socket.send_json(error_event(error))
            await socket.close(_close_code(error))

    def _check_room(self) -> None:
        """Raises BusyError if no further socket is served."""
        if self._ending.is_set():
            raise BusyError("gateway: shutting down; try again later")
        if len(self._open) >= self._gateway.settings.limits.sockets:
            raise BusyError(f"gateway: {len(self._open)} sockets are open; try again later")

    async def close(self) -> None:
        """Closes all sockets, because the gateway ends."""
        await asyncio.gather(*(self._leave(socket) for socket in self._open))

    async def _leave(self, socket: WebSocket) -> None:
        with suppress(RuntimeError, WebSocketDisconnect), anyio.move_on_after(CLOSE_S):
            await socket.close(GOING_AWAY)


def _headers(socket: WebSocket) -> Mapping[str, str]:
    """Returns the headers of a socket. A browser can send a key only as a subprotocol."""
    for name in socket.scope.get("subprotocols", []):
        if name.startswith(_KEY):
            return {"authorization": f"Bearer {name.removeprefix(_KEY)}", **socket.headers}
    return socket.headers


def _close_code(error: GatewayError) -> int:
    if isinstance(error, BusyError):
        return _TRY_LATER
    return POLICY if error.status < _FIRST_SERVER_ERROR else _INTERNAL


@router.websocket("/v1/audio/speech/stream")
async def speak_text(socket: WebSocket) -> None:
    await _serve(socket, Session)


@router.websocket("/v1/realtime")
async def speak_in_realtime(socket: WebSocket) -> None:
    await _serve(socket, RealtimeSession)


async def _serve(socket: WebSocket, session: SessionType) -> None:
    sockets: Sockets = socket.app.state.sockets
    await sockets.serve(socket, session)
