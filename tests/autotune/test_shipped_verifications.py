"""Verifications that come with gristmill let a kernel run after a canary here, for the same code on the same model of device."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.autotune.resolve import Resolver
from gristmill.autotune.store import dump
from gristmill.autotune.worker import Worker
from gristmill.kernel_registry import select, shipped
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Verification, stores_in

OP = default_registry().op("rms_norm")
PROBLEMS = [OP.problem(f"m=4,n={n},x=fp32") for n in (512, 64, 128)]
TORCH = {"rms_norm": ("rms_norm_torch", "rms_norm_cpu")}


class Counting(Worker):
    """Says of each kernel what `outcomes` has, and else that it is right."""

    def __init__(self, outcomes: dict[str, bool]) -> None:
        super().__init__()
        self.outcomes, self.tried = outcomes, list[tuple[str, str]]()

    def verify(self, op: Any, kernel: Any, config: Any, problem: Any, device: str) -> dict[str, Any]:
        self.tried.append((kernel.name, str(problem)))
        ok = self.outcomes.get(kernel.name, True)
        return {"ok": ok, "error": 0.0, "tolerance": 0.0, "reason": "" if ok else "is wrong", "judged": True}


@pytest.fixture
def resolver(tmp_path: Path) -> Callable[..., tuple[Resolver, Counting]]:
    def make(outcomes: dict[str, bool] | None = None, **policy: Any) -> tuple[Resolver, Counting]:
        worker = Counting(outcomes or {})
        cache = tmp_path / str(len(list(tmp_path.iterdir())))
        cache.mkdir()
        return Resolver("cpu", Policy(cache=str(cache), pins=TORCH, **policy), worker=worker), worker

    return make


@pytest.fixture
def ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resolver: Callable[..., tuple[Resolver, Counting]]
) -> Callable[..., None]:
    """Ships what this device's store would have for the problems, with some fields changed."""

    def write(**changed: str) -> None:
        source, _ = resolver(canary=False)
        for problem in PROBLEMS:
            source.resolve(OP, problem)
        store = Store()
        for record in source.store.verifications.values():
            store.add(replace(record, **changed))  # type: ignore[arg-type]
        folder = tmp_path / "shipped"
        folder.mkdir()
        (folder / "here.json").write_text(dump(store))
        read = shipped.ShippedVerifications.of(stores_in(folder))
        monkeypatch.setattr(select, "shipped_verifications", lambda: read)

    return write


def test_one_canary_serves_all_problems_of_a_configuration(
    ship: Callable[..., None], resolver: Callable[..., tuple[Resolver, Counting]]
) -> None:
    ship()
    own, worker = resolver()
    first = own.select(OP, PROBLEMS[0]).require()
    assert (first.verdict, first.canary) == ("unverified", "m=4,n=64,x=fp32"), "the smallest of the record's"
    best = [own.resolve(OP, problem).require() for problem in PROBLEMS]
    assert worker.tried == [("rms_norm_torch", "m=4,n=64,x=fp32")]
    assert [c.grade for c in best] == ["elsewhere", "here", "elsewhere"]
    assert (
        "verified elsewhere, on another device of this model (here.json); canary passed here"
        in best[0].reasons[0]
    )
    assert [c.grade for c in best if c.verdict == "selected"] == ["elsewhere", "here", "elsewhere"]
    beyond = OP.problem("m=4,n=256,x=fp32")
    assert own.resolve(OP, beyond).require().grade == "here", "no record says anything of it"
    assert worker.tried[1:] == [("rms_norm_torch", "m=4,n=256,x=fp32")]


