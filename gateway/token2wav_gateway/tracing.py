"""Traces: the trace context of a request reaches the servers behind the gateway, and OpenTelemetry
records spans if its SDK is installed and configured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from token2wav_gateway.errors import ModelError
from token2wav_gateway.settings import SettingsError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("token2wav_gateway")


def trace_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    """Returns the trace context of a request: `traceparent`, and `tracestate` if it has one.

    A context that the W3C's recommendation does not allow is no context, and a `tracestate` with a
    wrong member is left out.
    """
    values = {name: headers.get(name) for name in _PROPAGATOR.fields}
    # A header of gRPC may be bytes.
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    context: dict[str, str] = {}
    _PROPAGATOR.inject(context, _PROPAGATOR.extract(texts))
    return context


class Span:
    """Span of a trace.

    Attributes:
        headers: trace context for a request that belongs to the span.
    """

    def __init__(self, recorded: trace.Span, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self._recorded = recorded

    def set(self, name: str, value: str | float) -> None:
        self._recorded.set_attribute(f"token2wav.{name}", value)

    def event(self, name: str) -> None:
        self._recorded.add_event(name)


@contextmanager
def span(name: str, parent: Mapping[str, str], *, server: bool = False) -> Iterator[Span]:
    """Context manager of a span, which contains no text and no key.

    No span is current: generators run in the contexts of their callers, so each span names its
    parent. Without OpenTelemetry's SDK nothing is recorded, and the trace context passes unchanged.

    Args:
        parent: trace context; empty for a new trace.
        server: whether the span answers a request, and does not send one.
    """
    headers: dict[str, str] = {}
    context = _PROPAGATOR.extract(parent)
    recorded = _TRACER.start_span(name, context, SpanKind.SERVER if server else SpanKind.CLIENT)
    _PROPAGATOR.inject(headers, trace.set_span_in_context(recorded, context))
    try:
        yield Span(recorded, headers)
    except Exception as error:
        # Other messages may repeat the text.
        reason = error.summary if isinstance(error, ModelError) else type(error).__name__
        recorded.set_status(StatusCode.ERROR, reason)
        raise
    except BaseException:  # the client has left
        recorded.set_attribute("token2wav.cancelled", True)
        raise
    finally:
        recorded.end()


def configure_tracing() -> None:
    """Sends spans to the collector that OpenTelemetry's variables of the environment name.

    Without `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` nothing is sent.

    Raises:
        SettingsError: a variable is set, but the extra `tracing` is not installed.
    """
    endpoint = next(filter(os.environ.get, _ENDPOINTS), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise SettingsError(
            f"{endpoint}: set, but OpenTelemetry is not installed; run "
            "pip install 'token2wav[gateway,tracing]', or remove the variable"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME", "token2wav-gateway")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
