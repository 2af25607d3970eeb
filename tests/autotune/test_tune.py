"""Tuning: halving finds the fastest, budgets are kept, interrupted runs resume, wrong candidates are left
out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gristmill.autotune import tune as tuning
from gristmill.autotune.halving import halve
from gristmill.autotune.options import MOST, Job, Option, options
from gristmill.autotune.place import place
from gristmill.autotune.verifying import verify_all
from gristmill.bench.cli import cli
from gristmill.bench.commands.tune import jobs_of, sampled
from gristmill.bench.shapes import Step, calls, load_config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key
from tests.bench import cheats, slowed
from tests.short_rotations import rotations_are_short  # noqa: F401

ONE = ("--workers", "1")
"""Of few candidates: a process that verifies takes longer to start than they do."""


class Drawn:
    def __init__(self, name: str, us: float, rng: np.random.Generator) -> None:
        self.name, self.us, self.rng, self.taken = name, us, rng, 0

    def sample(self) -> float:
        self.taken += 1
        return self.us * (1 + abs(float(self.rng.standard_t(2))) * 0.03)


def test_halving_finds_the_fastest_and_spends_little_on_the_rest() -> None:
    right = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        candidates = [Drawn(str(n), 10 * (1 + 0.05 * n), rng) for n in range(40)]
        placed = halve(candidates, keep=[candidates[30]], seed=seed)
        right += placed[0].candidate.name in ("0", "1")
        assert "30" in {one.candidate.name for one in placed} and len(placed) == 4
        assert sum(candidate.taken for candidate in candidates[20:30]) < 10 * 4 and candidates[0].taken > 40
    assert right >= 19


def test_the_final_has_the_fastest_of_each_kind_that_comes_near() -> None:
    rng = np.random.default_rng(3)
    candidates = [
        Drawn(f"{kind}{n}", base * (1 + 0.02 * n), rng)
        for kind, base in (("a", 10), ("b", 12.5), ("c", 40))
        for n in range(8)
    ]
    placed = [
        one.candidate.name for one in halve(candidates, seed=1, kind=lambda candidate: candidate.name[0])
    ]
    assert (
        sum(name.startswith("a") for name in placed) == 3
        and sum(name.startswith("b") for name in placed) == 1
    )
    assert not any(name.startswith("c") for name in placed), "four times slower than the best"
    assert not any(one.candidate.name.startswith("b") for one in halve(candidates, seed=1))


def test_a_deadline_ends_it_with_an_answer() -> None:
    rng = np.random.default_rng(0)
    candidates = [Drawn(str(n), 10 + n, rng) for n in range(9)]
    placed = halve(candidates, deadline=0.0, clock=lambda: 1.0)
    assert placed and len(placed[0].samples) == 2


def job(text: str) -> Job:
    op = default_registry().op("rms_norm")
    return Job(op, op.problem(text))


def test_what_is_called_most_goes_first() -> None:
    loaded = jobs_of(calls(load_config("llama-3-8b"), 1, [Step.decode("1x1024")], "int4_g128"))
    assert len({(j.op.name, str(j.problem)) for j in loaded}) == len(loaded)
    assert str(loaded[0].problem) == "m=1,n=28672,k=4096,w=int4_g128,epilogue=silu_mul"


def test_tuning_on_this_machine_fills_the_store_and_goes_on_where_it_stopped(policy_file) -> None:
    policy_file()
    arguments = ["tune", "rms_norm", "--target", "cpu", "--problem", "m=64,n=512", *ONE, "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--minutes", "0.5"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["problems"][0]
    assert (
        row["state"] == "tuned"
        and row["options"] == 2
        and row["kernel"] == "rms_norm_cpu"
        and row["us"] == row["default_us"]
    )
    resumed = json.loads(CliRunner().invoke(cli, [*arguments, "--problem", "m=16,n=512"]).stdout)
    assert resumed["states"] == {"known": 1, "tuned": 1}
    explained = CliRunner().invoke(
        cli, ["explain", "rms_norm", "--problem", "m=64,n=512", "--target", "cpu", "--json"]
    )
    assert json.loads(explained.stdout)["candidates"][0]["source"] == "measured"


def test_what_is_saved_is_ranked_by_token(policy_file, tmp_path: Path) -> None:
    policy_file()
    loaded = jobs_of(calls(load_config("llama-3-8b"), 1, [Step.decode("32x64*3"), Step.prefill("2x512")]))
    assert sampled(loaded) == 32 * 3 + 2  # one per sequence, for each step as often as it occurs
    live = tmp_path / "live.json"
    rows = [
        {"op": "rms_norm", "problem": "m=3,n=64", "count": 7},
        {"op": "sample", "problem": "m=2,v=100", "count": 5},
    ]
    live.write_text(json.dumps({"schema": 1, "calls": rows}))
    result = CliRunner().invoke(
        cli, ["tune", "--shapes", str(live), "--target", "cpu", "--minutes", "0.5", *ONE, "--json"]
    )
    answer = json.loads(result.stdout)
    for row in answer["problems"]:
        assert row["saved_ms_per_token"] == pytest.approx(
            row["weight"] * (row["default_us"] - row["us"]) / 10 / 1e3
        )
    each = [row["saved_ms_per_token"] for row in answer["problems"]]
    assert answer["saved_ms_per_token"] == sum(each) and each == sorted(each, reverse=True)


def test_an_interrupt_ends_it_at_once_and_the_next_run_goes_on(policy_file, tmp_path: Path) -> None:
    """As Ctrl-C in a terminal: the whole process group receives it, while one problem is tuned and others
    wait."""
    policy_file()
    store = tmp_path / "cache" / "store.json"
    command = [
        sys.executable,
        "-m",
        "gristmill.bench.cli",
        "tune",
        "rms_norm",
        "--target",
        "cpu",
        "--minutes",
        "5",
        *ONE,
        "--problem",
        "m=1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16,n=4096",
    ]
    run = subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # background jobs of a shell ignore SIGINT
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    while not store.exists():
        time.sleep(0.05)
        assert run.poll() is None
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)  # of the five minutes
    assert run.returncode == 130 and not out
    assert "Traceback" not in err and f"Results so far are in {store}" in err.replace("\n", ""), err
    tuned = {t.problem for t in Store.read(store).timings}
    resumed = CliRunner().invoke(cli, [*command[3:-1], "m=1|2,n=4096", "--json"])
    states = {row["problem"]: row["state"] for row in json.loads(resumed.stdout)["problems"]}
    assert states["m=1,n=4096"] == ("known" if "m=1,n=4096" in tuned else "tuned") and tuned


def test_verification_that_is_interrupted_begins_nothing_more() -> None:
    here, one = place("cpu"), job("m=4,n=64")
    pairs = [(one, Option(slowed.HONEST, {"level": "base", "at": n}, False)) for n in range(9)]

    class Stubborn:
        closed, begun = False, 0

        def __init__(self, interrupted: bool) -> None:
            self.interrupted = interrupted

        def verify(self, *task: object) -> dict:
            Stubborn.begun += 1
            if self.interrupted:
                raise KeyboardInterrupt  # as in the thread that waits for the others
            while not self.closed:
                time.sleep(0.01)
            return {"ok": False, "error": None, "reason": "", "judged": False}

        def close(self) -> None:
            self.closed = True

    with pytest.raises(KeyboardInterrupt):
        verify_all(pairs, here, [Stubborn(True), Stubborn(False)], 1e18)
    assert Stubborn.begun <= 2


def test_a_problem_is_tuned_again_when_the_code_of_one_of_its_kernels_has_changed() -> None:
    here, one = place("cpu"), job("m=4,n=64")
    kernels = {name: default_registry().kernel("rms_norm", f"rms_norm_{name}") for name in ("cpu", "torch")}

    def timing_of(name: str, us: float, **more: str) -> Timing:
        kernel = kernels[name]
        return Timing(
            **{
                "op": "rms_norm",
                "kernel": kernel.name,
                "code": kernel.code_hash(),
                "config": {},
                "problem": "m=4,n=64",
                "us": us,
                "target": target_key(here.target),
                "toolchain": here.build.key(),
                **more,
            }
        )

    def store(*timings: Timing) -> Store:
        filled = Store()
        for timing in timings:
            filled.add(timing)
        return filled

    assert tuning.known(one, here, store(timing_of("cpu", 1.0), timing_of("torch", 2.0)))
    assert not tuning.known(one, here, store()) and not tuning.known(
        one, here, store(timing_of("cpu", 1.0, timing="eager,hot"))
    )
    before = store(
        timing_of("cpu", 1.0, code="of yesterday"),
        timing_of("torch", 2.0),
        timing_of("cpu", 1.0, code="of yesterday", problem="m=8,n=64"),
    )
    assert not tuning.known(one, here, before)
    after = tuning.with_tuned(before, [timing_of("torch", 2.1)])  # the other one did not reach the final
    assert tuning.known(one, here, after) and {(t.kernel, t.problem) for t in after.timings} == {
        ("rms_norm_torch", "m=4,n=64"),
        ("rms_norm_cpu", "m=8,n=64"),
    }


def test_a_budget_is_kept(policy_file) -> None:
    """The best of three: another program may keep the cores for seconds. No budget is less than the first problem needs."""
    policy_file()
    here = place("cpu")
    jobs = [job(f"m={m},n=4096") for m in range(64, 512)]
    begin = time.perf_counter()
    assert [
        one.state for one in tuning.tune(jobs[:1], here, lambda _: Store(), seconds=0, store=Store())
    ] == ["tuned"]
    first = time.perf_counter() - begin
    for last in (False, False, True):
        saved: list[list[Timing]] = []

        def save(records: list[Timing], saved: list[list[Timing]] = saved) -> Store:
            saved.append(records)
            return Store()

        begin = time.perf_counter()
        tuned = tuning.tune(jobs, here, save, seconds=5, store=Store())
        elapsed = time.perf_counter() - begin
        states = [one.state for one in tuned]
        assert "out of time" in states and states[0] == "tuned" and len(saved) == states.count("tuned")
        if elapsed < 5.5 + 2.0 + first:  # a tenth more, and the start of child processes
            break
        assert not last, elapsed


def test_wrong_and_cheating_candidates_do_not_win(policy_file, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_file()
    cheats.leave()
    honest = Option(slowed.HONEST, slowed.HONEST.config(slowed.PROBLEM, place("cpu").target), True)
    cheat = Option(cheats.kernel(cheats.results_cached_by_pointer), {}, False)
    wrong = Option(default_registry().kernel("rms_norm", "rms_norm_torch"), {"no": "such thing"}, False)
    monkeypatch.setattr(tuning, "options", lambda job, here: [cheat, honest, wrong])
    real = tuning.verify_all

    def verify(pairs, *rest):
        """Child processes do not know the cheats: records them as passed, as they would be."""
        actual = real([pair for pair in pairs if pair[1].kernel.provider != "test"], *rest)
        template = next(r for r in actual if r.kernel == honest.kernel.name)
        return [*actual, type(template)(**{**vars(template), "kernel": cheat.kernel.name, "config": ""})]

    monkeypatch.setattr(tuning, "verify_all", verify)
    saved: list = []
    actual = tuning.tune(
        [Job(slowed.OP, slowed.PROBLEM)],
        place("cpu"),
        lambda r: saved.extend(r) or Store(),
        seconds=60,
        workers=1,
        store=Store(),
    )
    assert actual[0].kernel == "rms_norm_cpu" and any(
        "over the tolerance" in text for text in actual[0].wrong
    )


def test_a_space_is_sampled_and_cost_models_prune() -> None:
    here = place("h200")
    op = default_registry().op("linear")
    candidates = options(Job(op, op.problem("m=1,n=4096,k=4096,w=int4_g128")), here)
    counts = {
        name: sum(o.kernel.name == name for o in candidates) for name in {o.kernel.name for o in candidates}
    }
    assert counts and max(counts.values()) <= MOST + 1
    assert all(sum(o.default for o in candidates if o.kernel.name == name) == 1 for name in counts)


def test_mistakes(policy_file) -> None:
    policy_file()
    result = CliRunner().invoke(cli, ["tune"])
    assert result.exit_code != 0 and "give one of: an operation, a model" in result.output
    result = CliRunner().invoke(cli, ["tune", "--model", "llama-3-8b", "--target", "sm_90"])
    assert result.exit_code != 0 and "not a device of this machine" in result.output
