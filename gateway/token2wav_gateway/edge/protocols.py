"""HTTP and WebSocket protocols of the gateway: the protocols of uvicorn, with bounds."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import cast

import h11
import uvicorn
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Close, CloseCode, Frame

from token2wav_gateway.edge.connections import Connection, Connections
from token2wav_gateway.edge.strict_http import StrictParser
from token2wav_gateway.errors import RequestError

log = logging.getLogger(__name__)

HEAD_S = 10.0  # time for the headers of a request
_PRESENCE_S = 0.5  # time after which a client that sends no more shows whether it still reads
_MOST_FRAGMENTS = 1024  # of a message


class CountedConfig(uvicorn.Config):
    """Configuration of uvicorn with the connections of the server."""

    client_connections: Connections


class _Buffered(asyncio.BufferedProtocol):
    """Protocol that reads into the buffer of its connection."""

    transport: asyncio.Transport

    @property
    def connection(self) -> Connection:
        return cast(Connection, self.transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.connection.received(nbytes)


class HttpConnection(H11Protocol, _Buffered):
    """HTTP/1.1 connection.

    - It is closed if a request's headers are not complete in time. The time begins with the
      connection, and with the end of each response.
    - It answers a client that sends no more after its request, as `nc -N` does.
    """

    config: CountedConfig

    def __init__(
        self,
        config: CountedConfig,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn: StrictParser = StrictParser(
            h11.SERVER, cast(int, config.h11_max_incomplete_event_size)
        )
        self._deadline: asyncio.TimerHandle | None = None
        self._presence: asyncio.TimerHandle | None = None

    @property
    def answering(self) -> bool:
        """Whether a request with complete headers has no complete response yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def evictable(self) -> bool:
        return not self.answering or self.cycle.more_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = self.config.client_connections.add(cast(asyncio.Transport, transport))
        super().connection_made(cast(asyncio.Transport, connection))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.config.client_connections.remove(self.connection)
        self.connection.lost()
        self._stop_watching()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio reads the result
        """Keeps a connection whose request waits for its response.

        After the response has started, the end of the requests means that the client has left. A
        client that leaves sends the same segment as a client that only sends no more.
        """
        if not self.answering or self.cycle.more_body or self.cycle.response_started:
            return False
        self.cycle.keep_alive = False
        self._presence = self.loop.call_later(_PRESENCE_S, self._check_presence)
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuses a request in the format of all errors, and closes the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = json.dumps(RequestError(self.conn.problem).body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(content))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=400, reason=b"Bad Request", headers=headers)
            for event in (response, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.answering:  # the application must not answer too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _watch(self) -> None:
        """Starts the time for the next request, or ends it because the request has arrived."""
        replaced = self.connection.get_protocol() is not self  # by that of a WebSocket
        if self.answering or replaced or self.transport.is_closing():
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self._close_late)

    def _stop_watching(self) -> None:
        for timer in (self._deadline, self._presence):
            if timer is not None:
                timer.cancel()
        self._deadline = self._presence = None

    def _close_late(self) -> None:
        log.info("a connection without a complete request is closed after %g s", HEAD_S)
        self.transport.close()

    def _check_presence(self) -> None:
        """Sends an informational response, which a client that has left answers with a reset.

        The next response fails after the reset, and the application notices that the client left.
        HTTP/1.0 has no such responses.
        """
        if self.cycle.response_started or self.conn.their_http_version != b"1.1":
            return
        response = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(response) or b"")
        self._presence = self.loop.call_later(_PRESENCE_S, self._check_presence)


class SocketConnection(WebSocketsSansIOProtocol, _Buffered):
    """WebSocket connection.

    - It answers no pings of a client that reads no answers.
    - It answers the close of a client after the session has ended. A client that has the answer may
      open its next socket at once, and the limits count the last one no more.
    """

    config: CountedConfig

    @property
    def evictable(self) -> bool:
        return self.close_sent or self._is_left

    @property
    def _is_left(self) -> bool:
        """Whether the client has closed the socket."""
        return self.conn.close_rcvd is not None

    async def run_asgi(self) -> None:
        self.scope["state"]["connection"] = self.connection
        await super().run_asgi()
        if self._is_left:
            self._answer_close()

    def handle_close(self, event: Frame) -> None:
        if self.close_sent or self.transport.is_closing():
            super().handle_close(event)
            return
        close = cast(Close, self.conn.close_rcvd)
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": close.code, "reason": close.reason}
        )
        self.stop_keepalive()
        self.close_timer = self.loop.call_later(self.close_timeout, self._answer_close)

    def shutdown(self) -> None:
        if self._is_left:  # uvicorn would close the socket once more, which is an error
            self._answer_close()
        else:
            super().shutdown()

    def _answer_close(self) -> None:
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.config.client_connections.remove(self.connection)
        self.connection.lost()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        # uvicorn notes a refusal only after the connection is lost, and logs an error before.
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) < _MOST_FRAGMENTS:
            super().handle_cont(event)
        elif not self.close_sent:
            reason = f"message: more than {_MOST_FRAGMENTS} fragments"
            self.conn.send_close(CloseCode.POLICY_VIOLATION, reason)
            self.handle_parser_exception()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # drops the answer
