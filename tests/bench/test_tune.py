"""Tuning: halving finds the fastest, budgets are kept, stopped runs go on, wrong candidates are left out."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from click.testing import CliRunner

from gristmill.bench import tune as tuning
from gristmill.bench.cli import cli
from gristmill.bench.halving import halve
from gristmill.bench.options import MOST, Job, Option, options
from gristmill.bench.place import place
from gristmill.bench.shapes import Step, calls, load_config
from gristmill.bench.tune import jobs_of
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store
from tests.bench import cheats, slowed


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
        arms = [Drawn(str(n), 10 * (1 + 0.05 * n), rng) for n in range(40)]
        placed = halve(arms, keep=[arms[30]], seed=seed)
        right += placed[0].arm.name in ("0", "1")
        assert "30" in {one.arm.name for one in placed} and len(placed) == 4
        assert sum(arm.taken for arm in arms[20:30]) < 10 * 4 and arms[0].taken > 40
    assert right >= 19


def test_a_deadline_ends_it_with_an_answer() -> None:
    rng = np.random.default_rng(0)
    arms = [Drawn(str(n), 10 + n, rng) for n in range(9)]
    placed = halve(arms, deadline=0.0, clock=lambda: 1.0)
    assert placed and len(placed[0].samples) == 2


def job(text: str) -> Job:
    op = default_registry().op("rms_norm")
    return Job(op, op.problem(text))


def test_what_is_called_most_goes_first() -> None:
    found = jobs_of(calls(load_config("llama-3-8b"), 1, [Step.decode("1x1024")], "int4_g128"))
    assert len({(j.op.name, str(j.problem)) for j in found}) == len(found)
    assert str(found[0].problem) == "m=1,n=28672,k=4096,w=int4_g128,epilogue=silu_mul"


def test_tuning_on_this_machine_fills_the_store_and_goes_on_where_it_stopped(policy_file) -> None:
    policy_file()
    arguments = ["tune", "rms_norm", "--target", "cpu", "--problem", "m=64,n=512", "--json"]
    done = CliRunner().invoke(cli, [*arguments, "--minutes", "0.5"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)["problems"][0]
    assert row["state"] == "tuned" and row["options"] == 2 and row["kernel"] == "rms_norm_cpu" and row["us"] == row["default_us"]
    again = json.loads(CliRunner().invoke(cli, [*arguments, "--problem", "m=16,n=512"]).stdout)
    assert again["states"] == {"known": 1, "tuned": 1}
    found = CliRunner().invoke(cli, ["explain", "rms_norm", "--problem", "m=64,n=512", "--target", "cpu", "--json"])
    assert json.loads(found.stdout)["candidates"][0]["source"] == "measured"


def test_a_budget_is_kept(policy_file) -> None:
    policy_file()
    here, saved = place("cpu"), []
    begin = time.perf_counter()
    jobs = [job(f"m={m},n=4096") for m in range(64, 512, 8)]
    found = tuning.tune(jobs, here, lambda records: saved.append(records) or Store(), seconds=10, store=Store())
    taken = time.perf_counter() - begin
    assert taken < 11.0 + 2.0, taken  # a tenth more, and the children's start
    states = [one.state for one in found]
    assert "out of time" in states and states[0] == "tuned" and len(saved) == states.count("tuned")


def test_wrong_and_cheating_candidates_do_not_win(policy_file, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_file()
    cheats.leave()
    honest = Option(slowed.HONEST, slowed.HONEST.config(slowed.PROBLEM, place("cpu").target), True)
    cheat = Option(cheats.kernel(cheats.results_cached_by_pointer), {}, False)
    wrong = Option(default_registry().kernel("rms_norm", "rms_norm_torch"), {"no": "such thing"}, False)
    monkeypatch.setattr(tuning, "options", lambda job, here: [cheat, honest, wrong])
    real = tuning.verify_all

    def verify(pairs, *rest):
        """The zoo is unknown to child processes: as if it had passed there, which it would."""
        found = real([pair for pair in pairs if pair[1].kernel.provider != "test"], *rest)
        template = next(r for r in found if r.kernel == honest.kernel.name)
        return [*found, type(template)(**{**vars(template), "kernel": cheat.kernel.name, "config": ""})]

    monkeypatch.setattr(tuning, "verify_all", verify)
    saved: list = []
    found = tuning.tune([Job(slowed.OP, slowed.PROBLEM)], place("cpu"), lambda r: saved.extend(r) or Store(), seconds=60, store=Store())
    assert found[0].kernel == "rms_norm_cpu" and any("over the tolerance" in text for text in found[0].wrong)


def test_a_space_is_sampled_and_cost_models_prune() -> None:
    here = place("h200")
    op = default_registry().op("linear")
    found = options(Job(op, op.problem("m=1,n=4096,k=4096,w=int4_g128")), here)
    counts = {name: sum(o.kernel.name == name for o in found) for name in {o.kernel.name for o in found}}
    assert counts and max(counts.values()) <= MOST + 1
    assert all(sum(o.default for o in found if o.kernel.name == name) == 1 for name in counts)


def test_mistakes(policy_file) -> None:
    policy_file()
    done = CliRunner().invoke(cli, ["tune"])
    assert done.exit_code != 0 and "name an operation, or a model" in done.output
    done = CliRunner().invoke(cli, ["tune", "--model", "llama-3-8b", "--target", "sm_90"])
    assert done.exit_code != 0 and "not a device of this machine" in done.output
