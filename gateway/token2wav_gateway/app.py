"""Routes of the gateway, in the manner of OpenAI's API."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    suppress,
)
from typing import Annotated, Any

from fastapi import FastAPI, File, Form, Request, UploadFile, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from token2wav_client import AudioChunk
from token2wav_gateway.access import Access, Holder
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import (
    AccessDeniedError,
    GatewayError,
    ModelError,
    RequestError,
    StorageError,
)
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.guard import Guard, error_response
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.origins import OriginCheck
from token2wav_gateway.paths import PathWithoutSlash
from token2wav_gateway.progress import Progress
from token2wav_gateway.realtime import RealtimeSession
from token2wav_gateway.requests import SpeechRequest, Words, problem
from token2wav_gateway.settings import Settings
from token2wav_gateway.sockets import Sockets
from token2wav_gateway.speech import Text
from token2wav_gateway.stage_request import StageRequest
from token2wav_gateway.template import load_template
from token2wav_gateway.tracing import trace_headers
from token2wav_gateway.voices import Voice
from token2wav_gateway.word_times import SpokenText, check_aligner

log = logging.getLogger(__name__)

_EVENTS = "text/event-stream"
_INTERNAL = "gateway: internal error"
# Headers of vLLM-Omni for the fields of OpenAI's usage.
_USAGE_HEADERS = {
    "x-vllm-omni-input-tokens": "input_tokens",
    "x-vllm-omni-output-tokens": "output_tokens",
    "x-vllm-omni-total-tokens": "total_tokens",
}
_END_REASON = "x-end-reason"


def create_app(settings: Settings, metrics: Metrics) -> FastAPI:
    """Creates the ASGI application.

    Raises:
        SettingsError: the template of the language model is wrong, or the aligner is not installed.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        app.state.gateway = gateway = Gateway(settings, access, metrics)
        app.state.sockets = Sockets(gateway)
        gateway.word_times.start()
        try:
            yield
        finally:
            await app.state.sockets.close()
            await gateway.word_times.close()
            await gateway.speech.close()

    load_template(settings.language_model.template, settings.language_model.folder)
    check_aligner(settings.aligner)
    access = Access(settings.keys)
    app = FastAPI(
        title="token2wav gateway",
        description="Text in, speech out, while the speech tokens still arrive.",
        lifespan=lifespan,
    )
    app.add_middleware(Guard, access=access, limits=settings.limits, metrics=metrics)
    app.add_middleware(OriginCheck, origins=settings.origins, metrics=metrics)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", _END_REASON, *_USAGE_HEADERS],
        )
    app.add_middleware(PathWithoutSlash)

    @app.exception_handler(GatewayError)
    async def refuse(_: Request, error: GatewayError) -> JSONResponse:
        return error_response(error, metrics)

    @app.exception_handler(Exception)
    async def fail(request: Request, _: Exception) -> JSONResponse:
        return await refuse(request, GatewayError(_INTERNAL))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> JSONResponse:
        field, message = problem(list(error.errors()))
        return await refuse(request, RequestError(message, param=field))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(cause := error.__cause__, OSError):  # a large form is kept in a file
            log.error("a form cannot be stored: %s", cause)
            return await refuse(request, StorageError(cause))
        refusal = GatewayError(f"{request.method} {request.url.path}: {error.detail}")
        refusal.status, refusal.kind = error.status_code, "invalid_request_error"
        return await refuse(request, refusal)

    def gateway_of(request: Request) -> Gateway:
        gateway: Gateway = request.app.state.gateway
        return gateway

    # The guard has checked the key of each request. Handlers count requests that need time.
    def admitted(request: Request) -> AbstractContextManager[Holder]:
        return access.admitted(request.headers.get("authorization"))

    @app.post("/v1/audio/speech", response_class=Response)
    async def create_speech(body: SpeechRequest, request: Request) -> Response:
        """Says a text, and sends the audio as it is made."""
        gateway, progress = gateway_of(request), Progress()
        async with AsyncExitStack() as stack:
            stack.enter_context(admitted(request))
            gateway.check_model(body.model)
            gateway.speech.check_words(body.input, body.instructions)
            voice: Voice = await _unless_left(request, gateway.voice_of(body))
            trace = trace_headers(request.headers)
            text = Text(
                body.input, voice, body.instructions, body.sampling, trace=trace, speed=body.speed
            )
            speech, spoken = gateway.speech.speak(text, progress), None
            if body.word_timestamps:
                spoken = SpokenText(gateway.word_times, body.input)
                speech = spoken.listen(speech)
            chunks = await stack.enter_async_context(aclosing(speech))
            first = await _unless_left(request, anext(chunks, None))
            encoder = Encoder(body.audio_format, whole=body.delivery == "whole")
            pieces = _encoded(encoder, first, chunks, progress)
            media_type = encoder.format.media_type
            if body.delivery == "whole":
                return await _whole(request, media_type, pieces, progress, len(body.input))
            if body.delivery == "sse":
                pieces = _events(pieces, len(body.input), progress, spoken)
                media_type = _EVENTS
            return ClosingResponse(pieces, media_type, stack.pop_all())
        raise AssertionError  # an exit stack never swallows an error

    @app.post("/v1/stage/run", response_class=Response)
    async def run_stage(body: StageRequest, request: Request) -> Response:
        """Turns speech tokens or codes into audio, without a language model."""
        gateway = gateway_of(request)
        async with AsyncExitStack() as stack:
            stack.enter_context(admitted(request))
            voice = gateway.voices.get(body.voice).tensors if body.voice else None
            progress = Progress()
            trace = trace_headers(request.headers)
            speech = gateway.speech.speak_codes(body.all_codes, voice, progress, trace, body.speed)
            chunks = await stack.enter_async_context(aclosing(speech))
            first = await _unless_left(request, anext(chunks, None))
            encoder = Encoder(body.response_format, whole=not body.stream)
            pieces = _encoded(encoder, first, chunks, progress)
            response: Response
            if body.stream:
                response = ClosingResponse(pieces, encoder.format.media_type, stack.pop_all())
            else:
                media_type = encoder.format.media_type
                response = await _whole(request, media_type, pieces, progress, 0)
            if body.request_id is not None:
                response.headers["x-request-id"] = body.request_id
            return response
        raise AssertionError

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """Lists the names of the model."""
        gateway = gateway_of(request)
        return {"object": "list", "data": [_model(name) for name in gateway.settings.models]}

    @app.get("/v1/models/{name}")
    async def describe_model(name: str, request: Request) -> dict[str, Any]:
        """Describes a model."""
        gateway_of(request).check_model(name)
        return _model(name)

    @app.get("/v1/audio/voices")
    async def list_voices(request: Request) -> dict[str, Any]:
        """Lists the voices."""
        voices = gateway_of(request).voices.list()
        return {
            "object": "list",
            "voices": [voice.name for voice in voices],
            "data": [voice.summary for voice in voices],
        }

    @app.post("/v1/audio/voices", status_code=201)
    async def create_voice(
        request: Request,
        name: Annotated[str, Form()],
        audio_sample: Annotated[UploadFile, File()],
        ref_text: Annotated[Words, Form()] = "",
        consent: Annotated[Words | None, Form()] = None,
    ) -> dict[str, Any]:
        """Makes a voice of a recording and its text."""
        with admitted(request) as holder:
            recording, voices = await audio_sample.read(), gateway_of(request).voices
            making = voices.create(name, ref_text, recording, holder.name, consent)
            voice: Voice = await _unless_left(request, making)
            return voice.summary

    @app.delete("/v1/audio/voices/{name}")
    async def delete_voice(name: str, request: Request) -> dict[str, Any]:
        """Deletes a voice that was made with the same key."""
        holder = access.check(request.headers.get("authorization"))
        gateway_of(request).voices.delete(name, holder.name)
        return {"id": name, "object": "voice", "deleted": True}

    @app.websocket("/v1/audio/speech/stream")
    async def speak_stream(socket: WebSocket) -> None:
        sockets: Sockets = socket.app.state.sockets
        await sockets.serve(socket)

    @app.websocket("/v1/realtime")
    async def speak_in_realtime(socket: WebSocket) -> None:
        sockets: Sockets = socket.app.state.sockets
        await sockets.serve(socket, RealtimeSession)

    @app.get("/health/live", include_in_schema=False)
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", include_in_schema=False)
    async def ready(request: Request) -> dict[str, str]:
        try:
            await gateway_of(request).readiness.confirm()
        except ModelError as error:
            try:
                access.check(request.headers.get("authorization"))
            except AccessDeniedError:
                raise type(error)("gateway: a server behind it does not work") from None
            raise
        return {"status": "ready"}

    return app


