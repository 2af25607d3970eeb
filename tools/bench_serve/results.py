"""What the answers of a run amount to: latencies by percentile, throughput, errors, goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gristmill.tools.bench_serve.client import Answer
from gristmill.tools.bench_serve.load import Run

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "between two chunks",
    "e2e": "whole request",
}


def latencies(answer: Answer) -> dict[str, float | None]:
    """Milliseconds of one answer, from when it was due; None where there is no such thing: time per token of an answer of one token."""
    stream = answer.stream
    first, last = stream.first or answer.ended, stream.last or answer.ended
    tokens = answer.output_tokens
    return {
        "ttft": (first - answer.due) * 1e3,
        "tpot": (last - first) / (tokens - 1) * 1e3 if tokens > 1 else None,
        "e2e": (answer.ended - answer.due) * 1e3,
    }


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (linear between the two nearest values) and maximum; None of no values."""
    if not len(values):
        return None
    array = np.asarray(values)
    found = {f"p{q}": float(np.percentile(array, q)) for q in PERCENTILES}
    return {"mean": float(array.mean()), **found, "max": float(array.max())}


def meets(answer: Answer, slo: Mapping[str, float]) -> bool:
    """Whether a complete answer was within all limits, in milliseconds."""
    values = latencies(answer)
    return all((value := values[name]) is None or value <= limit for name, limit in slo.items())


def summary(run: Run, slo: Mapping[str, float]) -> dict[str, Any]:
    """The results of a run, as JSON has them. Latencies are of the requests that were answered completely."""
    complete = [answer for answer in run.answers if not answer.error]
    seconds = max(run.end - run.begin, 1e-9)
    each = [latencies(answer) for answer in complete]
    output = sum(answer.output_tokens for answer in complete)
    known = [answer.stream.prompt_tokens for answer in complete if answer.stream.prompt_tokens is not None]
    cached = [answer.stream.cached_tokens for answer in complete if answer.stream.cached_tokens is not None]
    chunks = sum(answer.stream.chunks for answer in run.answers)
    errors: dict[str, dict[str, Any]] = {}
    for answer in run.answers:
        if answer.error:
            entry = errors.setdefault(answer.error, {"count": 0, "example": answer.message})
            entry["count"] += 1
    gaps = [gap * 1e3 for answer in complete for gap in answer.stream.gaps]
    times = {
        name: distribution([value for one in each if (value := one[name]) is not None])
        for name in ("ttft", "tpot", "e2e")
    }
    late = distribution([(answer.sent - answer.due) * 1e3 for answer in run.answers])
    return {
        "seconds": seconds,
        "interrupted": run.interrupted,
        "requests": {
            "complete": len(complete),
            "failed": len(run.answers) - len(complete),
            "per_second": len(complete) / seconds,
        },
        "errors": errors,
        "input_tokens": sum(known) if known else None,
        "input_tokens_per_second": sum(known) / seconds if known else None,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": output,
        "output_tokens_per_second": output / seconds,
        "output_tokens_counted_by": "server"
        if all(answer.stream.output_tokens is not None for answer in complete)
        else "chunks",
        "chunks": chunks,
        "milliseconds": {
            "ttft": times["ttft"],
            "tpot": times["tpot"],
            "itl": distribution(gaps),
            "e2e": times["e2e"],
        },
        "goodput": {
            "slo": dict(slo),
            "requests": (good := sum(meets(answer, slo) for answer in complete)),
            "per_second": good / seconds,
        }
        if slo
        else None,
        "client": {
            "cpu_seconds": run.cpu,
            "cpu_share": run.cpu / seconds,
            "cpu_microseconds_per_chunk": run.cpu / chunks * 1e6 if chunks else None,
            "sent_late_ms": late,
        },
    }
