"""Door of plain HTTP to the models, the voices and the health of the gateway."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile

from token2wav_gateway.doors.http_speech import unless_left
from token2wav_gateway.doors.requests import Words
from token2wav_gateway.errors import AccessDeniedError, ModelError
from token2wav_gateway.gateway import Gateway

router = APIRouter()


def _gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "token2wav"}


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the names of the model."""
    names = _gateway_of(request).settings.models
    return {"object": "list", "data": [_model(name) for name in names]}


@router.get("/v1/models/{name:path}")
async def describe_model(name: str, request: Request) -> dict[str, Any]:
    """Describes a model."""
    _gateway_of(request).check_model(name)
    return _model(name)


@router.get("/v1/audio/voices")
async def list_voices(request: Request) -> dict[str, Any]:
    """Lists the voices."""
    voices = _gateway_of(request).voices.list()
    return {
        "object": "list",
        "voices": [voice.name for voice in voices],
        "data": [voice.summary for voice in voices],
    }


@router.post("/v1/audio/voices", status_code=201)
async def create_voice(
    request: Request,
    name: Annotated[str, Form()],
    audio_sample: Annotated[UploadFile, File()],
    ref_text: Annotated[Words, Form()] = "",
    consent: Annotated[Words | None, Form()] = None,
) -> dict[str, Any]:
    """Makes a voice of a recording and its text."""
    gateway = _gateway_of(request)
    async with gateway.admitted(request.headers) as caller:
        recording = await audio_sample.read()
        making = gateway.voices.create(name, ref_text, recording, caller.holder.name, consent)
        return (await unless_left(request, making)).summary


@router.delete("/v1/audio/voices/{name}")
async def delete_voice(name: str, request: Request) -> dict[str, Any]:
    """Deletes a voice that was made with the same key."""
    gateway = _gateway_of(request)
    holder = gateway.access.check(request.headers.get("authorization"))
    gateway.voices.delete(name, holder.name)
    return {"id": name, "object": "voice", "deleted": True}


@router.get("/health/live", include_in_schema=False)
async def live() -> dict[str, str]:
    return {"status": "live"}


@router.get("/health/ready", include_in_schema=False)
async def ready(request: Request) -> dict[str, str]:
    gateway = _gateway_of(request)
    try:
        await gateway.servers.works.get()
    except ModelError as error:
        try:
            gateway.access.check(request.headers.get("authorization"))
        except AccessDeniedError:
            raise type(error)("gateway: a server behind it does not work") from None
        raise
    return {"status": "ready"}
