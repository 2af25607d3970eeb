"""The text of a result file: JSON with one row per line, five significant digits, and quantiles instead of long lists of samples."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 5
QUANTILES = "[count, minimum, lower quartile, median, upper quartile, maximum] of the samples"
"""What `summarized` writes for a list of samples."""
_LONGEST = 5
"""Lists of at most so many samples are kept."""


def text(data: Mapping[str, Any], digits: int | None = DIGITS) -> str:
    """`data` as JSON: a line per entry, and a line per item of entries that are lists of objects.

    Floats have `digits` significant digits; None writes them exactly, for contents with a digest.
    """
    lines = [f"{_line(name)}:{_entry(value, digits)}" for name, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entry(value: Any, digits: int | None) -> str:
    if digits is not None:
        value = rounded(value, digits)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(map(_line, value)) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """JSON data with floats of `digits` significant digits. Digits before the decimal point are kept, as in times since 1970."""
    if isinstance(value, float):
        if not value or not math.isfinite(value):
            return value
        return round(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))
    if isinstance(value, Mapping):
        return {name: rounded(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value


def summarized(data: Any) -> Any:
    """JSON data with quantiles instead of samples: ``"samples_us": [...]`` becomes ``"quantiles_us": [count, minimum, ...]``.

    Samples are lists of more than five numbers, or of objects of numbers, under a name that contains "samples", or by candidate in an
    object under such a name. A mapping at the top says what the numbers are (`QUANTILES`).
    """
    result = _summarized(data)
    if isinstance(result, dict) and result != data and "rows" in result:
        rows = result.pop("rows")
        return {**result, "quantiles": QUANTILES, "rows": rows}
    return result


def _summarized(data: Any) -> Any:
    if isinstance(data, Mapping):
        entries = (_entry_summarized(str(name), value) for name, value in data.items())
        return dict(entries)
    if isinstance(data, list | tuple):
        return [_summarized(item) for item in data]
    return data


def _entry_summarized(name: str, value: Any) -> tuple[str, Any]:
    if "samples" in name:
        short = _quantiles(value)
        if short is not None:
            return name.replace("samples", "quantiles"), short
    return name, _summarized(value)


def _quantiles(value: Any) -> Any:
    """The quantiles of samples, or of each candidate's; None if `value` has no long list of samples."""
    if isinstance(value, Mapping):
        by_name = {name: _quantiles(samples) for name, samples in value.items()}
        return by_name if by_name and None not in by_name.values() else None
    if not isinstance(value, list | tuple) or len(value) <= _LONGEST:
        return None
    if all(isinstance(sample, Mapping) for sample in value):
        return {name: quantiles([sample[name] for sample in value]) for name in value[0]}
    return quantiles(value) if all(isinstance(sample, int | float) for sample in value) else None


def quantiles(samples: Sequence[float]) -> list[float]:
    """[count, minimum, lower quartile, median, upper quartile, maximum]; quartiles are interpolated between samples."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return [len(samples), min(samples), low, middle, high, max(samples)]
