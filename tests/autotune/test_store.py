"""The store: damage is named by line and left alone; merge, diff, lint and why, on handmade cases."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.autotune.place import place
from gristmill.autotune.store import dump, present, save
from gristmill.autotune.store_tools import diff, lint, merge, records
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import (
    Store,
    StoreError,
    Timing,
    Verification,
    config_key,
    config_of,
    target_key,
)

OP = default_registry().op("rms_norm")
KERNEL = default_registry().kernel("rms_norm", "rms_norm_cpu")
HERE = place("cpu")
WHERE = {"target": target_key(HERE.target), "toolchain": HERE.build.key()}


def timing(problem: str = "m=4,n=64", us: float = 3.0, **changes) -> Timing:
    config = dict(KERNEL.config(OP.problem(problem), HERE.target))
    return Timing(
        **{
            "op": "rms_norm",
            "kernel": "rms_norm_cpu",
            "code": KERNEL.code_hash(),
            "config": config,
            "problem": problem,
            "us": us,
            "samples": (us,),
            **WHERE,
            **changes,
        }
    )


def verification(problem: str = "m=4,n=64", ok: bool = True, **changes) -> Verification:
    config = config_key(KERNEL.config(OP.problem(problem), HERE.target))
    return Verification(
        **{
            "op": "rms_norm",
            "kernel": "rms_norm_cpu",
            "code": KERNEL.verification_hash(config_of(config)),
            "config": config,
            "problem": problem,
            "ok": ok,
            **WHERE,
            **changes,
        }
    )


def test_what_this_process_wrote_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody else has replaced it; and nobody's additions are in what others get."""
    path, other = tmp_path / "store.json", tmp_path / "other.json"
    given = save(path, [timing()])
    with monkeypatch.context() as patch:
        patch.setattr(Store, "read", lambda path: pytest.fail("read again"))
        present(path).add(verification("m=1,n=64"))
        given.add(verification("m=2,n=64"))
        assert save(path, [verification()]) == present(path)
        [first] = present(path).verifications.values()
        assert first == verification() and present(path).timings == [timing()]
    assert Store.read(path) == present(path)
    other.write_text(dump(Store()))
    other.replace(path)
    assert not present(path).timings and save(path, [timing()]).verifications == {}
    path.unlink()
    assert present(path) == Store()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text[: len(text) * 2 // 3], r"store.json: line [67]: "),  # truncated within a record
        (
            lambda text: text.replace('"us": 5.0', '"us": "fast"'),
            r"line 7: timed\[1\]: expected microseconds, found 'fast'",
        ),
        (
            lambda text: text.replace('"ok": true', '"ok": 1'),
            r"line 3: verified\[0\]: ok: expected true or false, found 1",
        ),
        (lambda text: text.replace('"us": 5.0', '"us": -5.0'), r"line 7: .*found -5.0"),
        (lambda text: text.replace('"us": 5.0', '"us": 5.0, "colour": 3'), r"line 7: timed\[1\]: .*colour"),
        (lambda text: text.replace('"schema": 1', '"schema": 7'), "expected a store of schema 1, found 7"),
        (lambda text: "[" * 100_000, "store.json: maximum recursion depth"),
        (lambda text: f'{{"schema": {"1" * 5000}}}', "store.json: Exceeds the limit"),
        (lambda text: "[]", "found 'list'"),
        (
            lambda text: '{"schema": 1, "rows": []}',
            "found rows: this is no store",
        ),  # a result file: merging into it would delete it
    ],
)
def test_a_damaged_store_is_refused_by_line_and_left_alone(tmp_path: Path, change, complaint: str) -> None:
    path = tmp_path / "store.json"
    save(path, [verification(), timing(), timing("m=8,n=64", 5.0)])
    damaged = change(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(StoreError, match=complaint):
        Store.read(path)
    with pytest.raises(StoreError):
        save(path, [timing("m=2,n=64")])
    assert path.read_text() == damaged


def test_who_may_read_a_store_and_where_it_lies_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "shared" / "store.json", tmp_path / "store.json"
    path.parent.mkdir()
    mask = os.umask(0o022)
    try:
        save(path, [timing()])
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644  # other users of the machine read it
    path.chmod(0o664)
    link.symlink_to(path)
    save(link, [timing("m=8,n=64")])
    assert link.is_symlink() and len(Store.read(path).timings) == 2 and path.stat().st_mode & 0o777 == 0o664
    assert {p.name for p in path.parent.iterdir()} == {"store.json", "store.json.lock"}


def test_a_store_that_cannot_be_read_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "store.json").mkdir()  # fails like a file without permission, which root would have
    with pytest.raises(StoreError, match="store.json: cannot be read: Is a directory"):
        Store.read(tmp_path / "store.json")


