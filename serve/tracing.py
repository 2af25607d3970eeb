"""A span for each request, from its route to its last byte, under the client's own trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gristmill.runtime.errors import UsageError
from gristmill.serve.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


@contextmanager
def route_span(tracer: Tracer, exchange: Exchange) -> Iterator[None]:
    """The current span while a request is answered: a child of what its ``traceparent`` names (W3C Trace Context). The engine's own span is
    under it."""
    from opentelemetry import propagate, trace

    scope = exchange.scope
    with tracer.start_as_current_span(
        f"{scope['method']} {scope['path']}",
        context=propagate.extract(exchange.headers),
        kind=trace.SpanKind.SERVER,
        attributes={
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "gen_ai.request.id": exchange.request_id,
            "gen_ai.request.model": exchange.service.name,
        },
    ) as span:
        try:
            yield
        finally:
            span.set_attribute("http.response.status_code", exchange.status or 499)
            if (error := exchange.record.get("error")) is not None:
                span.set_status(trace.StatusCode.ERROR, str(error))


def otlp_tracer(endpoint: str) -> Any:
    """A tracer that sends spans to a collector by OTLP over HTTP, in a thread of its own.

    Raises:
        UsageError: the packages of OpenTelemetry are missing.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UsageError(
            "otlp_endpoint needs more packages: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "gristmill"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return provider.get_tracer("gristmill")
