"""Prometheus metrics of an engine, under vLLM's names, so that dashboards for vLLM work. Needs `prometheus_client`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gristmill.runtime.engine_load import EngineLoad
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_transfer.statistics import TransferStatus

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from gristmill.runtime.engine import Engine

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

# The first fields of EngineLoad, in their order.
GAUGES = {
    "num_requests_running": "Requests that have cache blocks",
    "num_requests_waiting": "Requests in the queue",
    "kv_cache_usage_perc": "Fraction of the cache blocks in use by requests, 0 to 1",
    "decode_graph_bytes": "Memory that captured decode graphs take",
    "late_kernels": "Kernels that were selected or compiled while requests waited, because the warm-up did not cover them",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "num_preemptions": "Requests that lost their blocks to another",
    "prompt_tokens": "Prompt tokens of requests that got their first token",
    "generation_tokens": "Tokens generated",
}
DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "Runs of drafts that were verified, one per request and step",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted",
}
"""Counters of engines that draft."""
TRANSFER_COUNTERS = {
    "external_prefix_cache_queries": "Prompt tokens looked up in the stores of KV transfer",
    "external_prefix_cache_hits": "Prompt tokens loaded from them",
    "kv_transfer_saved_blocks": "Blocks saved there",
}
"""Counters of engines with stores."""
HISTOGRAMS = {
    "iteration_tokens_total": ("Tokens computed in a step", TOKENS),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Tokens generated for a request", TOKENS),
    "time_to_first_token_seconds": ("From arrival to the first token", SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step", SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token", SECONDS),
    "request_decode_time_seconds": ("From the first to the last token", SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token", SECONDS),
}


@dataclass(slots=True)
class Timing:
    """Times of the events of one completion, by time.monotonic, None = not yet; and the `tokens` generated so far."""

    prompt_tokens: int
    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    tokens: int = 0


class Metrics:
    """Counters, gauges and histograms in a registry of prometheus_client; `prometheus_client.generate_latest(registry)` prints them.

    Args:
        model_name: value of the label ``model_name``.
        registry: None = prometheus_client's own.
        prefix: prefix of the names, before a colon.

    Raises:
        UsageError: prometheus_client is missing.
    """

    def __init__(
        self, model_name: str, registry: CollectorRegistry | None = None, prefix: str = "vllm"
    ) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise UsageError(
                "metrics need prometheus_client: pip install 'gristmill[metrics]', or prometheus-client"
            ) from error
        registry = prometheus_client.REGISTRY if registry is None else registry

        def make(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            metric = kind(f"{prefix}:{name}", text, ("model_name", *labels), registry=registry, **options)
            return metric if labels else metric.labels(model_name)

        self._model_name = model_name
        self._metrics: dict[str, Any] = {}
        for name, text in GAUGES.items():
            self._metrics[name] = make(prometheus_client.Gauge, name, text)
        for name, text in (COUNTERS | DRAFT_COUNTERS | TRANSFER_COUNTERS).items():
            self._metrics[name] = make(prometheus_client.Counter, name, text)
        for name, (text, buckets) in HISTOGRAMS.items():
            self._metrics[name] = make(prometheus_client.Histogram, name, text, buckets=buckets)
        self._success = make(
            prometheus_client.Counter, "request_success", "Requests that ended", ("finished_reason",)
        )
        self._accepted = make(
            prometheus_client.Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were accepted, by their position in the run",
            ("position",),
        )
        self._transfer_failures = make(
            prometheus_client.Counter,
            "kv_transfer_failures",
            "Loads that ended in a computation, and blocks that were not saved",
            ("reason",),
        )
        self._loads: dict[int, EngineLoad] = {}  # by number, as they were reported

    def step(self, engine: Engine) -> None:
        """A step of the engine has ended."""
        self.load(EngineLoad.of(engine))

    def load(self, now: EngineLoad, number: int = 0) -> None:
        """A step has ended, of the engine with this number; gauges are those of all engines together."""
        metrics, before = self._metrics, self._loads.get(number)
        self._loads[number] = now
        if before is None or now[: len(GAUGES)] != before[: len(GAUGES)]:
            loads = self._loads.values()
            totals = [sum(values) for values in zip(*(load[: len(GAUGES)] for load in loads), strict=True)]
            for name, total in zip(GAUGES, totals, strict=True):
                metrics[name].set(total)
            metrics["kv_cache_usage_perc"].set(sum(load.cache_use for load in loads) / len(loads))
        if now.step_tokens is not None:
            metrics["iteration_tokens_total"].observe(now.step_tokens)
            if now.preempted:
                metrics["num_preemptions"].inc(now.preempted)
        if now.drafts is not None:
            self._count_drafts(now.drafts, None if before is None else before.drafts)
        if now.transfer is not None:
            self._count_transfer(now.transfer, None if before is None else before.transfer)

    def forget(self, number: int) -> None:
        """The engine with this number is gone, and its counts begin again if another one takes its place."""
        if number in self._loads:
            self.load(EngineLoad(), number)
            del self._loads[number]

    def _count_transfer(self, now: TransferStatus, before: TransferStatus | None) -> None:
        for name, count in zip(
            TRANSFER_COUNTERS, ("queried_tokens", "loaded_tokens", "saved_blocks"), strict=True
        ):
            self._metrics[name].inc(getattr(now, count) - getattr(before, count, 0))
        for reason, times in now.failures.items():
            known = 0 if before is None else before.failures.get(reason, 0)
            self._transfer_failures.labels(self._model_name, reason).inc(times - known)

    def _count_drafts(self, now: tuple[int, ...], before: tuple[int, ...] | None) -> None:
        runs, tokens, *accepted = (
            count - known for count, known in zip(now, before or (0,) * len(now), strict=True)
        )
        if runs:
            for name, count in zip(DRAFT_COUNTERS, (runs, tokens, sum(accepted)), strict=True):
                self._metrics[name].inc(count)
            for position, count in enumerate(accepted):
                self._accepted.labels(self._model_name, str(position)).inc(count)

    def scheduled(self, timing: Timing, cached_tokens: int) -> None:
        """A request is in a step for the first time."""
        self._metrics["prefix_cache_queries"].inc(timing.prompt_tokens)
        self._metrics["prefix_cache_hits"].inc(cached_tokens)

    def generated(self, tokens: int) -> None:
        """So many tokens have arrived, of all completions in a step."""
        self._metrics["generation_tokens"].inc(tokens)

    def output(self, timing: Timing, count: int, now: float) -> None:
        """So many tokens of a completion have arrived at a time, which `generated` counts."""
        metrics = self._metrics
        if count and timing.first_token is None:
            timing.first_token = timing.last_token = now
            metrics["prompt_tokens"].inc(timing.prompt_tokens)
            metrics["time_to_first_token_seconds"].observe(now - timing.arrived)
        elif count and timing.last_token is not None:
            for _ in range(count):
                metrics["inter_token_latency_seconds"].observe((now - timing.last_token) / count)
            timing.last_token = now
        timing.tokens += count

    def ended(self, timing: Timing, finish_reason: str) -> None:
        """A completion has ended."""
        now, metrics = time.monotonic(), self._metrics
        self._success.labels(self._model_name, finish_reason).inc()
        metrics["request_prompt_tokens"].observe(timing.prompt_tokens)
        metrics["request_generation_tokens"].observe(timing.tokens)
        metrics["e2e_request_latency_seconds"].observe(now - timing.arrived)
        if timing.scheduled is None:
            return
        metrics["request_queue_time_seconds"].observe(timing.scheduled - timing.arrived)
        metrics["request_inference_time_seconds"].observe(now - timing.scheduled)
        if timing.first_token is not None:
            metrics["request_prefill_time_seconds"].observe(timing.first_token - timing.scheduled)
            metrics["request_decode_time_seconds"].observe(now - timing.first_token)
