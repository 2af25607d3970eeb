"""Renamed kernels: older stores, result files, baselines and policies keep their meaning."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gristmill.autotune.store import dump
from gristmill.bench import baseline, result_file
from gristmill.bench.problems import named
from gristmill.kernel_registry import renamed
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import UnknownError, default_registry
from gristmill.kernel_registry.renamed import KERNELS, is_named, migrated, present_name
from gristmill.kernel_registry.select import select
from gristmill.kernel_registry.store import SHIPPED, Store, config_key, shipped_times
from gristmill.kernel_registry.target import Target

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "bench" / "results").glob("**/*.json"))
OP = default_registry().op("linear")
NAMES = {kernel.name for kernel in default_registry().all_kernels()}
BUILD = Build.of({"torch": "2.13.0", "triton": "3.9.0"}, cuda_archs=("sm_90a",), triton_backends=("cuda",))
GONE = ("linear_w4a16_wgmma_sm90",)
"""A kernel of early result files that was removed, not renamed."""


def selections() -> tuple[list[list[str]], list[list[str]]]:
    """Returns (problem, kernel, configuration) as selected before the renaming: by the shipped times, and by
    cost models."""
    parts: list[list[list[str]]] = []
    for line in (Path(__file__).parent / "selections_of_linear.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            parts.append([])
        else:
            parts[-1].append(line.split(" | "))
    assert [len(part) for part in parts] == [0, 1288, 161]
    return parts[1], parts[2]


@cache
def shipped() -> Store:
    return Store.read_over_shipped(Path("/nonexistent/store.json"))


@cache
def of_that_day() -> frozenset[str]:
    """Today's names of the kernels that were selected then: later ones may be faster."""
    return frozenset(present_name(kernel) for part in selections() for _, kernel, _ in part)


def chosen(text: str, store: Store) -> tuple[str, str]:
    kernels = [kernel for kernel in default_registry().kernels_of("linear") if kernel.name in of_that_day()]
    selection = select(
        OP, OP.problem(text), kernels, Target.parse("h200"), BUILD, store, Policy(), foreign=True
    ).require()
    return selection.kernel.name, config_key(selection.config or {})


def differing(rows: list[list[str]], store: Store) -> list[Any]:
    rows_of = [(text, (present_name(kernel), config), chosen(text, store)) for text, kernel, config in rows]
    return [one for one in rows_of if one[1] != one[2]]


def test_selections_are_what_they_were() -> None:
    by_times, by_models = selections()
    assert not differing(by_times[::9], shipped())
    assert not differing(by_models[::3], Store())


@pytest.mark.slow
def test_all_selections_are_what_they_were() -> None:
    by_times, by_models = selections()
    assert not differing(by_times, shipped())
    assert not differing(by_models, Store())


def test_without_the_migration_selections_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in selections()[0] if row[1] in KERNELS][::40]
    assert not differing(rows, shipped())
    monkeypatch.setattr(renamed, "KERNELS", {})
    unread = Store()
    for path in SHIPPED.glob("*.json"):
        for timing in Store.read(path).timings:
            unread.add(timing)
    assert {t.kernel for t in unread.timings} & set(KERNELS), "read by the names that are in the file"
    assert differing(rows, unread)


def test_the_shipped_store_names_kernels_of_today() -> None:
    files = "".join(path.read_text(encoding="utf-8") for path in SHIPPED.glob("*.json"))
    assert any(f'"{former}"' in files for former in KERNELS), "the shipped store has the names of its day"
    assert {timing.kernel for timing in shipped_times()} <= NAMES
    assert not set(KERNELS) & NAMES and set(KERNELS.values()) <= NAMES


def names_in(value: Any) -> set[str]:
    """Returns the texts and keys that start with the name of a Hopper kernel, cut after the name."""
    if isinstance(value, str):
        head = value.split("/")[0].split("[")[0].split(" ")[0]
        return {head} if head.startswith("linear_w") and head.endswith("_sm90") else set()
    if isinstance(value, dict):
        return set().union(*(names_in(v) for pair in value.items() for v in pair))
    if isinstance(value, list):
        return set().union(*(names_in(v) for v in value))
    return set()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT / "bench" / "results")))
def test_every_kept_result_file_is_read_with_names_of_today(path: Path) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert names_in(migrated(data)) <= NAMES | set(GONE)
    if isinstance(data, dict) and {"verified", "timed"} & data.keys():
        assert {t.kernel for t in Store.read(path).timings} <= NAMES | set(GONE)
        return
    try:
        read = result_file.read(path)
    except result_file.ResultError:
        return  # a table of another program, for which the check above is complete
    assert {row["kernel"] for row in read["rows"]} & set(KERNELS) == set()
    assert [row["problem"] for row in read["rows"]] == [row["problem"] for row in data["rows"]]


def test_a_store_is_written_with_the_present_names(tmp_path: Path) -> None:
    former = json.loads(next(iter(SHIPPED.glob("*linear*.json"))).read_text(encoding="utf-8"))
    text = dump(Store.parse(former, "shipped"))
    assert not names_in(json.loads(text)) & set(KERNELS)
    assert len(json.loads(text)["timed"]) == len(former["timed"])


def test_a_baseline_of_before_holds(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    entry = {"op": "linear", "problem": "m=1,n=64,k=256,w=int4_g128", "kernel": "linear_w4a16_fed_sm90"}
    entry |= {"yardstick": "linear_w4a16_sm90", "ratio": 1.0, "low": 0.9, "high": 1.1}  # type: ignore[dict-item]
    path.write_text(json.dumps({"schema": 1, "parts": [{"environment": {}, "entries": [entry]}]}))
    (migrated_entry,) = baseline.read(path)[0]["entries"]
    assert (migrated_entry.kernel, migrated_entry.yardstick) == (
        "linear_w4a16_decode_ws_sm90",
        "linear_w4a16_decode_sm90",
    )
    assert not baseline.gone([migrated_entry])


def test_policies_and_commands_take_former_names() -> None:
    policy = Policy.parse({"pins": {"linear": ["linear_w4a16_tma_sm90"]}, "exclude": ["*_fed_sm90"]}, "test")
    assert policy.rank("linear", "linear_w4a16_gemm_ws_sm90") == 0
    assert policy.rank("linear", "linear_w4a16_decode_sm90") is None
    assert policy.excludes("linear_w8a16_decode_ws_sm90") == "*_fed_sm90"
    assert policy.excludes("linear_w8a16_decode_sm90") is None
    assert default_registry().kernel("linear", "linear_w8a16_sm90").name == "linear_w8a16_decode_sm90"
    assert [k.name for k in named(OP, "linear_w4a16_tma_sm90")] == ["linear_w4a16_gemm_ws_sm90"]
    with pytest.raises(UnknownError):
        default_registry().kernel("linear", "linear_w9a16_sm90")


def test_what_is_migrated() -> None:
    assert migrated("linear_w4a16_sm90/3") == "linear_w4a16_decode_sm90/3"
    assert migrated(["linear_w4a16_tma_sm90[c=2]: wrong"]) == ["linear_w4a16_gemm_ws_sm90[c=2]: wrong"]
    assert migrated({"linear_w8a16_fed_sm90": 1.5}) == {"linear_w8a16_decode_ws_sm90": 1.5}
    for other in ("linear_w4a16_sm900", "my_linear_w4a16_sm90", "linear_w4a16_decode_sm90", 3, None):
        assert migrated(other) == other
    assert is_named("linear_w4a16_decode_sm90", "linear_w4a16_sm*") and not is_named(
        "linear_triton", "*_sm90"
    )
