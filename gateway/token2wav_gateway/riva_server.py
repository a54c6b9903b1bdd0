"""gRPC server of Riva's interface: keys, bounds of messages and times, and a drained end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
import grpc
from google.protobuf.message import DecodeError
from riva.client.proto.riva_tts_pb2_grpc import add_RivaSpeechSynthesisServicer_to_server

from token2wav_gateway.errors import GatewayError, LateBodyError, RequestError
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.riva import RivaSpeech, key_of
from token2wav_gateway.settings import LimitSettings, SettingsError

log = logging.getLogger(__name__)

_HANDSHAKE_S = 10
_LAST_S = 0.5  # for a message that arrives while the gateway ends
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
        limits = gateway.settings.limits
        self._guard = Guard(gateway)
        self._server = grpc.aio.server(
            interceptors=[self._guard],
            maximum_concurrent_rpcs=limits.sockets,
            options=[
                ("grpc.so_reuseport", 0),  # else a second gateway could share the port
                ("grpc.max_allowed_incoming_connections", limits.sockets),
                # More than the calls above, so that a client gets a status, and does not wait.
                ("grpc.max_concurrent_streams", 2 * limits.sockets),
                ("grpc.max_receive_message_length", limits.body_bytes + limits.upload_bytes),
                # Bit 0 is "identity". The bound above is one of compressed messages, and a few
                # compressed bytes can hold gigabytes.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.max_connection_idle_ms", round(limits.idle_s * 1000)),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_S * 1000),
            ],
        )
        add_RivaSpeechSynthesisServicer_to_server(RivaSpeech(gateway), self._server)

    async def start(self, host: str, port: int) -> None:
        """Opens the port, and accepts calls.

        Raises:
            SettingsError: the port cannot be opened.
        """
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self._server.add_insecure_port(address)
        except RuntimeError:
            raise SettingsError(f"riva port {port}: {address} cannot be opened") from None
        await self._server.start()

    async def drain(self, seconds: float) -> None:
        """Refuses new calls, speaks the texts that have arrived, and ends.

        Args:
            seconds: time after which calls that still speak are cancelled.
        """
        self._guard.ending.set()
        await self._server.stop(seconds)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that bounds the memory and time of a call.

    It refuses a call without a valid key before its messages are read, a message that arrives too
    late, and a client that takes no more audio. Errors of the gateway become gRPC statuses.

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
                self._check_key(handler_call_details)
                call = _Call(context, handler, self._gateway.settings.limits, self.ending)
                await call.run()
            except GatewayError as error:
                await self._abort(context, error)
            except grpc.aio.AbortError:
                raise
            except Exception:
                log.exception("a call of Riva's interface failed")
                await self._abort(context, GatewayError("gateway: internal error"))

        # A handler of streams reads a message when it asks for it, and not before the key is
        # checked. The bytes of a call are the same for both kinds.
        return grpc.stream_stream_rpc_method_handler(answer)

    def _check_key(self, call: Any) -> None:
        key = key_of(call.invocation_metadata)
        if key is not None or call.method != _WITHOUT_KEY:
            self._gateway.access.check(key)

    async def _abort(self, context: grpc.aio.ServicerContext, error: GatewayError) -> None:
        self._gateway.metrics.refused.labels(error.status).inc()
        code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
        await context.abort(code, error.body["error"]["message"])


class _Call:
    """Call with bounds of its times.

    Args:
        handler: method of the service.
        ending: see `Guard`.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        handler: grpc.RpcMethodHandler,
        limits: LimitSettings,
        ending: asyncio.Event,
    ) -> None:
        self._context = context
        self._handler = handler
        self._limits = limits
        self._ending = ending

    async def run(self) -> None:
        """Reads the requests, and sends the responses.

        Raises:
            GatewayError: the method fails, a request is late or no message of its type, or the
                client has stopped reading.
        """
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
        while (message := await self._message()) is not grpc.aio.EOF:
            try:
                request = self._handler.request_deserializer(message)
            except DecodeError:
                raise RequestError("request: not a message of Riva's interface") from None
            yield request

    async def _message(self) -> Any:
        """Returns the next message as bytes, or EOF.

        Raises:
            LateBodyError: the client sends none in time.
            GatewayError: the gateway ends.
        """
        reading = asyncio.ensure_future(self._context.read())
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait(
                {reading, ending},
                timeout=self._limits.idle_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ending.done():
                await asyncio.wait({reading}, timeout=_LAST_S)
            if reading.done():
                return reading.result()
        finally:
            reading.cancel()
            ending.cancel()
        if self._ending.is_set():
            raise _EndingError("gateway: shutting down; try again later")
        raise LateBodyError(f"request: no message for {self._limits.idle_s:g} s")

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
