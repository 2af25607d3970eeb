"""kernelbench prove: what a report has, what it counts for, and which reports are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gristmill.bench import proofs
from gristmill.bench.cli import cli
from gristmill.bench.commands import prove
from gristmill.bench.examples import examples
from gristmill.bench.result_file import ResultError
from gristmill.kernel_registry import grades as registered
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from tests import forked
from tests.registry.test_plugins import install

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))
import grades  # noqa: E402
import tables  # noqa: E402

KERNEL = "rms_norm_cpu"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(autouse=True)
def own_store(policy_file) -> None:
    policy_file()


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(cli, ["prove", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report of one kernel."""
    path = tmp_path_factory.mktemp("proof") / "proof.json"
    run("--kernel", KERNEL, "--target", "cpu:avx2", "--out", path)
    return proofs.read(path)


def changed(path: Path, report: dict[str, Any], change: Change, sign: bool = True) -> Path:
    """Writes a copy of the report, changed; with the digest of its content, unless `sign` is false."""
    copy = json.loads(json.dumps(report))
    change(copy)
    if sign:
        copy["digest"] = proofs.digest(copy)
    path.write_text(json.dumps(copy))
    return path


def finding(path: Path) -> proofs.Finding:
    return proofs.judged(proofs.read(path), default_registry())[KERNEL]


def test_a_report_has_device_versions_and_the_hash_of_what_ran(proven: dict[str, Any]) -> None:
    environment = proven["environment"]
    assert environment["target"] == "cpu:avx2" and environment["device"] and environment["torch"]
    kernel = default_registry().kernel("rms_norm", KERNEL)
    op = default_registry().op("rms_norm")
    assert [row["problem"] for row in proven["rows"]] == [
        str(op.problem(text)) for text in op.test_problems(kernel)
    ]
    for row in proven["rows"]:
        assert row["ok"] is True and row["error"] <= row["tolerance"] and row["config"] == {"level": "avx2"}
        assert row["code"] == kernel.code_hash({"level": "avx2"})
    assert proven["kind"] == "proof" and proven["digest"] == proofs.digest(proven)


def test_a_report_proves_the_present_code(tmp_path: Path, proven: dict[str, Any]) -> None:
    path = changed(tmp_path / "p.json", proven, lambda report: None)
    assert str(finding(path)) == "proven: 9 examples"
    (row,) = json.loads(run("--check", path, "--json"))
    assert row["state"] == "proven" and row["kernel"] == KERNEL and row["target"] == "cpu:avx2"


