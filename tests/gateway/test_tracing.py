"""Traces: trace contexts of clients, and spans of the gateway in OpenTelemetry's own memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tritonclient.grpc import service_pb2, service_pb2_grpc

from testkit.rigs.raw_server import EVENTS_HEAD, raw_server, read_request
from token2wav_gateway import tracing
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import ModelError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings, SettingsError
from token2wav_gateway.speech.servers import Servers
from token2wav_gateway.speech.turn import Text, Turn
from token2wav_gateway.tracing import configure_tracing, trace_headers
from token2wav_gateway.voices.voice_folder import Voice

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "shop=t61rcWkgMzE"}
SECRET = "words of a client"
PIECE = b'data: {"choices": [{"delta": {"content": "<|s_1|>"}}]}\n\n'


@pytest.mark.parametrize(
    ("headers", "kept"),
    [
        (CONTEXT, CONTEXT),
        ({"traceparent": CONTEXT["traceparent"], "tracestate": "a\nb"}, {"traceparent"}),
        ({"traceparent": CONTEXT["traceparent"], "tracestate": "a" * 513}, {"traceparent"}),
        ({"tracestate": "a=b"}, ()),
        ({"traceparent": CONTEXT["traceparent"].upper()}, ()),
        ({"traceparent": CONTEXT["traceparent"] + "-00"}, ()),
        ({"traceparent": f"00-{'0' * 32}-{PARENT}-01"}, ()),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, ()),
        ({"traceparent": "x" * 100_000}, ()),
    ],
)
def test_a_context_against_the_recommendation_is_none(headers: dict[str, str], kept: Any) -> None:
    assert trace_headers(headers) == {name: headers[name] for name in kept}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Exporter of the provider of this process, which can be set only once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


class _Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """gRPC server that notes the metadata of streams, and refuses them."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        self.metadata |= dict(context.invocation_metadata())
        next(requests)  # the first one has tokens
        yield service_pb2.ModelStreamInferResponse(error_message="refused")


@contextmanager
def servers() -> Iterator[tuple[Settings, _Triton, list[bytes]]]:
    """Runs a language model server that sends one token, and a speech server that refuses it."""
    requests, triton = list[bytes](), _Triton()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, grpc_server)
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()

    def reply(connection: socket.socket) -> None:
        requests.append(read_request(connection))
        connection.sendall(EVENTS_HEAD + PIECE)
        while connection.recv(4096):  # until the gateway has left
            pass

    try:
        with raw_server(reply) as port:
            settings = {
                "language_model": {"url": f"http://127.0.0.1:{port}/v1"},
                "speech_server": {"url": f"127.0.0.1:{grpc_port}"},
            }
            yield Settings.model_validate(settings), triton, requests
    finally:
        grpc_server.stop(None)


def speak(settings: Settings) -> None:
    """Speaks a text that fails."""

    async def spoken() -> None:
        servers = Servers(settings, Metrics())
        try:
            text, trace = Text(SECRET, Voice("anna")), trace_headers(CONTEXT)
            turn = Turn(servers, text, Encoder("pcm"), trace=trace)
            async with aclosing(turn.events()) as events:
                async for _ in events:
                    pass
        finally:
            await servers.close()

    with pytest.raises(ModelError, match="refused"):
        asyncio.run(spoken())


def headers_of(request: bytes) -> dict[str, str]:
    lines = request.decode().splitlines()[1:]
    fields = (line.split(": ", 1) for line in lines if ": " in line)
    return {name.lower(): value for name, value in fields}


def test_without_opentelemetry_the_context_passes_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_installed", lambda _: False)
    with servers() as (settings, triton, requests):
        speak(settings)
    assert trace_headers(triton.metadata) == CONTEXT
    assert headers_of(requests[0])["traceparent"] == CONTEXT["traceparent"]


def test_spans_of_a_text_that_fails(exporter: InMemorySpanExporter) -> None:
    exporter.clear()
    with servers() as (settings, triton, requests):
        speak(settings)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"speech", "language model", "speech server"}
    assert {format(identity(span).trace_id, "032x") for span in spans.values()} == {TRACE}
    request = spans["speech"]
    assert request.parent is not None
    assert format(request.parent.span_id, "016x") == PARENT
    for name, sent in (
        ("language model", headers_of(requests[0])),
        ("speech server", triton.metadata),
    ):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == identity(request).span_id
        span_id = format(identity(spans[name]).span_id, "016x")
        assert sent["traceparent"] == f"00-{TRACE}-{span_id}-01"
        assert sent["tracestate"] == CONTEXT["tracestate"]
    assert [event.name for event in spans["language model"].events] == ["first token"]
    assert request.status.status_code is trace.StatusCode.ERROR
    assert request.status.description is not None
    assert request.status.description.startswith("speech server: ")
    assert SECRET not in "".join(span.to_json() for span in spans.values())


def identity(span: ReadableSpan) -> trace.SpanContext:
    context = span.get_span_context()
    assert context is not None
    return context


def test_an_endpoint_without_opentelemetry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_tracing()  # no endpoint
    monkeypatch.setattr(tracing, "_installed", lambda _: False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    with pytest.raises(
        SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT: set, but .* pip install"
    ):
        configure_tracing()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    configure_tracing()
