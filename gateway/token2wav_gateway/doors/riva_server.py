"""gRPC server of Riva's interface: keys, bounds of messages and times, and a drained end.

`riva_front.py` stands before it, and bounds messages that never end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, NoReturn

import anyio
import grpc
from google.protobuf.message import DecodeError
from riva.client.proto.riva_tts_pb2_grpc import add_RivaSpeechSynthesisServicer_to_server

from token2wav_gateway.access import Holder
from token2wav_gateway.doors.riva import RivaSpeech, key_of
from token2wav_gateway.edge.riva_front import RivaFront
from token2wav_gateway.edge.tasks import first_of
from token2wav_gateway.errors import INTERNAL, GatewayError, LateBodyError, RequestError
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.settings import LimitSettings, SettingsError

log = logging.getLogger(__name__)

_PING_INTERVAL_MS = 1000
_HANDSHAKE_S = 10
_UNFINISHED = 4  # messages of the largest size that may be unfinished, of all clients together
_SOCKET_BYTES = 107  # largest length of a path of a Unix socket in Linux
_LAST_S = 0.5  # for a message that arrives while the gateway ends
_SHUTTING_DOWN = "gateway: shutting down; try again later"
_WITHOUT_KEY = "/nvidia.riva.tts.RivaSpeechSynthesis/GetRivaSynthesisConfig"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class RivaServer:
    """gRPC server with the service `nvidia.riva.tts.RivaSpeechSynthesis`.

    Create it in the event loop that uses it.
    """

    def __init__(self, gateway: Gateway) -> None:
        limits, voices = gateway.settings.limits, gateway.settings.voices
        recording_bytes = 0 if voices.model is None else limits.upload_bytes
        message_bytes = limits.body_bytes + recording_bytes
        self._front = RivaFront(_UNFINISHED * message_bytes, limits.sockets, limits.idle_s)
        self._guard = Guard(gateway)
        self._server = grpc.aio.server(
            interceptors=[self._guard],
            maximum_concurrent_rpcs=limits.sockets,
            options=[
                # The front bounds the connections. Here an ended one counts a little longer.
                ("grpc.max_allowed_incoming_connections", 2 * limits.sockets),
                # More than the calls above, so that a client gets a status, and does not wait. A
                # refused call counts a little longer, and a stream above this bound gets no status.
                ("grpc.max_concurrent_streams", 4 * limits.sockets),
                ("grpc.max_receive_message_length", message_bytes),
                # Of a call that does not read, a window of fixed size is kept in memory.
                ("grpc.http2.bdp_probe", 0),
                # Bit 0 is "identity". The bound above is one of compressed messages, and a few
                # compressed bytes can hold gigabytes.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                # Clients may ping between their calls, as at the speech server.
                ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
                ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
            ],
        )
        add_RivaSpeechSynthesisServicer_to_server(RivaSpeech(gateway), self._server)

    async def start(self, host: str, port: int) -> None:
        """Opens the port, and accepts calls.

        Raises:
            SettingsError: the port, or the socket behind it, cannot be opened.
        """
        try:
            self._server.add_insecure_port(f"unix:{self._front.path}")
        except (OSError, RuntimeError):
            await self._front.close()
            raise SettingsError(
                f"riva port {port}: its socket {self._front.path} cannot be opened; set TMPDIR to "
                f"a shorter path, so that this one has at most {_SOCKET_BYTES} bytes"
            ) from None
        await self._server.start()
        try:
            await self._front.start(host, port)
        except OSError:
            await self._server.stop(None)
            await self._front.close()
            raise SettingsError(f"riva port {port}: {host}:{port} cannot be opened") from None

    async def drain(self, seconds: float) -> None:
        """Refuses new calls, speaks the texts that have arrived, and ends.

        Args:
            seconds: time after which calls that still speak are cancelled.
        """
        self._guard.ending.set()
        await self._server.stop(seconds)
        await self._front.close()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that bounds the memory and time of a call.

    It admits a call before its messages are read, and refuses a message that arrives too late, and
    a client that takes no more audio. Errors of the gateway become gRPC statuses.

    Attributes:
        ending: event after which calls end as soon as they have spoken the texts that have arrived.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.ending = asyncio.Event()
        self._gateway = gateway

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: Any,
    ) -> grpc.RpcMethodHandler | None:
        """Returns a handler with bounds, in place of the handler of the service."""
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            return None

        async def answer(_: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                async with self._admitted(handler_call_details) as holder:
                    limits = self._gateway.settings.limits
                    await _Call(context, handler, holder, limits, self.ending).run()
            except GatewayError as error:
                await self._abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                log.exception("a call of Riva's interface failed")
                await self._abort(context, GatewayError(INTERNAL))

        # A handler of streams reads a message when it asks for it, and not before the key is
        # checked. The bytes of a call are the same for both kinds.
        return grpc.stream_stream_rpc_method_handler(answer)

    def _admitted(self, call: Any) -> AbstractAsyncContextManager[Holder]:
        """Context manager of a call; yields the holder of its key."""
        access, key = self._gateway.access, key_of(call.invocation_metadata)
        if call.method != _WITHOUT_KEY:
            return access.admitted(key)
        return nullcontext(access.everybody if key is None else access.check(key))

    async def _abort(self, context: grpc.aio.ServicerContext, error: GatewayError) -> None:
        self._gateway.metrics.refused.labels(error.status).inc()
        code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
        await context.abort(code, error.body["error"]["message"])


class _Call:
    """Call with bounds of its times.

    Args:
        handler: method of the service.
        holder: holder of the key. Each message after the first counts as a request.
        ending: see `Guard`.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        handler: grpc.RpcMethodHandler,
        holder: Holder,
        limits: LimitSettings,
        ending: asyncio.Event,
    ) -> None:
        self._context = context
        self._handler = handler
        self._holder = holder
        self._limits = limits
        self._ending = ending

    async def run(self) -> None:
        """Reads the requests, and sends the responses."""
        handler, context = self._handler, self._context
        if handler.unary_unary is not None:
            async with aclosing(self._requests()) as requests:
                async for request in requests:
                    await self._send(await handler.unary_unary(request, context))
                    return
            raise RequestError("request: missing")
        async with (
            aclosing(self._requests()) as requests,
            aclosing(handler.stream_stream(requests, context)) as responses,
        ):
            async for response in responses:
                await self._send(response)

    async def _requests(self) -> AsyncGenerator[Any, None]:
        first = True
        while (request := await self._request()) is not None:
            if not first:  # the call has been counted
                self._holder.count_request()
            first = False
            yield request

    async def _request(self) -> Any:
        """Returns the next message; None after the last one. Raises as `_message` does."""
        if (message := await self._message()) is grpc.aio.EOF:
            return None
        try:
            return self._handler.request_deserializer(message)
        except DecodeError:
            raise RequestError("request: not a message of Riva's interface") from None

    async def _message(self) -> Any:
        """Returns the next message as bytes, or EOF."""
        try:
            with anyio.fail_after(self._limits.idle_s):
                return await first_of(self._context.read(), self._end())
        except TimeoutError:
            if self._ending.is_set():
                raise _EndingError(_SHUTTING_DOWN) from None
            raise LateBodyError(f"request: no message for {self._limits.idle_s:g} s") from None

    async def _end(self) -> NoReturn:
        await self._ending.wait()
        await asyncio.sleep(_LAST_S)
        raise _EndingError(_SHUTTING_DOWN)

    async def _send(self, response: Any) -> None:
        try:
            with anyio.fail_after(self._limits.idle_s):
                await self._context.write(self._handler.response_serializer(response))
        except TimeoutError:
            raise LateBodyError(
                f"response: the client has read nothing for {self._limits.idle_s:g} s"
            ) from None


class _EndingError(GatewayError):
    """Error of a call that waits for a text while the gateway ends."""

    status = 503
