"""Result files of `kernelbench`: measurements with samples, device, environment and command. JSON, written atomically."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gristmill.autotune.place import Place
from gristmill.bench.result_text import text
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import config_key

SCHEMA = 1


class ResultError(ValueError):
    """The file is not a result file; the message says what was expected and what was read."""


def record(here: Place, rows: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The content of a result file. Clocks are read now, so call it right after measuring."""
    from gristmill.autotune.environment import environment

    command = "kernelbench " + shlex.join(sys.argv[1:])
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "schema": SCHEMA,
        "when": when,
        "environment": environment(here.target, command),
        **more,
        "rows": [*rows],
    }


def write(path: str | Path, here: Place, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write a result file atomically: readers see the old one or the new one."""
    replace(Path(path), text(record(here, rows, **more)))


def replace(path: Path, content: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # left after a full disk or an interrupt


def parsed(path: str | Path, expected: str) -> Any:
    """The JSON in a file. ResultError: invalid JSON; the message says where and what was expected."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultError(f"{path}: line {error.lineno}: {error.msg}; expected {expected}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{path}: byte {error.start} is not UTF-8 text; expected {expected}") from error
    except (RecursionError, ValueError) as error:  # brackets without end, an integer of thousands of digits
        raise ResultError(f"{path}: {error}; expected {expected}") from error


def read(path: str | Path) -> dict[str, Any]:
    """Read a result file. ResultError: it is invalid, the message says why; FileNotFoundError: it does not exist."""
    data = parsed(path, "a result file of kernelbench")
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ResultError(
            f"{path}: expected a result file of kernelbench, an object with rows; found {type(data).__name__}"
        )
    if data.get("schema", SCHEMA) != SCHEMA:
        raise ResultError(
            f"{path}: expected a result file of schema {SCHEMA}, found {data['schema']!r}: another version of kernelbench wrote it"
        )
    if why := _fault_of_device(data):
        raise ResultError(f"{path}: {why}")
    for place, row in enumerate(data["rows"]):
        if why := _fault(row):
            raise ResultError(f"{path}: rows[{place}]: {why}")
    return data


NUMBERS = ("spread", "gbs", "tflops", "fraction_of_floor", "floor_us", "error", "tolerance", "speedup")
"""What a row has as a number or null, beside its time."""


def _fault_of_device(data: dict[str, Any]) -> str:
    """What is wrong with the environment and the ceilings; "" if nothing."""
    environment, ceilings = data.get("environment", {}), data.get("ceilings")
    if not isinstance(environment, dict):
        return f"environment: expected an object, found {environment!r}"
    for name in ("target", "device"):
        if not isinstance(environment.get(name), str | None):
            return f"environment: {name}: expected text or null, found {environment[name]!r}"
    if ceilings is None:
        return ""
    rates = ceilings.get("tflops") if isinstance(ceilings, dict) else None
    if not isinstance(rates, dict) or not all(map(_is_time, (ceilings.get("read_gbs"), *rates.values()))):
        return f"ceilings: expected read_gbs and tflops, above 0, found {ceilings!r}"
    return ""


def _fault(row: Any) -> str:
    """What is wrong with the format of a row; "" if nothing. Kernels that no longer exist are valid."""
    if not isinstance(row, dict) or not {"op", "problem", "kernel"} <= row.keys():
        return "expected op, problem and kernel"
    for name in ("op", "problem", "kernel"):
        if not isinstance(row[name], str):
            return f"{name}: expected text, found {row[name]!r}"
    for name, kind, what in (
        ("timing", str, "text"),
        ("config", dict, "an object"),
        ("samples", list, "a list"),
        ("times", dict, "an object"),
        ("baseline", str, "text"),
        ("verdict", str, "text"),
    ):
        if row.get(name) is not None and not isinstance(row[name], kind):
            return f"{name}: expected {what}, found {row[name]!r}"
    if row.get("us") is not None and not _is_time(row["us"]):
        return f"us: expected microseconds or null, found {row['us']!r}"
    if wrong := [us for us in row.get("samples") or () if not _is_time(us)]:
        return f"samples: expected microseconds, found {wrong[0]!r}"
    for name in NUMBERS:
        if row.get(name) is not None and (
            isinstance(row[name], bool) or not isinstance(row[name], int | float)
        ):
            return f"{name}: expected a number or null, found {row[name]!r}"
    for name, one in (row.get("times") or {}).items():
        us = one.get("us") if isinstance(one, dict) else one
        if not isinstance(one, dict) or not (us is None or isinstance(us, dict) or _is_time(us)):
            return f"times: {name}: expected microseconds, found {us!r}"  # of `regret`: of each configuration
    return ""


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def timed(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result file that have a time."""
    return [row for row in data["rows"] if row.get("us")]


def command(row: dict[str, Any], target: str | None = None) -> str:
    """The command that measures a row again."""
    words = ["kernelbench", "bench", row["op"], "--kernels", row["kernel"], "--problem", row["problem"]]
    if row.get("config") and _tunable(row):
        words += ["--config", config_key(row["config"])]
    return shlex.join(words + (["--target", target] if target and target.startswith("cpu") else []))


def _tunable(row: dict[str, Any]) -> bool:
    """Whether the row's kernel still exists and has other configurations than the default one."""
    return any(
        k.name == row["kernel"] and k.space is not None for k in default_registry().kernels.get(row["op"], ())
    )


def attributes(of: object, *names: str) -> dict[str, Any]:
    """Attributes by their names, for a row of JSON; all None if `of` is None."""
    return {name: None if of is None else getattr(of, name) for name in names}


def device_of(data: dict[str, Any]) -> str:
    """The device of a file, as text."""
    environment = data.get("environment", {})
    return str(environment.get("device") or environment.get("target") or "unknown device")


def series(row: dict[str, Any], target: str | None) -> str:
    """The series of a row: its kernel, and its timing mode if that is not the default."""
    usual = "eager,cold" if target and target.startswith("cpu") else "graph,cold"
    timing = row.get("timing")
    return str(row["kernel"]) if timing in (None, usual) else f"{row['kernel']} ({timing})"


def samples(row: dict[str, Any]) -> list[float]:
    """Microseconds, one per round; only the median if the file has no samples."""
    return [float(us) for us in row.get("samples") or [row["us"]]]
