"""The results of a run, for people."""

from __future__ import annotations

from typing import Any

from gristmill import console
from gristmill.console import number
from gristmill.tools.bench_serve.results import METRICS, PERCENTILES

BUSY = 0.8
"""The share of a core from which on the client itself may be what is measured."""


def show(results: dict[str, Any]) -> None:
    """Tables on stdout; what to be wary of on stderr."""
    requests, errors = results["requests"], results["errors"]
    counted = "" if results["output_tokens_counted_by"] == "server" else " (chunks: the server counts none)"
    rows = [
        [
            "requests",
            f"{requests['complete']:,} complete, {requests['failed']:,} failed",
            f"{number(requests['per_second'])}/s",
        ],
        ["input tokens", _count(results["input_tokens"]), _per_second(results["input_tokens_per_second"])],
        [
            "output tokens",
            _count(results["output_tokens"]) + counted,
            _per_second(results["output_tokens_per_second"]),
        ],
    ]
    if results["cached_tokens"] is not None:
        rows.insert(2, ["of them cached", _count(results["cached_tokens"]), ""])
    if (goodput := results["goodput"]) is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo"].items())
        rows.append(
            [f"within {limits}", f"{goodput['requests']:,} requests", f"{number(goodput['per_second'])}/s"]
        )
    title = f"{results['model']} at {results['server']}, {results['seconds']:.1f} s"
    if results["interrupted"] is not None:
        title += f", interrupted with {results['interrupted']} requests unfinished"
    console.table(title, ["", "total", "rate"], rows, right=("rate",))
    console.out().print()
    columns = ["mean", *(f"p{q}" for q in PERCENTILES), "max"]
    console.table(
        "Latency, ms",
        ["", *columns, "of what"],
        [
            [
                name.upper(),
                *(number((results["milliseconds"][name] or {}).get(column)) for column in columns),
                text,
            ]
            for name, text in METRICS.items()
        ],
        right=columns,
    )
    if errors:
        console.out().print()
        console.table(
            "Errors",
            ["kind", "requests", "the first one said"],
            [[kind, entry["count"], entry["example"]] for kind, entry in errors.items()],
            right=("requests",),
        )
    client = results["client"]
    each = client["cpu_microseconds_per_chunk"]
    console.err().print(
        f"This client: {client['cpu_share'] * 100:.0f} % of a core"
        + ("" if each is None else f", {each:.1f} µs of CPU time per chunk"),
        style="dim",
    )
    if client["cpu_share"] > BUSY:
        console.err().print(
            "This client is a limit itself: lower the load, or share it among several processes."
        )


def _count(value: int | None) -> str:
    return "not counted" if value is None else f"{value:,}"


def _per_second(value: float | None) -> str:
    return "" if value is None else f"{number(value)}/s"
