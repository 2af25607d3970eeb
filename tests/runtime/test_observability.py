"""Metrics and spans of requests equal the counts of a known workload."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.fake_runner import fake_engine
from tests.runtime.test_async_engine import LONG, run, until

PROMPT = [(7 * i) % 41 for i in range(17)]


async def workload(engine: AsyncEngine) -> None:
    """Four requests that end, of which two find 16 tokens in the cache; one that is abandoned; one that is
    refused."""
    await asyncio.gather(*(engine.generate([i, 1, 2], SamplingParams(max_tokens=10)) for i in range(2)))
    await engine.generate(PROMPT, SamplingParams(max_tokens=1))
    [first, second] = await engine.generate([*PROMPT, 3], SamplingParams(max_tokens=5, n=2))
    assert len(first.token_ids) == len(second.token_ids) == 5
    stream = engine.stream([1], LONG)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(UsageError):
        await engine.generate([], SamplingParams())


def test_metrics_count_what_happened() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    core, _ = fake_engine(num_blocks=5000)
    metrics = Metrics("toy", registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", {"model_name": "toy", **labels})

    async def main() -> None:
        async with AsyncEngine(core, metrics=metrics) as engine:
            await workload(engine)
            await until(lambda: not core.has_unfinished())
            # The last request was aborted between two steps.
            await until(lambda: value("num_requests_running") == value("kv_cache_usage_perc") == 0)

    run(main())
    assert value("request_success_total", finished_reason="length") == 5
    assert value("request_success_total", finished_reason="abort") == 1
    assert value("prompt_tokens_total") == 3 + 3 + 17 + 18 + 18 + 1
    assert value("prefix_cache_queries_total") == 60 and value("prefix_cache_hits_total") == 32
    tokens = value("generation_tokens_total")
    assert tokens is not None and tokens >= 2 * 10 + 1 + 2 * 5 + 1
    assert value("num_preemptions_total") == 0
    assert value("time_to_first_token_seconds_count") == 6
    assert value("inter_token_latency_seconds_count") == tokens - 6
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert value(f"{name}_seconds_count") == 6
    assert value("request_generation_tokens_sum") == tokens
    steps = value("iteration_tokens_total_count")
    assert steps is not None and steps > 10
    text = prometheus.generate_latest(registry).decode()
    for name in (*GAUGES, *COUNTERS, *HISTOGRAMS):
        assert f"# HELP vllm:{name}" in text


def test_metrics_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"pip install 'gristmill\[metrics\]'"):
        Metrics("toy")


def test_preemptions_are_counted_and_traced() -> None:
    """The pool is too small for two requests to run to their ends."""
    prometheus, spans, tracer = pytest.importorskip("prometheus_client"), *traced()
    registry = prometheus.CollectorRegistry()
    core, _ = fake_engine(num_blocks=14, max_seqs=2)

    async def main() -> None:
        async with AsyncEngine(core, metrics=Metrics("toy", registry, "mine"), tracer=tracer) as engine:
            await engine.pause()  # else the first may end before the second arrives
            long = SamplingParams(max_tokens=30)
            requests = [asyncio.ensure_future(engine.generate([i] * 12, long)) for i in range(2)]
            await until(lambda: len(core.scheduler.waiting) == 2)
            await engine.resume()
            await asyncio.gather(*requests)

    run(main())
    counted = registry.get_sample_value("mine:num_preemptions_total", {"model_name": "toy"})
    events = [event.name for span in spans() for event in span.events]
    assert counted == events.count("PREEMPTED") > 0
    assert events.count("SCHEDULED") == events.count("FIRST_TOKEN") == events.count("FINISHED") == 2


def traced() -> tuple[Any, Any]:
    """Returns (a function that returns the finished spans, a tracer)."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter.get_finished_spans, provider.get_tracer("test")


def test_a_request_is_a_span_under_its_callers() -> None:
    spans, tracer = traced()
    core, runner = fake_engine(num_blocks=5000)

    async def main() -> None:
        engine = AsyncEngine(core, tracer=tracer)
        with tracer.start_as_current_span("http"):
            await engine.generate([1, 2], SamplingParams(max_tokens=4, n=2, temperature=0.5), request_id="r")
        stream = engine.stream([1], LONG)
        await anext(stream)
        await stream.aclose()
        runner.before_step = lambda: 1 / 0  # type: ignore[assignment,return-value]
        with pytest.raises(Exception, match="ZeroDivisionError"):
            await engine.generate([1], LONG)
        await engine.close()

    run(main())
    request, http, abandoned, failed = spans()
    assert (
        request.parent.span_id == http.context.span_id and request.context.trace_id == http.context.trace_id
    )
    assert (
        request.attributes["gen_ai.request.id"] == "r"
        and request.attributes["gen_ai.usage.input_tokens"] == 2
    )
    assert request.attributes["gen_ai.usage.output_tokens"] == 8
    names = [event.name for event in request.events]
    assert sorted(names) == sorted(["SCHEDULED", "FIRST_TOKEN", "FINISHED"] * 2)
    assert abandoned.status.is_ok or abandoned.status.is_unset
    assert not failed.status.is_ok and "ZeroDivisionError" in failed.status.description
