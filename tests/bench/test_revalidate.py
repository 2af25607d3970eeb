"""Times of another toolchain: carried over where a sample confirms them, kept as near where it does not,
rejected where results are wrong."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.place import Place, place
from gristmill.autotune.store import dump, save
from gristmill.autotune.store_tools import lint
from gristmill.bench import revalidate as again
from gristmill.bench.cli import cli
from gristmill.bench.revalidate import DIFFERS, HOLDS, WRONG, Remeasured
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, config_key, target_key
from gristmill.kernel_registry.times import Times

OP = default_registry().op("rms_norm")
KERNEL = default_registry().kernel("rms_norm", "rms_norm_cpu")
SIZES = range(64, 64 + 20 * 8, 8)


@pytest.fixture(autouse=True)
def own_store(policy_file):
    policy_file()


def tools(here: Place) -> str:
    return "torch=1.0" + (",interpreter" if here.build.triton_interpreter else "")


def old(here: Place, m: int, **more) -> Timing:
    problem = f"m={m},n=512"
    return Timing(
        **{
            "op": "rms_norm",
            "kernel": KERNEL.name,
            "code": KERNEL.code_hash(),
            "problem": problem,
            "us": 10.0,
            "config": dict(KERNEL.config(OP.problem(problem), here.target)),
            "target": target_key(here.target),
            "toolchain": tools(here),
            **more,
        }
    )


def store_with(here: Place, *more: Timing) -> Store:
    store = Store()
    for timing in (*(old(here, m) for m in SIZES), *more):
        store.add(timing)
    return store


def outcome(us: float | None, off: int = 0, reason: str = ""):
    """Returns a measurement that gives `us`, and 50 % more in the first `off` cases."""
    remaining = [off]

    def measure(timing: Timing, here: Place) -> Remeasured:
        remaining[0] -= 1
        return Remeasured(
            timing,
            None if us is None else us * (1.5 if remaining[0] >= 0 else 1.0),
            (us or 0.0,),
            reason=reason,
        )

    return measure


def run(store: Store, measure, sample: int = 8):
    here = place("cpu")
    actual = again.groups(store, here)
    records = again.revalidate(actual, here, sample=sample, measure=measure)
    return actual, records, again.replaced(store, records), here


def source(store: Store, here: Place, m: int) -> str:
    expected = Times(OP, OP.problem(f"m={m},n=512"), here.target, here.build, store).expected(KERNEL)
    assert expected is not None
    return expected[1]


def test_times_that_hold_are_carried_over_and_say_so() -> None:
    before = store_with(place("cpu"))
    groups, records, after, here = run(before, outcome(10.4))
    assert [group.outcome for group in groups] == [HOLDS] and len(groups[0].again) == 8
    assert source(before, here, 64) == "near" and all(source(after, here, m) == "measured" for m in SIZES)
    carried = [t for t in after.timings if t.origin]
    assert len(carried) == 12 and all(
        "8 of 20 held" in t.origin and "torch=1.0" in t.origin and t.us == 10.0 for t in carried
    )
    assert {t.us for t in after.timings if not t.origin} == {10.4} and {
        t.toolchain for t in after.timings
    } == {here.build.key()}
    assert again.groups(after, here) == [] and not [
        f
        for f in lint(after, default_registry(), here.target, target_key(here.target), here.build)
        if f.kind == "stale"
    ]
    text = dump(after)
    assert dump(Store.parse(json.loads(text), "x", text)) == text and text.count('"origin"') == 12


def test_times_that_differ_stay_near() -> None:
    groups, _, after, here = run(store_with(place("cpu")), outcome(13.0))
    assert [group.outcome for group in groups] == [DIFFERS] and groups[0].as_dict()["ratio"] == pytest.approx(
        1.3
    )
    sampled = {one.record.problem for one in groups[0].again}
    assert all(source(after, here, m) == ("measured" if f"m={m},n=512" in sampled else "near") for m in SIZES)


def test_one_outlier_in_ten_is_borne_and_two_are_not() -> None:
    assert run(store_with(place("cpu")), outcome(10.0, off=1), sample=10)[0][0].outcome == HOLDS
    assert run(store_with(place("cpu")), outcome(10.0, off=2), sample=10)[0][0].outcome == DIFFERS


def test_wrong_results_are_kept_out() -> None:
    groups, records, after, here = run(
        store_with(place("cpu")), outcome(None, reason="error 3 is over the tolerance 0.01")
    )
    assert [group.outcome for group in groups] == [WRONG] and not any(isinstance(r, Timing) for r in records)
    failed = after.verifications[records[0].key]
    assert (
        not failed.ok
        and failed.toolchain == here.build.key()
        and failed.config == config_key(old(here, 64).config)
    )


def test_what_cannot_be_tried_keeps_nothing_out() -> None:
    def measure(timing: Timing, here: Place) -> Remeasured:
        raise UnverifiableError("no memory for it")

    groups, records, after, here = run(store_with(place("cpu")), measure)
    assert groups[0].outcome == DIFFERS and records == [] and not after.verifications
    assert "no memory for it" in groups[0].as_dict()["reasons"] and source(after, here, 64) == "near"


def test_other_codes_devices_and_fresh_times_are_left_alone() -> None:
    here = place("cpu")
    store = Store()
    store.add(old(here, 64, code="0123456789abcdef"))
    store.add(old(here, 72, target="sm_90|NVIDIA H200"))
    store.add(old(here, 80))
    store.add(old(here, 80, toolchain=here.build.key()))
    assert again.groups(store, here) == []


def test_the_command_times_verifies_and_writes() -> None:
    here = place("cpu")
    path = here.policy.store_path
    rows = json.loads(
        CliRunner()
        .invoke(
            cli,
            [
                "bench",
                "rms_norm",
                "--problem",
                "m=256|264|272,n=4096",
                "--kernels",
                "rms_norm_cpu",
                "--target",
                "cpu",
                "--seconds",
                "0.1",
                "--json",
            ],
        )
        .stdout
    )
    save(path, [old(here, 1, problem=row["problem"], us=row["us"], config=row["config"]) for row in rows])
    arguments = ["store", "revalidate", "--sample", "2", "--target", "cpu", "--json"]
    dry = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert json.loads(dry.stdout)["written"] == 0 and {t.toolchain for t in Store.read(path).timings} == {
        tools(here)
    }
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["kernels"][0]
    assert (row["kernel"], row["records"], row["sampled"], row["reasons"]) == (
        "rms_norm_cpu",
        3,
        2,
        [],
    ) and row["ratio"] > 0
    fresh = [t for t in Store.read(path).timings if t.toolchain == here.build.key()]
    assert len(fresh) == (3 if row["outcome"] == HOLDS else 2)  # on a busy machine the times may differ
    wrong = old(here, 1, problem="m=8,n=64", config={"level": "no such level"})
    save(path, [wrong])
    result = CliRunner().invoke(cli, [*arguments, "--sample", "20"])
    assert result.exit_code == 1 and any(
        row["outcome"] == WRONG for row in json.loads(result.stdout)["kernels"]
    )
