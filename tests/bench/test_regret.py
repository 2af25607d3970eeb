"""Regret: the loss of selection is computed from times, and a store with wrong times shows a loss."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from gristmill.autotune.options import Job, Option
from gristmill.autotune.place import place
from gristmill.autotune.verifying import key_of
from gristmill.bench import regret
from gristmill.bench.cli import cli
from gristmill.bench.regret import Studied, summary
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, Verification, config_key, target_key
from tests.bench import cheats

OP = default_registry().op("rms_norm")


@pytest.fixture(autouse=True)
def own_store(policy_file):
    policy_file()


def studied(text: str, cpu: float, torch: float, *, exact: bool = True) -> Studied:
    """Returns two candidates with these times in every round."""
    one = Studied(Job(OP, OP.problem(text)), exact=exact)
    for name, us in (("rms_norm_cpu", cpu), ("rms_norm_torch", torch)):
        config = dict(
            default_registry().kernel("rms_norm", name).config(one.job.problem, place("cpu").target)
        )
        key = (name, config_key(config))
        one.times[key], one.configs[key] = [us] * regret.ROUNDS, config
        one.defaults.add(key)
    one.best = min(one.times, key=one.judged_us)
    return one


def timing(text: str, name: str, us: float) -> Timing:
    kernel, here = default_registry().kernel("rms_norm", name), place("cpu")
    return Timing(
        op="rms_norm",
        kernel=name,
        code=kernel.code_hash(),
        config=dict(kernel.config(OP.problem(text), here.target)),
        problem=text,
        target=target_key(here.target),
        toolchain=here.build.key(),
        us=us,
    )


def test_a_store_with_wrong_times_is_seen_to_lose() -> None:
    actual = [studied("m=64,n=512", cpu=10.0, torch=15.0), studied("m=96,n=512", cpu=10.0, torch=15.0)]
    store = Store()
    for name, us in (("rms_norm_cpu", 30.0), ("rms_norm_torch", 20.0)):
        store.add(timing("m=64,n=512", name, us))  # swapped
    regret.ask(actual, place("cpu"), store, [])
    assert [one.regrets["store"] for one in actual] == pytest.approx([0.5, 0.5])
    assert [one.regrets["tuned"] for one in actual] == [0.0, 0.0]
    figures = summary(actual)["store, tuned problems"]
    assert figures is not None and figures.mean == pytest.approx(0.5) and figures.problems == 2


def test_left_out_means_without_its_own_records() -> None:
    """A problem that is left out is selected by its neighbours' times; where these rank the kernels
    differently, the loss is its regret."""
    problems = [studied("m=64,n=512", cpu=10.0, torch=12.0), studied("m=96,n=512", cpu=20.0, torch=10.0)]
    regret.ask(problems, place("cpu"), Store(), [])
    assert [one.regrets["tuned"] for one in problems] == [0.0, 0.0]
    assert [one.regrets["left out"] for one in problems] == pytest.approx([0.2, 1.0])


def test_a_choice_is_judged_by_rounds_that_did_not_make_it() -> None:
    one = studied("m=64,n=512", cpu=10.0, torch=11.0)
    lucky = next(key for key in one.times if key[0] == "rms_norm_torch")
    one.times[lucky] = [5.0, 5.0, 11.0, 11.0]
    one.best = min(one.times, key=one.judged_us)
    regret.ask([one], place("cpu"), Store(), [])
    assert one.regrets["tuned"] == pytest.approx(0.1)


def test_problems_with_untried_candidates_do_not_count() -> None:
    complete, part = studied("m=64,n=512", 10.0, 11.0), studied("m=96,n=512", 10.0, 11.0)
    part.missing = 1
    regret.ask([complete, part], place("cpu"), Store(), [])
    figures = summary([complete, part])["tuned in this run"]
    assert figures is not None and figures.problems == 1 and summary([part])["tuned in this run"] is None


def test_the_command_measures_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = CliRunner().invoke(
        cli,
        [
            "regret",
            "rms_norm",
            "--problem",
            "m=64|96,n=2048",
            "--target",
            "cpu",
            "--minutes",
            "1",
            "--workers",
            "1",
            "--results",
            str(path),
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert (
        output["asked"] == output["studied"] == 2 and output["regret"]["tuned in this run"]["problems"] == 2
    )
    row = json.loads(path.read_text())["rows"][0]
    assert (
        row["candidates"] == 2
        and row["missing"] == 0
        and {"store", "tuned", "left out"} == row["picks"].keys()
    )
    times = [us for table in row["times"].values() for us in table["us"].values()]
    assert row["us"] == min(
        us if isinstance(us, float) else min(us[regret.ROUNDS // 2 :] or us) for us in times
    )
    assert any(isinstance(us, list) for us in times), "the best candidates have a time per round"


def test_a_cheat_is_not_the_best_of_anything() -> None:
    cheats.leave()
    cheats.STATE["calls"] = cheats.PATIENCE  # from now on it writes nothing
    honest, cheat = (
        default_registry().kernel("rms_norm", "rms_norm_cpu"),
        cheats.kernel(cheats.writes_skipped_after_a_while),
    )
    job, here = Job(OP, OP.problem("m=64,n=2048")), place("cpu")
    config = dict(honest.config(job.problem, here.target))
    options = [Option(honest, config, True), Option(cheat, {}, False)]
    outcomes = {
        key_of(job, o): Verification("rms_norm", o.kernel.name, "", config_key(o.config), "", "", "", True)
        for o in options
    }
    one = regret._time(job, options, outcomes, here, Store(), random.Random(0))
    assert (
        one.best is not None
        and one.best[0] == "rms_norm_cpu"
        and any("error inf" in text for text in one.wrong)
    )
    cheats.leave()
