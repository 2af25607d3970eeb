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
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a table the records."""

    def written(table: object) -> None:
        (tmp_path / "grades.json").write_text(json.dumps(table))
        monkeypatch.setattr(grades, "RECORDS", tmp_path / "grades.json")
        grades._recorded.cache_clear()

    yield written
    monkeypatch.undo()
    grades._recorded.cache_clear()


def record(*levels: str, code: str = "", **further: object) -> dict[str, object]:
    """An entry of the records, of the code that fake kernels have."""
    return {"code": code or fakes.kernel("b").code_hash(), "on": [*levels], **further}


TABLE = {
    "compiled": {"baseline.json": {"a": record("sm_90"), "b": record("sm_90")}},
    "elsewhere": {"report.json": {"b": record("sm_90")}},
}


@pytest.fixture
def records(write) -> None:
    """Records for the fake kernels a and b on sm_90."""
    write(TABLE)


def _select(target: str, policy: Policy, store: Store | None = None, foreign: bool = False) -> Selection:
    kernels = [fakes.kernel("a", priority=20), fakes.kernel("b", priority=10)]
    here = Target.parse(target)
    return select(fakes.OP, fakes.problem(), kernels, here, BUILD, store or Store(), policy, foreign=foreign)


def test_the_best_record_of_a_target_comes_first(records) -> None:
    sm90 = Target.parse("h200")
    assert [str(p) for p in grades.proofs(fakes.kernel("b"), sm90)] == [
        "elsewhere (report.json)",
        "compiled (baseline.json)",
    ]
    assert str(grades.best(fakes.kernel("a"), sm90)) == "compiled (baseline.json)"
    assert grades.best(fakes.kernel("b"), Target.parse("sm_100")) is None
    assert grades.best(fakes.kernel("c"), sm90) is None


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
        problem=str(fakes.OP.verification(fakes.problem(), candidate.kernel, candidate.config or {})),
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


def test_a_record_with_a_hash_counts_for_that_code_only(write) -> None:
    b, sm90 = fakes.kernel("b"), Target.parse("sm_90")
    for code, grade in ((b.code_hash(), "elsewhere"), ("0" * 16, "compiled")):
        write(TABLE | {"elsewhere": {"proof.json": {"b": record("sm_90", code=code)}}})
        best = grades.best(b, sm90)
        assert best is not None and best.grade == grade


def test_a_failure_elsewhere_replaces_every_grade_while_the_code_is_the_same(write) -> None:
    b, sm90 = fakes.kernel("b"), Target.parse("sm_90")
    policy = Policy(grades=("here", "elsewhere", "compiled"))
    write(TABLE | {"failed": {"proof.json": {"b": record("sm_90")}}})
    assert [str(p) for p in grades.proofs(b, sm90)] == ["wrong elsewhere (proof.json)"]
    assert {c.kernel.name: c.verdict for c in _select("sm_90", policy).candidates}["b"] == "unverified"
    foreign = {c.kernel.name: c.reasons for c in _select("sm_90", Policy(), foreign=True).candidates}
    assert foreign["b"] == ("not verified: no such device here; wrong elsewhere (proof.json)",)
    write(TABLE | {"failed": {"proof.json": {"b": record("sm_90", code="0" * 16)}}})
    assert [p.grade for p in grades.proofs(b, sm90)] == ["elsewhere", "compiled"]


def test_every_record_of_a_former_code_is_void(write) -> None:
    """Also those of tests and of the compile matrix."""
    old = record("sm_90", code="0" * 16)
    write({grade: {"file": {"b": old}} for grade in ("elsewhere", "newer", "interpreted", "compiled")})
    assert grades.proofs(fakes.kernel("b"), Target.parse("sm_90")) == ()


def test_a_record_of_a_cpu_level_says_nothing_of_other_levels(write) -> None:
    b = fakes.kernel("b")
    write({"elsewhere": {"proof.json": {"b": record("cpu:avx2", code=b.code_hash())}}})
    assert grades.best(b, Target.parse("cpu:avx2")) is not None
    for other in ("cpu:avx512", "cpu:amx", "cpu:base", "cpu:avx2-fma", "cpu:neon"):
        assert grades.best(b, Target.parse(other)) is None, other


def test_the_level_is_that_of_the_code_which_the_installation_has(write) -> None:
    """A CPU with AVX-512 runs the AVX2 code of a library without more, and its record counts."""
    cpp = fakes.kernel("b", language="cpp")
    write({"elsewhere": {"proof.json": {"b": record("cpu:avx2")}}})
    for levels, reason in ((("base", "avx2"), "elsewhere"), (("base", "avx2", "avx512"), "no record")):
        build, here = Build.of({"torch": "2.13.0"}, cpu_levels=levels), Target.parse("cpu:avx512")
        chosen = select(fakes.OP, fakes.problem(), [cpp], here, build, Store(), Policy(), foreign=True)
        assert reason in chosen.candidates[0].reasons[0]


def test_a_record_names_the_ptx_that_ran_and_what_spills(write) -> None:
    b, sm86 = fakes.kernel("b"), Target.parse("sm_86")
    write(
        {
            "newer": {"proof.json": {"b": record("sm_80", "sm_86", ran="compute_80 on sm_90")}},
            "compiled": {"baseline.json": {"b": record("sm_86", "sm_89", spills={"sm_86": 48})}},
        }
    )
    assert [str(p) for p in grades.proofs(b, sm86)] == [
        "newer (proof.json: compute_80 on sm_90), spills 48 bytes per thread",
        "compiled (baseline.json), spills 48 bytes per thread",
    ]
    assert str(grades.best(b, Target.parse("sm_80"))) == "newer (proof.json: compute_80 on sm_90)"
    assert str(grades.best(b, Target.parse("sm_89"))) == "compiled (baseline.json)"


def test_int8_activations_have_a_grade_on_the_levels_that_ran_only() -> None:
    kernel = default_registry().kernel("linear", "linear_a8_cpu")
    found = {level: grades.best(kernel, Target.parse(level)) for level in ("cpu:base", "cpu:avx2")}
    assert {proof.grade for proof in found.values() if proof} == {"elsewhere"} and None not in found.values()
    for level in ("cpu:avx512_vnni", "cpu:amx", "cpu:neon_i8mm"):
        assert grades.best(kernel, Target.parse(level)) is None, level


def test_a_policy_names_grades_that_exist() -> None:
    assert Policy.parse({"grades": ["here", "emulated"]}, "p").grades == ("here", "emulated")
    for wrong in ([], ["sure"], ["failed"], 3):
        with pytest.raises(PolicyError, match="grades wants"):
            Policy.parse({"grades": wrong}, "p")


def test_hip_kernels_are_interpreted_and_compiled_and_claim_no_more() -> None:
    for name in ("linear_wv_splitk_hip", "linear_w_wv_splitk_hip"):
        kernel = default_registry().kernel("linear", name)
        for arch in kernel.requires.brings:
            found = grades.proofs(kernel, Target.parse(arch))
            assert [p.grade for p in found] == ["interpreted", "compiled"]


@pytest.mark.parametrize("name", ["linear_cutedsl_sm100", "linear_fp8_cutedsl_sm100"])
def test_products_on_tcgen05_are_interpreted_and_compiled_and_claim_no_more(name: str) -> None:
    kernel = default_registry().kernel("linear", name)
    for arch in ("sm_100", "sm_103"):
        found = grades.proofs(kernel, Target.parse(arch))
        assert [p.grade for p in found] == ["interpreted", "compiled"] and not kernel.proven
    for arch in ("sm_90", "sm_110", "sm_120"):
        assert not grades.proofs(kernel, Target.parse(arch))
