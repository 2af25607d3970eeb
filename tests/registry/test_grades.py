"""Grades of proof: the records, their order, and what a policy does with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.kernel_registry import grades
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.policy import Policy, PolicyError
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import Selection, select
from gristmill.kernel_registry.store import Store, Verification, config_key, target_key
from gristmill.kernel_registry.target import Target
from tests.registry import fakes

BUILD = Build.of({"torch": "2.13.0"})


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Records for the fake kernels a and b on sm_90."""
    table = {
        "compiled": {"baseline.json": {"a": ["sm_90"], "b": ["sm_90"]}},
        "elsewhere": {"report.json": {"b": ["sm_90"]}},
    }
    (tmp_path / "grades.json").write_text(json.dumps(table))
    monkeypatch.setattr(grades, "RECORDS", tmp_path / "grades.json")
    grades._recorded.cache_clear()
    yield
    monkeypatch.undo()
    grades._recorded.cache_clear()


def _select(target: str, policy: Policy, store: Store | None = None, foreign: bool = False) -> Selection:
    kernels = [fakes.kernel("a", priority=20), fakes.kernel("b", priority=10)]
    here = Target.parse(target)
    return select(fakes.OP, fakes.problem(), kernels, here, BUILD, store or Store(), policy, foreign=foreign)


def test_the_best_record_of_a_target_comes_first(records) -> None:
    sm90 = Target.parse("h200")
    assert [str(p) for p in grades.proofs("b", sm90)] == [
        "elsewhere (report.json)",
        "compiled (baseline.json)",
    ]
    assert str(grades.best("a", sm90)) == "compiled (baseline.json)"
    assert grades.best("b", Target.parse("sm_100")) is None and grades.best("c", sm90) is None


def test_by_default_a_record_of_another_device_replaces_no_verification(records) -> None:
    chosen = _select("sm_90", Policy())
    assert [c.verdict for c in chosen.candidates] == ["unverified", "unverified"]
    foreign = _select("sm_90", Policy(), foreign=True)
    assert [c.reasons for c in foreign.candidates] == [
        ("not verified: no such device here; compiled (baseline.json)",),
        ("not verified: no such device here; elsewhere (report.json)",),
    ]


def test_a_policy_accepts_the_grades_that_it_names_and_no_others(records) -> None:
    chosen = _select("sm_90", Policy(grades=("here", "elsewhere"), exclude=("a",)))
    assert chosen.best is not None and chosen.best.verdict == "selected"
    assert chosen.best.reasons == ("not verified here; by policy: elsewhere (report.json)",)
    other = _select("sm_90", Policy(grades=("here", "elsewhere")))
    assert {c.kernel.name: c.verdict for c in other.candidates}["a"] == "unverified"
    nowhere = _select("sm_100", Policy(grades=("here", "elsewhere", "compiled")))
    assert [c.verdict for c in nowhere.candidates] == ["unverified", "unverified"]  # no record, no claim


def test_a_failed_verification_here_counts_more_than_any_record(records) -> None:
    policy = Policy(grades=("here", "elsewhere"))
    candidate = next(c for c in _select("sm_90", policy).candidates if c.kernel.name == "b")
    store = Store()
    failed = Verification(
        op=fakes.OP.name,
        kernel="b",
        code=candidate.kernel.verification_hash(candidate.config),
        config=config_key(candidate.config or {}),
        problem=str(fakes.OP.verification(fakes.problem())),
        target=target_key(Target.parse("sm_90")),
        toolchain=BUILD.key(),
        ok=False,
    )
    store.add(failed)
    verdicts = {c.kernel.name: c.verdict for c in _select("sm_90", policy, store).candidates}
    assert verdicts["b"] == "quarantined"
    store.add(replace(failed, ok=True))
    verdicts = {c.kernel.name: c.verdict for c in _select("sm_90", policy, store).candidates}
    assert verdicts["b"] in ("selected", "eligible")


def test_a_policy_names_grades_that_exist() -> None:
    assert Policy.parse({"grades": ["here", "emulated"]}, "p").grades == ("here", "emulated")
    for wrong in ([], ["sure"], 3):
        with pytest.raises(PolicyError, match="grades wants"):
            Policy.parse({"grades": wrong}, "p")


def test_hip_kernels_are_interpreted_and_compiled_and_claim_no_more() -> None:
    for name in ("linear_wv_splitk_hip", "linear_w_wv_splitk_hip"):
        kernel = default_registry().kernel("linear", name)
        for arch in kernel.requires.brings:
            found = grades.proofs(name, Target.parse(arch))
            assert [p.grade for p in found] == ["interpreted", "compiled"]
