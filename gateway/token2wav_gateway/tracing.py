"""Traces: the trace context of a request reaches the servers behind the gateway, and OpenTelemetry
records spans if it is installed and configured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from token2wav_gateway.errors import ModelError
from token2wav_gateway.settings import SettingsError

# W3C Trace Context, version 00.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[!-~]([ -~]{0,510}[!-~])?")
_SDK = "opentelemetry.sdk"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Returns the trace context of a request: `traceparent`, and `tracestate` if it has one.

    A context that the W3C's recommendation does not allow is no context.
    """
    parent, state = headers.get("traceparent"), headers.get("tracestate")
    if not isinstance(parent, str) or not _TRACEPARENT.fullmatch(parent):
        return {}
    context = {"traceparent": parent}
    if isinstance(state, str) and _TRACESTATE.fullmatch(state):  # gRPC also has bytes
        context["tracestate"] = state
    return context


class Span:
    """Span of a trace.

    Attributes:
        headers: trace context for a request that belongs to the span.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = dict(headers)

    def set(self, name: str, value: str | float) -> None:
        """Sets an attribute."""

    def event(self, name: str) -> None:
        """Records the time of an event."""


class Tracer:
    """Source of spans, which contain no text and no key.

    Without OpenTelemetry's SDK nothing is recorded, and the trace context passes unchanged.
    """

    def __init__(self) -> None:
        self._begin = _OpenTelemetry().begin if _installed(_SDK) else _pass_on

    @contextmanager
    def span(self, name: str, parent: Mapping[str, str], *, server: bool = False) -> Iterator[Span]:
        """Context manager of a span.

        Args:
            name: name of the span.
            parent: trace context; empty for a new trace.
            server: whether the span answers a request, and does not send one.
        """
        with self._begin(name, parent, server) as span:
            yield span


@contextmanager
def _pass_on(_name: str, parent: Mapping[str, str], _server: bool) -> Iterator[Span]:
    yield Span(parent)


class _RecordedSpan(Span):
    def __init__(self, span: Any, headers: Mapping[str, str]) -> None:
        super().__init__(headers)
        self._span = span

    def set(self, name: str, value: str | float) -> None:
        self._span.set_attribute(f"token2wav.{name}", value)

    def event(self, name: str) -> None:
        self._span.add_event(name)


class _OpenTelemetry:
    """Spans of OpenTelemetry. No span is current: generators run in the contexts of their callers,
    so each span names its parent.
    """

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._api = trace
        self._tracer = trace.get_tracer("token2wav_gateway")
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    @contextmanager
    def begin(self, name: str, parent: Mapping[str, str], server: bool) -> Iterator[Span]:
        api, headers = self._api, dict[str, str]()
        kind = api.SpanKind.SERVER if server else api.SpanKind.CLIENT
        context = self._propagator.extract(parent)
        span = self._tracer.start_span(name, context, kind)
        self._propagator.inject(headers, api.set_span_in_context(span, context))
        try:
            yield _RecordedSpan(span, headers)
        except Exception as error:
            # Other messages may repeat the text.
            reason = error.summary if isinstance(error, ModelError) else type(error).__name__
            span.set_status(api.StatusCode.ERROR, reason)
            raise
        except BaseException:  # the client has left
            span.set_attribute("token2wav.cancelled", True)
            raise
        finally:
            span.end()


def configure_tracing() -> None:
    """Sends spans to the collector that OpenTelemetry's variables of the environment name.

    Without `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` nothing is sent.

    Raises:
        SettingsError: a variable is set, but the extra `tracing` is not installed.
    """
    endpoint = next(filter(os.environ.get, _ENDPOINTS), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    exporter = "opentelemetry.exporter.otlp.proto.http"
    if not _installed(_SDK) or not _installed(exporter):
        raise SettingsError(
            f"{endpoint}: set, but OpenTelemetry is not installed; run "
            "pip install 'token2wav[gateway,tracing]', or remove the variable"
        )
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "token2wav-gateway")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
