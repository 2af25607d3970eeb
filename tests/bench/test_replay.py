"""Regret replayed from a file: equal figures from equal code, other figures for another default, and gaps are
counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gristmill.autotune.options import Job, options
from gristmill.autotune.place import place
from gristmill.bench import regret
from gristmill.bench.cli import cli
from gristmill.bench.regret import Studied, ask, summary, unknown
from gristmill.bench.replay import replay
from gristmill.bench.result_file import ResultError, record
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, config_key

ROOT = Path(__file__).parents[2]
OP = default_registry().op("linear")
HERE = place("h200")
PROBLEMS = ("m=1,n=4096,k=4096,w=int4_g128", "m=1,n=6144,k=4096,w=int4_g128")


@pytest.fixture(autouse=True)
def own_store(policy_file):
    policy_file()


def studied(text: str) -> Studied:
    """Returns every candidate that this installation has for an H200, with invented times that differ more by
    kernel than by configuration."""
    one = Studied(Job(OP, OP.problem(text)), exact=False)
    for number, option in enumerate(options(one.job, HERE, every=True)):
        key = option.kernel.name, config_key(option.config)
        kernel = 5.0 if option.kernel.name == "linear_w4a16_decode_sm90" else 20.0
        one.times[key] = [kernel * (1 + ((number * 7 + 3) % 50) / 100)] * regret.ROUNDS
        one.configs[key] = dict(option.config)
        one.defaults |= {key} if option.default else set()
    one.best = min(one.times, key=one.judged_us)
    return one


@pytest.fixture
def written() -> tuple[list[Studied], dict]:
    problems = [studied(text) for text in PROBLEMS]
    ask(problems, HERE, Store(), [])
    data = record(HERE, [one.as_dict() for one in problems], regret={}, asked=2)
    data["environment"] |= {"device": "NVIDIA H200", "target": "sm_90"}
    return problems, json.loads(json.dumps(data))


def test_a_replay_by_the_same_code_says_the_same(written: tuple[list[Studied], dict]) -> None:
    then, data = written
    _, now = replay(data, Store())
    assert [one.picks for one in now] == [one.picks for one in then]
    assert [one.best for one in now] == [one.best for one in then]
    for old, new in zip(then, now, strict=True):
        assert new.regrets == pytest.approx(old.regrets, abs=1e-3) and len(new.times) == len(old.times)
        assert new.regrets["store"] > 0 and new.regrets["tuned"] == 0.0


def test_another_default_has_another_regret(
    written: tuple[list[Studied], dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The purpose of a replay: a better default shows without a device."""
    then, data = written
    kernel = default_registry().kernel("linear", "linear_w4a16_decode_sm90")
    best = {str(one.job.problem): one.configs[one.best] for one in then if one.best}
    better = replace(kernel, config=lambda problem, target: best[str(problem)])
    kernels = [better if k.name == kernel.name else k for k in default_registry().kernels["linear"]]
    monkeypatch.setitem(default_registry().kernels, "linear", kernels)
    _, now = replay(data, Store())
    assert [one.regrets["store"] for one in now] == [0.0, 0.0]


def test_what_was_no_candidate_is_counted_and_what_is_gone_is_left_out(
    written: tuple[list[Studied], dict],
) -> None:
    then, data = written
    for row in data["rows"]:
        row["times"]["linear_gone"] = {"of": "", "us": {"": 0.1}}
    _, now = replay(data, Store())
    assert [one.best for one in now] == [one.best for one in then]
    for row in data["rows"]:
        pick = row["picks"]["store"]
        times = regret.unfolded(row["times"][pick["kernel"]])
        del times[pick["config"]]
        row["times"][pick["kernel"]] = regret.folded(times)
    _, now = replay(data, Store())
    assert (
        unknown(now, "store") == 2
        and unknown(now, "tuned") == 0
        and summary(now)["store, other problems"] is None
    )


@pytest.mark.parametrize(
    ("times", "written_as"),
    [
        ({"": 1.0}, {"all": "", "of": "", "us": {"": 1.0}}),
        ({"a=1,b=x": 1.0}, {"all": "a=1,b=x", "of": "", "us": {"": 1.0}}),
        (
            {"a=1,a2=3,b=x,c=2": [2.0, 1.0], "a=2,a2=3,b=x,c=1": 4.0},
            {"all": "a2=3,b=x", "of": "a,c", "us": {"1,2": [2.0, 1.0], "2,1": 4.0}},
        ),
        (
            {"a=1,b=x": 2.0, "a=1,a2=3,b=y": 3.0, "b=x,c=4": 5.0},
            {"all": "", "of": "a,a2,b,c", "us": {"1,,x,": 2.0, "1,3,y,": 3.0, ",,x,4": 5.0}},
        ),
    ],
)
def test_what_all_configurations_share_is_written_once(times: dict, written_as: dict) -> None:
    assert regret.folded(times) == written_as and regret.unfolded(written_as) == times
    older = {"of": "a,b", "us": {"1,x": 2.0, "2,y": 3.0}}
    assert regret.unfolded(older) == {"a=1,b=x": 2.0, "a=2,b=y": 3.0}


def test_the_command_replays_and_refuses_other_files(
    written: tuple[list[Studied], dict], tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(written[1]))
    result = CliRunner().invoke(cli, ["regret", "--replay", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["studied"] == 2
    assert CliRunner().invoke(cli, ["regret", "linear", "--replay", str(path)]).exit_code == 2
    del written[1]["regret"]
    with pytest.raises(ResultError, match="it has no regret"):
        replay(written[1])


def test_problems_left_out_of_tuning_lose_little_by_the_committed_times() -> None:
    """The file has the time of every candidate of its day on an H200, so that it judges changes of a cost model or of selection here. Where
    tiles are chosen that it does not know, a problem has no regret: five of those left out, at most."""
    data = json.loads((ROOT / "bench/results/h200/kernelbench/regret_linear_64.json").read_text())
    figures = summary(replay(data)[1])
    tuned, left_out, store = (
        figures[method] for method in ("tuned in this run", "left out of tuning", "store, tuned problems")
    )
    assert tuned is not None and tuned.problems >= 60 and tuned.mean < 0.02 and tuned.worst < 0.10, tuned
    assert (
        left_out is not None and left_out.problems >= 59 and left_out.mean < 0.05 and left_out.worst < 0.20
    ), left_out
    assert store is not None and store.mean < 0.02 and store.worst < 0.10, store


@pytest.mark.parametrize("suite", ["rows", "experts"])
def test_problems_of_no_store_lose_little_by_times_of_their_day(suite: str) -> None:
    """Of operations beside linear with weights of few bits, with the times of every candidate on an H200. No shipped store has their times, but cost
    models were fitted to them among others. Every pick is among the candidates."""
    path = ROOT / f"bench/results/h200/kernelbench/regret_{suite}.json"
    problems = replay(json.loads(path.read_text()))[1]
    assert not any(one.exact for one in problems), "a shipped store has times of a problem that counts as new"
    assert unknown(problems, "store") == 0
    others = summary(problems)["store, other problems"]
    assert others is not None and others.problems >= 7 and others.mean < 0.02 and others.worst < 0.15, others
