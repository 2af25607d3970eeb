"""Result files of the programs of `lab`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.bench.result_file import replace
from gristmill.bench.result_text import quantiles, summarized, text

CANDIDATES = (
    "[name, median µs, lower quartile, upper quartile, error, values of the configuration], and the first three of isolated calls; "
    "the fastest configuration of each kernel"
)
_BY_CANDIDATE = ("us", "samples", "errors", "configs", "isolated_us", "isolated_samples", "refused")


def write_result(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a result file atomically: a row per line, rounded, with quantiles instead of more than five samples."""
    replace(Path(path), text(summarized(data)))


def fastest_per_kernel(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a result file with only the fastest configuration of each kernel in its rows, as a list (`CANDIDATES`).

    Rows of `data` have us, errors, configs and samples by candidate, and isolated_us and isolated_samples if measured. A candidate is named
    ``kernel/place`` or ``library choice``. "configurations" has the names of a configuration's parts by kernel, "refused" the first reason
    why a kernel did not run.
    """
    parts: dict[str, str] = {}
    rows = [_row(row, parts) for row in data["rows"]]
    refused = {name: why for row in reversed(data["rows"]) for name, why in row["refused"].items()}
    head = {name: value for name, value in data.items() if name != "rows"}
    return {**head, "refused": refused, "candidates": CANDIDATES, "configurations": parts, "rows": rows}


def _row(row: Mapping[str, Any], parts: dict[str, str]) -> dict[str, Any]:
    kept: dict[str, None] = {}
    for times in (row["us"], row.get("isolated_us", {})):
        fastest: dict[str, str] = {}
        for name in sorted(times, key=times.__getitem__):
            fastest.setdefault(_kernel(name), name)
        kept |= dict.fromkeys(fastest.values())
    rest = {name: value for name, value in row.items() if name not in _BY_CANDIDATE}
    return {**rest, "candidates": [_candidate(row, name, parts) for name in kept]}


def _kernel(name: str) -> str:
    return name.split("/")[0].split(" ")[0]


def _candidate(row: Mapping[str, Any], name: str, parts: dict[str, str]) -> list[Any]:
    low, _, high = quantiles(row["samples"][name])[2:5]
    values = _values(row["configs"].get(name, ""), _kernel(name), parts)
    result = [name, row["us"][name], low, high, row["errors"][name], values]
    if name in row.get("isolated_us", {}):  # less the time of a link between calls, which the samples have
        us, (low, median, high) = row["isolated_us"][name], quantiles(row["isolated_samples"][name])[2:5]
        result += [us, low - median + us, high - median + us]
    return result


def _values(config: Any, kernel: str, parts: dict[str, str]) -> str:
    """The values of a configuration, whose names go to `parts`; with their names if an earlier one has others."""
    if not isinstance(config, Mapping):
        return str(config)
    names = sorted(config)
    if parts.setdefault(kernel, ",".join(names)) == ",".join(names):
        return ",".join(str(config[name]) for name in names)
    return ",".join(f"{name}={config[name]}" for name in names)
