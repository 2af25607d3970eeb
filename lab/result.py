"""Result files of the programs of `lab`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.bench.result_file import replace
from gristmill.bench.result_text import quantiles, summarized, text

CANDIDATES = (
    "[place in names, median µs, lower quartile, upper quartile, error, values of the configuration], and the first three of isolated calls; "
    "the fastest configuration of each kernel"
)
_BY_CANDIDATE = ("us", "samples", "errors", "configs", "isolated_us", "isolated_samples", "refused")
_OF_WEIGHT = ("run", "scheme", "n", "k", "x", "floor_us", "floor_how")


def write_result(path: str | Path, data: Mapping[str, Any]) -> None:
    """Write a result file atomically: a row per line, rounded, with quantiles instead of more than five samples."""
    replace(Path(path), text(summarized(data)))


def fastest_per_kernel(data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a result file with only the fastest configuration of each kernel in its rows, in the form of `by_weight`.

    Rows of `data` have us, errors, configs and samples by candidate, and isolated_us and isolated_samples if measured. A candidate is named
    ``kernel/place`` or ``library choice``. "refused" has the first reason why a kernel did not run.
    """
    refused = {name: why for row in reversed(data["rows"]) for name, why in row["refused"].items()}
    head = {name: value for name, value in data.items() if name != "rows"}
    return {**head, "refused": refused, **by_weight([_row(row) for row in data["rows"]])}


def by_weight(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows in the form of a file, with what repeats written once. A candidate is [name, µs, quartiles, error, configuration, isolated µs].

    A row of the file is a weight with a type of x; its "m" has the rest, by the number of rows of x. Candidates have places in "names".
    Of a configuration they have the values of the parts that "configurations" names, by kernel; "shared" has the parts that follow from
    the scheme, by scheme and kernel. A configuration of other parts than the first one of its kernel is written with their names.
    """
    usual, own, shared = _parts(rows)
    names: dict[str, int] = {}
    weights: list[dict[str, Any]] = []
    for row in rows:
        weight = {name: row[name] for name in _OF_WEIGHT if name in row}
        rest = {name: value for name, value in row.items() if name not in (*weight, "m", "candidates")}
        rest["candidates"] = [
            [names.setdefault(name, len(names)), *times, _values(config, _kernel(name), usual, own), *apart]
            for name, *times, config, apart in map(_split, row["candidates"])
        ]
        for one in weights:
            if {**one, "m": None} == {**weight, "m": None} and str(row["m"]) not in one["m"]:
                break
        else:
            one = {**weight, "m": {}}
            weights.append(one)
        one["m"][str(row["m"])] = rest
    configurations = {kernel: ",".join(parts) for kernel, parts in own.items()}
    return {
        "candidates": CANDIDATES,
        "names": [*names],
        "configurations": configurations,
        "shared": shared,
        "rows": weights,
    }


def _parts(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, dict[str, str]]]:
    """By kernel: the parts of its first configuration, those that the scheme does not decide; by scheme and kernel: the others."""
    usual: dict[str, list[str]] = {}
    values: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        for name, *_, config, _ in map(_split, row["candidates"]):
            kernel = _kernel(name)
            if isinstance(config, Mapping) and usual.setdefault(kernel, sorted(config)) == sorted(config):
                for part, value in config.items():
                    values.setdefault((row.get("scheme", ""), kernel, part), set()).add(str(value))
    free = {(kernel, part) for (_, kernel, part), found in values.items() if len(found) > 1}
    own = {kernel: [part for part in parts if (kernel, part) in free] for kernel, parts in usual.items()}
    shared: dict[str, dict[str, str]] = {}
    for (scheme, kernel, part), found in sorted(values.items()):
        if (kernel, part) not in free:
            of_scheme = shared.setdefault(scheme, {})
            of_scheme[kernel] = ",".join(filter(None, (of_scheme.get(kernel), f"{part}={min(found)}")))
    return usual, own, shared


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, None] = {}
    for times in (row["us"], row.get("isolated_us", {})):
        fastest: dict[str, str] = {}
        for name in sorted(times, key=times.__getitem__):
            fastest.setdefault(_kernel(name), name)
        kept |= dict.fromkeys(fastest.values())
    rest = {name: value for name, value in row.items() if name not in _BY_CANDIDATE}
    return {**rest, "candidates": [_candidate(row, name) for name in kept]}


def _kernel(name: str) -> str:
    return name.split("/")[0].split(" ")[0]


def _candidate(row: Mapping[str, Any], name: str) -> list[Any]:
    low, _, high = quantiles(row["samples"][name])[2:5]
    result = [name, row["us"][name], low, high, row["errors"][name], row["configs"].get(name, "")]
    if name in row.get("isolated_us", {}):  # less the time of a link between calls, which the samples have
        us, (low, median, high) = row["isolated_us"][name], quantiles(row["isolated_samples"][name])[2:5]
        result += [us, low - median + us, high - median + us]
    return result


def _split(candidate: Sequence[Any]) -> tuple[Any, ...]:
    """Name, times and error, configuration, and a list of the isolated times."""
    return (*candidate[:6], candidate[6:])


def _values(config: Any, kernel: str, usual: Mapping[str, list[str]], own: Mapping[str, list[str]]) -> str:
    if not isinstance(config, Mapping):
        return str(config)
    if sorted(config) == usual[kernel]:
        return ",".join(str(config[part]) for part in own[kernel])
    return ",".join(f"{part}={config[part]}" for part in sorted(config))