def test_a_canary_that_fails_quarantines(
    ship: Callable[..., None], resolver: Callable[..., tuple[Resolver, Counting]]
) -> None:
    """For every problem of the configuration, and the next kernel runs."""
    ship()
    own, worker = resolver({"rms_norm_torch": False})
    with pytest.warns(RuntimeWarning, match="rms_norm_torch is quarantined on .* is wrong"):
        best = own.resolve(OP, PROBLEMS[0]).require()
    assert best.kernel.name == "rms_norm_cpu" and best.grade == "here"
    for problem in PROBLEMS:
        rows = {c.kernel.name: c for c in own.resolve(OP, problem).candidates}
        assert (
            rows["rms_norm_torch"].verdict == "quarantined"
            and "is wrong" in rows["rms_norm_torch"].reasons[0]
        )
    assert [kernel for kernel, _ in worker.tried].count("rms_norm_torch") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"code": "0123456789abcdef"},
        {"target": "cpu:avx2|Another CPU"},
        {"toolchain": "py=3.11,torch=9.9,triton=9.9,lib=0.1.0"},
        {"config": "rows=3"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_records_of_something_else_do_not_count(
    changed: dict[str, str], ship: Callable[..., None], resolver: Callable[..., tuple[Resolver, Counting]]
) -> None:
    ship(**changed)
    own, worker = resolver()
    assert [own.resolve(OP, problem).require().grade for problem in PROBLEMS] == ["here"] * 3
    assert len(worker.tried) == 3


def test_a_toolchain_does_not_matter_to_code_that_is_built_before(
    ship: Callable[..., None],
    resolver: Callable[..., tuple[Resolver, Counting]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shipped, "BUILT", ("python",))
    ship(toolchain="py=3.11,torch=9.9,triton=9.9,lib=0.1.0")
    own, worker = resolver()
    assert own.resolve(OP, PROBLEMS[0]).require().grade == "elsewhere" and len(worker.tried) == 1


def test_a_policy_refuses_it(
    ship: Callable[..., None], resolver: Callable[..., tuple[Resolver, Counting]]
) -> None:
    ship()
    own, worker = resolver(canary=False)
    assert [own.resolve(OP, problem).require().grade for problem in PROBLEMS] == ["here"] * 3
    assert len(worker.tried) == 3 and Policy.parse({"canary": False}, "x").canary is False


def test_failures_are_not_shipped(tmp_path: Path) -> None:
    record = Verification(
        "rms_norm", "rms_norm_torch", "a", "", "m=4,n=64", "cpu:avx2", "py=3", False, 1.0, "wrong"
    )
    store = Store()
    store.add(record)
    (tmp_path / "a.json").write_text(dump(store))
    assert not shipped.ShippedVerifications.of(stores_in(tmp_path)).records


def test_a_damaged_problem_is_no_canary() -> None:
    assert shipped._smallest(OP, {"m=4,q=1": "a", "m=4,n=64,x=fp32": "a"}) == "m=4,n=64,x=fp32"


def test_a_store_is_shipped_by_a_command(
    resolver: Callable[..., tuple[Resolver, Counting]], policy_file: Callable[..., Path], tmp_path: Path
) -> None:
    """What matched here with the present code, and nothing else; another store on the same device then takes it."""
    from gristmill.autotune.store import save
    from gristmill.bench.cli import cli

    source, _ = resolver(canary=False)
    records = [source.verify(OP, problem, source.select(OP, problem).require()) for problem in PROBLEMS]
    others = [
        replace(records[0], code="0123"),
        replace(records[1], ok=False),
        replace(records[2], target="cpu:x"),
    ]
    policy_file()
    save(Policy.current().store_path, [records[0], records[2], *others])
    out = tmp_path / "folder" / "cpu.json"
    out.parent.mkdir()
    shown = CliRunner().invoke(
        cli, ["store", "ship", str(out), "--target", "cpu", "--json"], catch_exceptions=False
    )
    assert json.loads(shown.stdout)["verifications"] == 2
    held = shipped.ShippedVerifications.of(stores_in(out.parent))
    assert {text for group in held.records.values() for text in group} == {
        records[0].problem,
        records[2].problem,
    }
