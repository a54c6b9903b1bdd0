"""Traces: trace contexts of clients, and spans of the gateway in OpenTelemetry's own memory."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from testkit.rigs.fake_triton import FakeTriton, fake_triton, refused
from testkit.rigs.raw_server import EVENTS_HEAD, raw_server, read_request
from token2wav_gateway import tracing
from token2wav_gateway.encoding import Encoder
from token2wav_gateway.errors import ModelError
from token2wav_gateway.metrics import Metrics
from token2wav_gateway.settings import Settings, SettingsError
from token2wav_gateway.speech.content import Text
from token2wav_gateway.speech.servers import Servers
from token2wav_gateway.speech.turn import Turn
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


@contextmanager
def servers() -> Iterator[tuple[Settings, FakeTriton, list[bytes]]]:
    """Runs a language model server that sends one token, and a speech server that refuses it."""
    requests: list[bytes] = []

    def reply(connection: socket.socket) -> None:
        requests.append(read_request(connection))
        connection.sendall(EVENTS_HEAD + PIECE)
        while connection.recv(4096):  # until the gateway has left
            pass

    with fake_triton(refused("refused")) as (url, triton), raw_server(reply) as port:
        settings = {
            "language_model": {"url": f"http://127.0.0.1:{port}/v1"},
            "speech_server": {"url": url},
        }
        yield Settings.model_validate(settings), triton, requests


async def speak(settings: Settings) -> None:
    """Speaks a text that fails."""
    servers = Servers(settings, Metrics())
    text, trace = Text(SECRET, Voice("anna")), trace_headers(CONTEXT)
    turn = Turn(servers, text, Encoder("pcm"), trace=trace)
    try:
        async with aclosing(turn.events()) as events:
            with pytest.raises(ModelError, match="refused"):
                assert not [event async for event in events]
    finally:
        await servers.close()


def headers_of(request: bytes) -> dict[str, str]:
    lines = request.decode().splitlines()[1:]
    fields = (line.split(": ", 1) for line in lines if ": " in line)
    return {name.lower(): value for name, value in fields}


@pytest.mark.anyio
async def test_without_the_sdk_the_context_passes_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_TRACER", trace.NoOpTracer())
    with servers() as (settings, triton, requests):
        await speak(settings)
    assert trace_headers(triton.metadata) == CONTEXT
    assert headers_of(requests[0])["traceparent"] == CONTEXT["traceparent"]


@pytest.mark.anyio
async def test_spans_of_a_text_that_fails() -> None:
    """Sets the provider of this process, which can be set only once."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with servers() as (settings, triton, requests):
        await speak(settings)
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
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    with pytest.raises(
        SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT: set, but .* pip install"
    ):
        configure_tracing()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    configure_tracing()