class ClosingResponse(StreamingResponse):
    """Response that releases its resources when it ends, also after an error."""

    def __init__(
        self, pieces: AsyncGenerator[bytes, None], media_type: str, resources: AsyncExitStack
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers={"cache-control": "no-store"})
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        # The status was sent, so the missing end tells the client. Speech has logged the error.
        with suppress(GatewayError):
            await super().stream_response(send)


class _ClientLeftError(GatewayError):
    """Error of a request after its client has disconnected. It reaches no client."""

    status = 499


async def _unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """Awaits work, and cancels it as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _ClientLeftError("the client has disconnected")
        return task.result()
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _encoded(
    encoder: Encoder,
    first: AudioChunk | None,
    rest: AsyncGenerator[AudioChunk, None],
    progress: Progress,
) -> AsyncGenerator[bytes, None]:
    """Encodes the chunks of an utterance, of which the first has already been taken."""
    if first is not None:
        progress.advance(first)
        if piece := encoder.encode(first.audio):
            yield piece
    async for chunk in rest:
        progress.advance(chunk)
        if piece := encoder.encode(chunk.audio):
            yield piece
    if piece := encoder.finish():
        yield piece


async def _whole(
    request: Request,
    media_type: str,
    pieces: AsyncGenerator[bytes, None],
    progress: Progress,
    characters: int,
) -> Response:
    """Response with a whole file. Headers have its usage, and the limit that has cut it off."""
    content = await _unless_left(request, _joined(pieces))
    usage = progress.usage(characters)
    headers = {header: str(usage[field]) for header, field in _USAGE_HEADERS.items()}
    if progress.end_reason is not None:
        headers[_END_REASON] = progress.end_reason
    return Response(content, media_type=media_type, headers=headers)


async def _joined(pieces: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def _events(
    pieces: AsyncGenerator[bytes, None],
    characters: int,
    progress: Progress,
    spoken: SpokenText | None,
) -> AsyncGenerator[bytes, None]:
    """Wraps pieces of audio in OpenAI's events.

    Each piece also says the samples and the speech tokens that have been sent so far. After all
    audio, a last piece without audio has the times of `spoken`. An error ends the events, as an
    event of vLLM-Omni.
    """

    def delta(piece: bytes, **fields: Any) -> bytes:
        counts = {"samples": progress.samples, "tokens": progress.spoken_tokens}
        audio = base64.b64encode(piece).decode()
        return _event({"type": "speech.audio.delta", "audio": audio, **counts, **fields})

    try:
        async for piece in pieces:
            yield delta(piece)
        if spoken is not None:
            yield delta(b"", **await spoken.fields())
    except GatewayError as error:
        yield _event({"type": "speech.audio.error", **error.body})
        return
    except Exception:
        yield _event({"type": "speech.audio.error", **GatewayError(_INTERNAL).body})
        raise
    done = {"type": "speech.audio.done", "usage": progress.usage(characters), **progress.end}
    yield _event(done)


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "token2wav"}