def first(report: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = report["rows"][0]
    return row


WRONG = {"ok": False, "error": 1.0, "reason": "error 1 is over the tolerance"}
SHORT = {"ok": None, "error": None, "reason": "no memory for the trial"}
JUDGED: dict[str, tuple[Change, str, str]] = {
    "old code": (lambda r: first(r).update(code="0" * 16), "outdated", "code 0000000000000000 ran"),
    "old code that was wrong": (lambda r: first(r).update(code="0" * 16, **WRONG), "outdated", "code 0000"),
    "wrong": (lambda r: first(r).update(WRONG), "failed", "m=0,n=64,x=fp32: error 1 is over"),
    "a row less": (lambda r: r["rows"].pop(), "incomplete", "without m=33,n=768,x=fp16,w=fp32"),
    "another problem": (
        lambda r: first(r).update(problem="m=3,n=9"),
        "incomplete",
        "without m=0,n=64,x=fp32",
    ),
    "not judged": (lambda r: first(r).update(SHORT), "unjudged", "no memory for the trial"),
    "a looser tolerance": (
        lambda r: first(r).update(error=1.0, tolerance=2.0),
        "outdated",
        "the tolerance is now",
    ),
    "another device": (lambda r: r["environment"].update(target="sm_90"), "unknown", "does not run there"),
}


@pytest.mark.parametrize("name", JUDGED)
def test_what_a_changed_report_counts_for(name: str, tmp_path: Path, proven: dict[str, Any]) -> None:
    """Reports that are whole in themselves, with another content."""
    change, state, reason = JUDGED[name]
    found = finding(changed(tmp_path / "p.json", proven, change))
    assert found.state == state and reason in found.reason


def test_one_old_row_does_not_hide_a_present_failure(tmp_path: Path, proven: dict[str, Any]) -> None:
    def change(report: dict[str, Any]) -> None:
        first(report).update(code="0" * 16)
        report["rows"][1].update(WRONG)

    assert finding(changed(tmp_path / "p.json", proven, change)).state == "failed"


REFUSED: dict[str, tuple[Change, str]] = {
    "over its tolerance": (
        lambda r: first(r).update(error=1.0),
        r"rows\[0\]: it is ok, with an error of 1 over",
    ),
    "no error": (lambda r: first(r).update(error=None), "it is ok, without an error"),
    "no number": (lambda r: first(r).update(error="0"), "error: expected a number or null, found '0'"),
    "no reason": (lambda r: first(r).update(ok=False), "it is not ok, without a reason"),
    "no verdict": (lambda r: first(r).update(ok="yes"), "expected ok true, false or null"),
    "no hash": (lambda r: first(r).pop("code"), "expected code"),
    "an empty hash": (lambda r: first(r).update(code=""), "the hash of the code"),
    "twice": (lambda r: r["rows"].append(first(r)), "rms_norm_cpu m=0,n=64,x=fp32 has two rows"),
    "no such target": (lambda r: r["environment"].update(target="sm_1"), "unknown target 'sm_1'"),
    "no target": (lambda r: r["environment"].pop("target"), "environment: target"),
    "another kind": (lambda r: r.pop("kind"), "expected a report of kernelbench prove"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reports_that_contradict_themselves_are_refused(
    name: str, tmp_path: Path, proven: dict[str, Any]
) -> None:
    change, reason = REFUSED[name]
    path = changed(tmp_path / "p.json", proven, change)
    with pytest.raises(ResultError, match=reason):
        proofs.read(path)


EDITS: dict[str, Change] = {
    "an error": lambda r: first(r).update(error=0.5 * first(r)["tolerance"]),
    "a device": lambda r: r["environment"].update(device="another"),
    "a hash": lambda r: first(r).update(code="0" * 16),
    "a row": lambda r: r["rows"].pop(),
    "the digest": lambda r: r.update(digest="0" * 64),
    "no digest": lambda r: r.pop("digest"),
}


@pytest.mark.parametrize("name", EDITS)
def test_reports_edited_by_hand_are_refused(name: str, tmp_path: Path, proven: dict[str, Any]) -> None:
    path = changed(tmp_path / "p.json", proven, EDITS[name], sign=False)
    with pytest.raises(ResultError, match="changed after kernelbench prove wrote it"):
        proofs.read(path)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Derives the grades from reports in a folder; a second report of the same device is beside it."""
    monkeypatch.setattr(grades, "PROOFS", tmp_path)

    def derived() -> dict[str, Any]:
        grades._judged.cache_clear()
        (tmp_path / "grades.table").write_text(grades.records(default_registry()))
        monkeypatch.setattr(registered, "RECORDS", tmp_path / "grades.table")
        registered._recorded.cache_clear()
        table: dict[str, Any] = json.loads((tmp_path / "grades.table").read_text())
        return table

    yield derived
    monkeypatch.undo()
    grades._judged.cache_clear()
    registered._recorded.cache_clear()


def test_reports_become_grades_of_their_code(
    tmp_path: Path, proven: dict[str, Any], records: Callable[[], dict[str, Any]]
) -> None:
    """A report counts, one of old code does not, and a failure counts more than a report beside it."""
    kernel, avx2 = default_registry().kernel("rms_norm", KERNEL), Target.parse("cpu:avx2")
    good, other = tmp_path / "a.json", tmp_path / "b.json"
    changed(good, proven, lambda report: None)
    assert records()["elsewhere"][str(good)] == {KERNEL: {"code": kernel.code_hash(), "on": ["cpu:avx2"]}}
    best = registered.best(kernel, avx2)
    assert best is not None and (best.grade, best.record) == ("elsewhere", str(good))
    changed(other, proven, JUDGED["old code that was wrong"][0])
    assert str(other) not in {path for of in records().values() for path in of}
    changed(other, proven, JUDGED["wrong"][0])
    assert records()["failed"] == {str(other): {KERNEL: {"code": kernel.code_hash(), "on": ["cpu:avx2"]}}}
    assert [p.grade for p in registered.proofs(kernel, avx2)] == ["failed"]
    changed(other, proven, JUDGED["a row less"][0])
    assert str(other) not in records()["elsewhere"]
    changed(other, proven, EDITS["an error"], sign=False)
    with pytest.raises(ResultError, match="changed after"):
        records()


def test_a_report_of_a_card_makes_its_letters_bold(
    tmp_path: Path,
    proven: dict[str, Any],
    records: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a GPU that nobody here has, and of the one kernel that was run there."""
    op, gfx1100 = default_registry().op("rms_norm"), Target.parse("gfx1100")
    kernel = default_registry().kernel("rms_norm", "rms_norm_triton")

    def change(report: dict[str, Any]) -> None:
        report["environment"].update(target="gfx1100", device="AMD Radeon RX 7900 XTX")
        row = report["rows"][0]
        report["rows"] = []
        for text in op.test_problems(kernel):
            problem = op.problem(text)
            config = dict(kernel.config(problem, gfx1100))
            own = {"kernel": kernel.name, "problem": str(problem), "config": config}
            report["rows"].append({**row, **own, "code": kernel.code_hash(config)})

    def letters() -> list[str]:
        records()
        lines = tables.ops_table(default_registry()).splitlines()
        row = next(line for line in lines if line.startswith("| `rms_norm` |"))
        return row.split("|")[2 + [heading for heading, _ in tables.COLUMNS].index("gfx1100")].split()

    assert letters() == ["T"]
    changed(tmp_path / "card.json", proven, change)
    assert letters() == ["**T**"]
    assert tables.runs(kernel)[-1] == "gfx1100: AMD Radeon RX 7900 XTX"
    assert str(registered.best(kernel, gfx1100)) == f"elsewhere ({tmp_path / 'card.json'})"
    changed(tmp_path / "card.json", proven, lambda report: (change(report), first(report).update(WRONG)))
    assert letters() == ["-"]


def test_explain_shows_what_is_known_of_kernels_that_are_not_verified_here(
    tmp_path: Path, proven: dict[str, Any], records: Callable[[], dict[str, Any]]
) -> None:
    changed(tmp_path / "a.json", proven, lambda report: None)
    records()
    command = ["explain", "rms_norm", "--problem", "m=4,n=64", "--target", "cpu:avx2", "--json"]
    policy = tmp_path / "first.toml"
    policy.write_text(f"pins = {{rms_norm = ['rms_norm_torch']}}\nstore = '{tmp_path / 'new.json'}'\n")
    result = CliRunner().invoke(cli, command, env={"GRISTMILL_POLICY": str(policy)})
    candidates = {one["kernel"]: one for one in json.loads(result.stdout)["candidates"]}
    assert candidates["rms_norm_torch"]["verdict"] == "selected"
    assert candidates[KERNEL]["reasons"] == [
        "no record that it matched the reference here",
        f"elsewhere ({tmp_path / 'a.json'})",
    ]


PLUGIN = """
from gristmill.kernel_registry import Kernel, Requirement

def launch(config, call):
    scale = (call.x.float().square().mean(-1, keepdim=True) + call.eps).rsqrt()
    call.out.copy_(call.x * scale * call.weight)
    call.out[-1:] += 1

KERNEL = Kernel(op="rms_norm", name="rms_norm_toy", provider="toy", language="python", target="gm_toy:launch",
                requires=Requirement(vendors=("cpu",)))
"""


def test_a_wrong_kernel_is_in_the_report_and_in_the_exit_status(tmp_path: Path) -> None:
    """Planted fault: a kernel that is wrong in its last row."""
    install(tmp_path, "toy", PLUGIN)
    path = tmp_path / "p.json"
    command = ("-m", "gristmill.bench.cli", "prove", "--kernel", "rms_norm_toy", "--target", "cpu:avx2")
    process: subprocess.CompletedProcess[str] = forked.run(
        *command, "--out", str(path), path=(tmp_path,), workers=True
    )
    assert process.returncode == 1, process.stderr
    rows = proofs.read(path)["rows"]
    wrong = [row for row in rows if row["ok"] is False]
    assert len(wrong) == 6 and all("over the tolerance" in row["reason"] for row in wrong)
    assert [row["problem"] for row in rows if row["ok"]] == ["m=0,n=64,x=fp32"]  # it has no last row


def test_after_an_interrupt_the_report_has_what_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes(runs: Any, device: str, workers: int) -> Any:
        yield from [{"ok": True, "error": 0.0, "reason": "", "judged": True}] * 3
        raise KeyboardInterrupt

    monkeypatch.setattr(prove, "_outcomes", outcomes)
    path = tmp_path / "p.json"
    run("--kernel", KERNEL, "--target", "cpu:avx2", "--out", path, status=1)
    assert len(proofs.read(path)["rows"]) == 3 and finding(path).state == "incomplete"


def test_children_take_whole_kernels_and_outcomes_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    took: dict[str, set[int]] = {}

    class Child:
        def verify(self, op: Any, kernel: Any, config: Any, problem: Any, device: str) -> dict[str, Any]:
            took.setdefault(kernel.name, set()).add(id(self))
            time.sleep(0.002 if "cpu" in kernel.name else 0.0)
            return {"name": f"{kernel.name} {problem}"}

        def close(self) -> None:
            took.setdefault("closed", set()).add(id(self))

    monkeypatch.setattr("gristmill.autotune.worker.Worker", Child)
    _, runs, _ = examples("cpu:avx2", "silu_and_mul", None)
    outcomes = list(prove._outcomes(runs, "cpu", 2))
    assert [outcome["name"] for outcome in outcomes] == [str(example) for example in runs]
    closed = took.pop("closed")
    assert len(closed) == 2 and len(took) >= 2 and all(len(children) == 1 for children in took.values())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--target", "gfx1100"), "gfx1100 is not a device of this machine"),
        (("--kernel", "no_such"), "no kernel called 'no_such'"),
        (("--kernel", "rms_norm_aiter", "--target", "cpu:avx2"), "rms_norm_aiter cannot run on cpu:avx2"),
        # Whether or not the interpreter is on: it proves nothing of a CPU.
        (("--kernel", "silu_and_mul_triton", "--target", "cpu:avx2"), "on cpu:avx2"),
        (("--check", __file__, "--op", "rms_norm"), "--check runs nothing"),
        (("--check", __file__), "expected a result file of kernelbench"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["prove", *arguments])
    assert result.exit_code != 0 and reason in f"{result.exception} {result.output}"
    assert not [*tmp_path.glob("*.json")]


def test_what_a_report_does_not_prove_is_run_again(tmp_path: Path, proven: dict[str, Any]) -> None:
    """A row of old code, so that its kernel runs; other kernels' rows are kept as they are."""

    def aged(report: dict[str, Any]) -> None:
        others = [row | {"kernel": "rms_norm_torch", "code": "0" * 16} for row in report["rows"]]
        report["rows"] += others

    path, out = changed(tmp_path / "p.json", proven, aged), tmp_path / "new.json"
    options = ("--op", "rms_norm", "--target", "cpu:avx2", "--renew", path, "--out", out)
    run(*options)
    report = proofs.read(out)
    assert [row for row in report["rows"] if row["kernel"] == KERNEL] == proven["rows"]
    assert report["renewed"] == {name: proven[name] for name in ("when", "environment")}
    found = proofs.judged(report, default_registry())
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(
        (KERNEL, "rms_norm_torch"), "proven"
    )
    later = proofs.report(examples("cpu:avx2", "rms_norm", KERNEL)[0], report["rows"], {}, report)
    assert later["renewed"]["renewed"] == report["renewed"], "the run of the oldest rows"
    again = ("--op", "rms_norm", "--target", "cpu:avx2", "--renew", out)
    assert json.loads(run(*again, "--json"))["rows"] == report["rows"]
    assert "proves all of it" in run(
        "--op", "rms_norm", "--target", "cpu:avx2", "--renew", out, "--out", path
    )
    assert len(proofs.read(path)["rows"]) == 2 * len(proven["rows"]), "nothing was to be written"


def test_a_report_of_another_device_is_not_renewed(tmp_path: Path, proven: dict[str, Any]) -> None:
    path = changed(tmp_path / "p.json", proven, lambda report: report["environment"].update(device="Other"))
    result = CliRunner().invoke(cli, ["prove", "--target", "cpu:avx2", "--renew", str(path)])
    assert result.exit_code == 2 and "it is of cpu:avx2, Other; this is cpu:avx2" in result.output


def test_the_shipped_reports_are_whole() -> None:
    """Their kernels may have changed since; that is for the grades to say (tests/docs/test_tables.py)."""
    reports = [proofs.read(path) for path in sorted(grades.PROOFS.glob("*.json"))]
    parts = [r for r in reports if {"--op", "--kernel"} & {*r["environment"]["command"].split()}]
    whole = [report for report in reports if report not in parts]
    assert len(whole) > 1 and all(len(report["rows"]) > 300 for report in whole)
    assert all(len({row["op"] for row in report["rows"]}) == 1 for report in parts)