def test_a_merge_keeps_every_record_and_the_better_of_two() -> None:
    one, other = Store(), Store()
    one.add(verification())
    one.add(timing(us=3.0, samples=(3.0,)))
    other.add(verification(ok=False, reason="error 9"))
    other.add(timing(us=3.2, samples=(3.1, 3.2, 3.3)))
    other.add(timing("m=8,n=64"))
    for merged in (merge([one, other]), merge([other, one])):
        assert len(records(merged)) == 3
        assert not next(iter(merged.verifications.values())).ok
        assert {t.problem: t.us for t in merged.timings} == {"m=4,n=64": 3.2, "m=8,n=64": 3.0}


def test_a_diff_says_what_changed() -> None:
    one, other = Store(), Store()
    one.add(verification())
    one.add(timing(us=4.0))
    other.add(verification(ok=False, reason="error 9"))
    other.add(timing(us=5.0))
    other.add(timing("m=8,n=64"))
    changes = {(d.kind, d.what) for d in diff(one, other)}
    assert changes == {
        ("changed", "matched, then failed: error 9"),
        ("changed", "4 us, then 5 us (+25.0%)"),
        ("added", "3 us"),
    }
    assert diff(one, one) == [] and {d.kind for d in diff(other, one)} == {"changed", "removed"}


@pytest.mark.parametrize(
    ("record", "kind", "reason"),
    [
        (timing(op="rms_nrom"), "never", "no operation rms_nrom"),
        (timing(kernel="rms_norm_gone"), "never", "no kernel rms_norm_gone"),
        (
            timing(problem="m=4,n=64", config={}) and replace(timing(), problem="m=4,colour=red"),
            "never",
            "no axis colour",
        ),
        (replace(timing(), problem="n=64,m=4"), "never", "is written m=4,n=64"),
        (replace(timing(), problem="n=64"), "never", "leaves m open"),
        (replace(verification(), problem="m=1000,n=64"), "never", "looks for m=257,n=64"),
        (timing(target="sm_999"), "never", "sm_999"),
        (timing(code="0123"), "stale", "code has changed"),
        (timing(toolchain="other"), "stale", "made with other"),
        (verification(ok=False, reason="error 9"), "failed", "error 9"),
        (
            timing(us=9.0, config={"level": "base", "x": 1}),
            "slower",
            "9 us; the default configuration takes 3 us",
        ),
    ],
)
def test_lint_finds(record, kind: str, reason: str) -> None:
    store = Store()
    store.add(timing())
    store.add(verification("m=5,n=64"))
    store.add(record)
    findings = lint(store, default_registry(), HERE.target, WHERE["target"], HERE.build)
    assert [(f.kind, f.record) for f in findings] == [(kind, record)] and reason in findings[0].reason


def test_lint_leaves_other_devices_records_alone() -> None:
    store = Store()
    store.add(timing(target="sm_90|NVIDIA H200", toolchain="another"))
    assert lint(store, default_registry(), HERE.target, WHERE["target"], HERE.build) == []


def test_the_command_line(tmp_path: Path, policy_file) -> None:
    from click.testing import CliRunner

    from gristmill.bench.cli import cli

    a, b = tmp_path / "a.json", tmp_path / "b.json"
    policy_file(f'store = "{a}"\n')
    save(a, [timing()])
    save(b, [timing("m=8,n=64", us=5.0), replace(timing(), problem="m=1,n=1,x=red")])

    def run(*arguments: str):
        result = CliRunner().invoke(cli, ["store", *arguments, "--json"])
        return result.exit_code, json.loads(result.stdout)

    assert run("merge", "--into", str(a), str(b))[1]["timings"] == 3
    code, rows = run("lint", "--target", "cpu")
    assert code == 1 and [r["finding"] for r in rows] == ["never"]
    code, rows = run("diff", str(b), str(a))
    assert code == 1 and [r["change"] for r in rows] == ["added"]
    assert run("diff", str(a), str(a)) == (0, [])
    code, explanation = run("why", "rms_norm", "m=16,n=64", "--target", "cpu")
    row = next(r for r in explanation["candidates"] if r["kernel"] == "rms_norm_cpu")
    assert (
        code == 0
        and row["rule"] == "near"
        and row["record"]["problem"] == "m=8,n=64"
        and row["distance"] == 1.0
    )
    row = next(
        r
        for r in run("why", "rms_norm", "m=4,n=64", "--target", "cpu")[1]["candidates"]
        if r["kernel"] == "rms_norm_cpu"
    )
    assert row["rule"] == "measured" and row["expected_us"] == 3.0
