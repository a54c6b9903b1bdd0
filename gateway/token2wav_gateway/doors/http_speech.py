"""Door of plain HTTP: a text or codes in a request, and audio in its response."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, NoReturn, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from token2wav_gateway.doors.requests import Delivery, SpeechRequest
from token2wav_gateway.doors.stage_request import StageRequest
from token2wav_gateway.edge.tasks import first_of
from token2wav_gateway.errors import INTERNAL, GatewayError
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.speech.content import Audio, Codes, Ended, Event, Words
from token2wav_gateway.speech.turn import Turn, check_text

# Headers of vLLM-Omni for the fields of OpenAI's usage.
_USAGE_HEADERS = {
    "x-vllm-omni-input-tokens": "input_tokens",
    "x-vllm-omni-output-tokens": "output_tokens",
    "x-vllm-omni-total-tokens": "total_tokens",
}
_END_REASON = "x-end-reason"
# Headers of whole files, for pages of other hosts.
HEADERS = (_END_REASON, *_USAGE_HEADERS)

_ResultT = TypeVar("_ResultT")

router = APIRouter()


@router.post("/v1/audio/speech", response_class=Response)
async def create_speech(body: SpeechRequest, request: Request) -> Response:
    """Says a text, and sends the audio as it is made."""
    gateway: Gateway = request.app.state.gateway
    async with AsyncExitStack() as stack:
        caller = await stack.enter_async_context(gateway.admitted(request.headers))
        gateway.check_model(body.model)
        check_text(body.input, body.instructions, gateway.settings.limits)
        voice = await unless_left(
            request, gateway.voice_of(body.voice_name, body.ref_audio, body.ref_text)
        )
        turn = caller.turn(
            body.text(body.input, voice),
            body.audio_format,
            body.sample_rate,
            whole=body.delivery == "whole",
            words=body.word_timestamps,
        )
        return await _response(request, turn, body.delivery, stack)
    raise AssertionError  # an exit stack never swallows an error


@router.post("/v1/stage/run", response_class=Response)
async def run_stage(body: StageRequest, request: Request) -> Response:
    """Turns speech tokens or codes into audio, without a language model."""
    gateway: Gateway = request.app.state.gateway
    async with AsyncExitStack() as stack:
        caller = await stack.enter_async_context(gateway.admitted(request.headers))
        voice = gateway.voices.get(body.voice).tensors if body.voice else None
        turn = caller.turn(
            Codes(body.all_codes, voice, body.speed),
            body.response_format or "wav",
            body.sample_rate,
            whole=not body.stream,
        )
        response = await _response(request, turn, "audio" if body.stream else "whole", stack)
        if body.request_id is not None:
            response.headers["x-request-id"] = body.request_id
        return response
    raise AssertionError


async def _response(
    request: Request, turn: Turn, delivery: Delivery, stack: AsyncExitStack
) -> Response:
    """Returns the response of a turn. An error before the first audio decides its status.

    Args:
        stack: resources of the request. A response that is sent as it is made takes them along.
    """
    events = await stack.enter_async_context(aclosing(turn.events()))
    await unless_left(request, anext(events))
    media_type = turn.media_type
    if delivery == "sse":
        return _ClosingResponse(_server_sent(events), "text/event-stream", stack.pop_all())
    if delivery == "audio":
        return _ClosingResponse(_audio(events), media_type, stack.pop_all())
    content = await unless_left(request, _joined(_audio(events)))
    usage, reason = turn.ended.usage, turn.ended.reason
    headers = {header: str(usage[field]) for header, field in _USAGE_HEADERS.items()}
    if reason is not None:
        headers[_END_REASON] = reason
    return Response(content, media_type=media_type, headers=headers)


async def _audio(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async for event in events:
        if isinstance(event, Audio):
            yield event.content


async def _joined(pieces: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def _server_sent(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    """Translates events to those of OpenAI.

    Each piece of audio also says the samples and the speech tokens that have been sent so far.
    Pieces without audio have the times of words. An error ends the events, as an event of
    vLLM-Omni.
    """

    def delta(piece: bytes, **fields: Any) -> bytes:
        audio = base64.b64encode(piece).decode()
        return _event({"type": "speech.audio.delta", "audio": audio, **counts, **fields})

    counts = {"samples": 0, "tokens": 0}
    try:
        async for event in events:
            if isinstance(event, Audio):
                counts = {"samples": event.samples, "tokens": event.tokens}
                yield delta(event.content)
            elif isinstance(event, Words):
                segments = {"segments": event.segments} if event.segments else {}
                yield delta(b"", timestamps=event.times, **segments)
            elif isinstance(event, Ended):
                yield _event({"type": "speech.audio.done", "usage": event.usage, **event.fields})
    except GatewayError as error:
        yield _event({"type": "speech.audio.error", **error.body})
    except Exception:
        yield _event({"type": "speech.audio.error", **GatewayError(INTERNAL).body})
        raise


def _event(content: dict[str, Any]) -> bytes:
    return f"event: {content['type']}\ndata: {json.dumps(content)}\n\n".encode()


class _ClosingResponse(StreamingResponse):
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
        # The status was sent, so the missing end tells the client. The turn has logged the error.
        with suppress(GatewayError):
            await super().stream_response(send)


class _ClientLeftError(GatewayError):
    """Error of a request after its client has disconnected. It reaches no client."""

    status = 499


async def unless_left(request: Request, work: Awaitable[_ResultT]) -> _ResultT:
    """Awaits work, and cancels it as soon as the client disconnects."""
    return await first_of(work, _disconnected(request))


async def _disconnected(request: Request) -> NoReturn:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    raise _ClientLeftError("the client has disconnected")
