"""Stored records name kernels that exist: shipped times, baselines of CI, and the results that commands and checks read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import SHIPPED

ROOT = Path(__file__).parents[2]
READ = (
    *SHIPPED.glob("*.json"),
    *(ROOT / "ci").glob("kernel_*.json"),
    *(ROOT / "bench" / "results").glob("*/operations/*.json"),
    *(ROOT / "bench" / "results").glob("*/kernelbench/regret_*.json"),
    *(ROOT / "bench" / "results" / "proofs").glob("*.json"),
)
KEYS = ("kernel", "yardstick")


def stored(data: Any) -> Iterator[str]:
    """Every kernel that JSON data names."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in KEYS and isinstance(value, str):
                yield value
            else:
                yield from stored(value)
    elif isinstance(data, list):
        for item in data:
            yield from stored(item)


def unregistered(data: Any) -> set[str]:
    return {*stored(data)} - {kernel.name for kernel in default_registry().all_kernels()}


@pytest.mark.parametrize("path", READ, ids=lambda path: path.name)
def test_every_stored_name_is_a_registered_kernel(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {*stored(data)} and unregistered(data) == set()


@pytest.mark.parametrize(
    "path", [next(path for path in READ if path.parent == SHIPPED), ROOT / "ci" / "kernel_ratios.json"]
)
def test_a_name_that_was_not_rewritten_is_found(path: Path) -> None:
    """Planted fault: one record keeps the name that its kernel had before."""
    data = json.loads(path.read_text(encoding="utf-8"))
    records = data["parts"][0]["entries"] if "parts" in data else data["timed"] or data["verified"]
    records[-1]["kernel"] = "linear_w4a16_former_sm90"
    assert unregistered(data) == {"linear_w4a16_former_sm90"}
