"""Application of the gateway: its HTTP doors, and the guards of all doors."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from token2wav_gateway.access import Access
from token2wav_gateway.doors import http_speech, http_voices, pages, sockets
from token2wav_gateway.doors.requests import problem
from token2wav_gateway.doors.sockets import Sockets
from token2wav_gateway.edge.guard import Guard, PathWithoutSlash, error_response
from token2wav_gateway.edge.origins import OriginCheck
from token2wav_gateway.errors import INTERNAL, GatewayError, RequestError, StorageError
from token2wav_gateway.gateway import Gateway
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings, check_plugin
from token2wav_gateway.speech.template import load_template
from token2wav_gateway.words.aligners import ALIGNERS
from token2wav_gateway.words.normaliser_worker import NORMALISERS

log = logging.getLogger(__name__)


def create_app(settings: Settings, metrics: Metrics) -> FastAPI:
    """Creates the ASGI application.

    Raises:
        SettingsError: the template of the language model is wrong, or the aligner or the normaliser
            cannot be imported.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        app.state.gateway = gateway = Gateway(settings, access, metrics)
        app.state.sockets = Sockets(gateway)
        gateway.word_times.start()
        await gateway.servers.normaliser.start()
        try:
            yield
        finally:
            await app.state.sockets.close()
            await gateway.close()

    load_template(settings.language_model.template, settings.language_model.folder)
    check_plugin("aligner.name", settings.aligner.name, ALIGNERS)
    check_plugin("text.normalise", settings.text.normalise, NORMALISERS)
    access = Access(settings.keys)
    app = FastAPI(
        title="token2wav gateway",
        description="Text in, speech out, while the speech tokens still arrive.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads programs of another host
        redoc_url=None,
    )
    app.add_middleware(
        Guard,
        access=access,
        limits=settings.limits,
        metrics=metrics,
        without_key={*pages.PAGES, "/health/live", "/health/ready", "/openapi.json"},
    )
    app.add_middleware(OriginCheck, origins=settings.origins, metrics=metrics)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", *http_speech.HEADERS],
        )
    app.add_middleware(PathWithoutSlash)
    for door in (http_speech, http_voices, pages, sockets):
        app.include_router(door.router)
    _report_errors(app, metrics)
    return app


def _report_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answers every error in OpenAI's form."""

    @app.exception_handler(GatewayError)
    async def refuse(_: Request, error: GatewayError) -> JSONResponse:
        return error_response(error, metrics)

    @app.exception_handler(Exception)
    async def fail(request: Request, _: Exception) -> JSONResponse:
        return await refuse(request, GatewayError(INTERNAL))

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
