"""kernelbench compare and check: a separate cause for every exit code, and planted faults that must produce
it."""

from __future__ import annotations

import copy
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from gristmill.autotune.place import place
from gristmill.autotune.rounds import ROUNDS, Rounds
from gristmill.bench import baseline
from gristmill.bench.cli import cli
from gristmill.bench.compare import GAP, WRONG, Case, Row, compare
from gristmill.bench.result_file import ResultError
from gristmill.bench.statistics.race import race
from gristmill.bench.statistics.verdict import FASTER, SAME, SLOWER, Rule
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from tests.bench import cheats, slowed
from tests.calls import make_call, positional

PROBLEM = "m=100,n=2048"
LINEAR = default_registry().op("linear")


WRONG_SCALE = {"place": -1, "factor": 2.0}
"""Which block scale is wrong, counted over all of them, and by which factor."""


@positional
def one_wrong_scale(config, x, weight, bias, residual, silu_mul, n, workspace, codes, scales, out):
    """linear_cpu with a weight of which one block scale is wrong."""
    wrong = [t.clone() for t in weight]
    scales = wrong[1].view(-1)
    scales[int(WRONG_SCALE["place"]) % len(scales)] *= WRONG_SCALE["factor"]
    default_registry().kernel("linear", "linear_cpu").load()(
        config, make_call("linear", x, wrong, bias, residual, silu_mul, n, workspace, out)
    )


def planted() -> Kernel:
    honest = default_registry().kernel("linear", "linear_cpu")
    return Kernel(
        op="linear",
        name="linear_cpu",
        provider="test",
        language="cpp",
        target=f"{__name__}:one_wrong_scale",
        requires=honest.requires,
        config=honest.config,
        accepts=honest.accepts,
        layouts=honest.layouts,
    )


@pytest.fixture(autouse=True)
def own_store(policy_file) -> None:
    policy_file()


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@cache
def compared() -> list[Row]:
    """Rows of rms_norm_cpu against torch on this machine, timed once."""
    torch = default_registry().kernel("rms_norm", "rms_norm_torch")
    case = Case(slowed.OP, slowed.OP.problem(PROBLEM), torch, (slowed.HONEST,))
    return compare([case], place("cpu"), Rule(min_effect=0.3))


def written(path: Path, ratio: float = 1.0) -> Path:
    """Writes a baseline of rms_norm_cpu on this machine with its ratios multiplied by `ratio`."""
    baseline.update(path, place("cpu"), compared(), portable=True)
    if ratio != 1.0:
        data = json.loads(path.read_text())
        for entry in data["parts"][0]["entries"]:
            for name in ("ratio", "low", "high"):
                entry[name] *= ratio
        path.write_text(json.dumps(data))
    return path


def test_nothing_is_slower(tmp_path: Path) -> None:
    path = written(tmp_path / "b.json")
    result = run(
        "check",
        str(path),
        "--target",
        "cpu",
        "--min-effect",
        "0.3",
        "--json",
        "--junit",
        str(tmp_path / "j.xml"),
        "--markdown",
        str(tmp_path / "m.md"),
    )
    output = json.loads(result.stdout)
    assert result.exit_code == 0 and output["exit"] == 0, output
    assert [row["verdict"] for row in output["rows"]] == [SAME] and abs(output["rows"][0]["change"] - 1) < 0.3
    suite = ElementTree.parse(tmp_path / "j.xml").getroot().find("testsuite")
    assert suite is not None and suite.get("failures") == "0" and suite.get("tests") == "1"
    assert "| SAME | rms_norm_cpu | `m=100,n=2048` |" in (tmp_path / "m.md").read_text()


def test_something_is_slower_is_1(tmp_path: Path) -> None:
    # When the baseline was written, the kernel took half as long.
    path = written(tmp_path / "b.json", ratio=0.5)
    result = run(
        "check", str(path), "--target", "cpu", "--min-effect", "0.3", "--junit", str(tmp_path / "j.xml")
    )
    assert result.exit_code == 1 and "something is slower" in result.stdout and SLOWER in result.stdout
    failure = ElementTree.parse(tmp_path / "j.xml").getroot().find(".//failure")
    assert failure is not None and re.search(
        r"SLOWER: \+\d+\.\d% against the baseline", failure.get("message", "")
    )


def test_faster_is_fine(tmp_path: Path) -> None:
    path = written(tmp_path / "b.json", ratio=2.0)
    output = json.loads(run("check", str(path), "--target", "cpu", "--min-effect", "0.3", "--json").stdout)
    assert output["exit"] == 0 and output["rows"][0]["verdict"] == FASTER


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))]
)
def test_one_wrong_block_scale_is_2_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Any single block scale that is doubled, halved, zero or negative is reported."""
    rng = random.Random(seed)
    monkeypatch.setitem(WRONG_SCALE, "place", rng.randrange(1 << 20))
    monkeypatch.setitem(WRONG_SCALE, "factor", rng.choice([2.0, 0.5, 0.0, -1.0]))
    path = tmp_path / "b.json"
    entry = {
        "op": "linear",
        "problem": "m=33,n=256,k=512,w=int4_g128",
        "kernel": "linear_cpu",
        "yardstick": "linear_dequant_torch",
        "ratio": 1.0,
        "low": 1.0,
        "high": 1.0,
    }
    part = {"environment": baseline.environment(place("cpu"), portable=True), "entries": [entry]}
    path.write_text(json.dumps({"schema": 1, "parts": [part]}))
    monkeypatch.setattr(baseline, "named", lambda op, pattern: [planted()])
    output = json.loads(run("check", str(path), "--target", "cpu", "--json").stdout)
    assert output["exit"] == 2 and output["rows"][0]["verdict"] == WRONG
    assert "over the tolerance" in output["rows"][0]["reason"]


def test_too_noisy_is_3() -> None:
    rows = copy.deepcopy(compared())
    entry = baseline.Entry("rms_norm", rows[0].problem, rows[0].kernel, rows[0].baseline, 1.0, 0.5, 2.0)
    rows[0].noise = 0.4  # the yardstick, timed twice, seems to differ from itself
    checked = baseline.against([entry], rows, Rule(min_effect=0.3))
    assert (
        baseline.exit_code(checked) == baseline.NOISY and "differs from itself by 40.0%" in checked[0].reason
    )


def test_another_environment_is_4_and_none_is_5(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    result = run("check", str(path), "--target", "cpu")
    assert result.exit_code == 5 and result.stdout == "" and "--update" in result.stderr
    part = {"environment": {"target": "sm_90", "torch": "2.13", "threads": 1}, "entries": []}
    path.write_text(json.dumps({"schema": 1, "parts": [part]}))
    result = run("check", str(path), "--target", "cpu", "--json")
    assert result.exit_code == 4 and "the baseline's is sm_90" in json.loads(result.stdout)["reason"]
    part["environment"] = baseline.environment(place("cpu"), portable=False)
    path.write_text(json.dumps({"schema": 1, "parts": [part]}))
    assert run("check", str(path), "--target", "cpu").exit_code == 5


def test_a_check_that_cannot_begin_still_writes_its_reports(tmp_path: Path) -> None:
    xml, page = tmp_path / "r.xml", tmp_path / "r.md"
    assert (
        run(
            "check", str(tmp_path / "b.json"), "--target", "cpu", "--junit", str(xml), "--markdown", str(page)
        ).exit_code
        == 5
    )
    assert (
        "does not exist" in ElementTree.parse(xml).getroot()[0][0][0].attrib["message"]
        and "no baseline" in page.read_text()
    )


def test_a_line_whose_kernel_is_gone_is_a_gap_and_the_others_are_checked(tmp_path: Path) -> None:
    path = written(tmp_path / "b.json")
    data = json.loads(path.read_text())
    entry = data["parts"][0]["entries"][0]
    data["parts"][0]["entries"] += [entry | {"kernel": "rms_norm_gone"}, entry | {"problem": "m=1,colour=2"}]
    path.write_text(json.dumps(data))
    result = run("check", str(path), "--target", "cpu", "--min-effect", "0.6", "--json")
    output = {row["kernel"] + row["problem"]: row for row in json.loads(result.stdout)["rows"]}
    assert result.exit_code == 4 and output["rms_norm_gone" + PROBLEM]["verdict"] == GAP
    assert (
        "did you mean" in output["rms_norm_gone" + PROBLEM]["reason"]
        and output["rms_norm_cpu" + PROBLEM]["us"]
    )
    result = run("check", str(path), "--target", "cpu", "--update", "--json")
    assert result.exit_code == 0 and "dropped: rms_norm_gone" in result.stderr
    assert [e["kernel"] for e in json.loads(path.read_text())["parts"][0]["entries"]] == ["rms_norm_cpu"]


def test_a_wrong_yardstick_is_2(tmp_path: Path) -> None:
    cheats.leave()
    wrong = cheats.kernel(cheats.results_cached_by_pointer)
    rows = compare([Case(slowed.OP, slowed.PROBLEM, wrong, (slowed.HONEST,))], place("cpu"), Rule())
    entry = baseline.Entry("rms_norm", str(slowed.PROBLEM), slowed.HONEST.name, wrong.name, 1.0, 1.0, 1.0)
    checked = baseline.against([entry], rows, Rule())
    assert baseline.exit_code(checked) == baseline.BAD and "yardstick is wrong" in checked[0].reason


def test_a_baseline_of_no_ratio_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    result = run(
        "check",
        str(path),
        "--update",
        "--op",
        "rms_norm",
        "--kernels",
        "rms_norm_torch",
        "--yardstick",
        "rms_norm_torch",
    )
    assert result.exit_code == 2 and "nothing but the yardstick" in result.output and not path.exists()


def test_rounds_go_on_until_the_change_is_clear() -> None:
    """A kernel that takes a fifth of its yardstick's time is FASTER at the first look, but its change is not
    yet clear then."""
    rng = random.Random(0)
    candidates = [_Noisy("yard", 100.0, rng), _Noisy("kernel", 20.0, rng)]
    entry = baseline.Entry("o", "p", "kernel", "yard", 0.19, 0.19, 0.19)
    for shift, looks in ((None, 1), (baseline.shifts([entry]), 2)):
        rounds = Rounds(candidates)
        race({"o p": rounds}, Rule(min_effect=0.05), **({} if shift is None else {"shift": shift}))
        assert (rounds.count > ROUNDS) == (looks > 1)


class _Noisy:
    def __init__(self, name: str, us: float, rng: random.Random) -> None:
        self.name, self._us, self._rng = name, us, rng

    def sample(self) -> float:
        return self._us * (1 + 0.1 * self._rng.random())


def test_a_wrong_result_outranks_a_slow_one(tmp_path: Path) -> None:
    rows = compared()
    entry = baseline.Entry("rms_norm", rows[0].problem, rows[0].kernel, rows[0].baseline, 1.0, 1.0, 1.0)
    verdicts = [baseline.Checked(entry, v, "", None, rows[0]) for v in (SAME, SLOWER, GAP, WRONG)]
    assert [baseline.exit_code(verdicts[:n]) for n in (1, 2, 3, 4)] == [0, 1, 1, 2]


def test_an_update_keeps_what_it_does_not_touch(tmp_path: Path) -> None:
    path = written(tmp_path / "b.json")
    other = {
        "environment": {"target": "sm_90"},
        "entries": [
            {
                "op": "linear",
                "problem": "m=1,n=8,k=8",
                "kernel": "a",
                "yardstick": "b",
                "ratio": 2.0,
                "low": 1.9,
                "high": 2.1,
            }
        ],
    }
    data = json.loads(path.read_text())
    path.write_text(json.dumps({"schema": 1, "parts": [other, *data["parts"]]}))
    result = run("check", str(path), "--update", "--target", "cpu", "--json")
    assert result.exit_code == 0 and [e["kernel"] for e in json.loads(result.stdout)] == ["rms_norm_cpu"]
    parts = json.loads(path.read_text())["parts"]
    assert parts[0] == other and len(parts) == 2 and len(parts[1]["entries"]) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema": 1, "parts": [\n{"x": ', "line 2"),
        ('{"schema": 9}', "schema 1"),
        ('{"schema": 1, "parts": [{"environment": {}, "entries": [{"op": "a"}]}]}', r"parts\[0\].*missing"),
        (
            '{"schema": 1, "parts": [{"environment": {}, "entries": [{"op": "a", "problem": "b", "kernel": "c", "yardstick": "d", '
            '"ratio": "1", "low": 1, "high": 1}]}]}',
            r"parts\[0\]: ratio: expected a positive number, found '1'",
        ),
        (
            '{"schema": 1, "parts": [{"environment": {}, "entries": [{"op": "a", "problem": "b", "kernel": "c", "yardstick": "d", '
            '"ratio": 1, "low": 0, "high": 1}]}]}',
            r"parts\[0\]: low: expected a positive number, found 0",
        ),
    ],
)
def test_a_damaged_baseline_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=complaint):
        baseline.read(path)


def _case(*others: Kernel) -> Case:
    return Case(
        slowed.OP,
        slowed.PROBLEM,
        slowed.HONEST,
        others or (default_registry().kernel("rms_norm", "rms_norm_torch"),),
    )


def test_compare_calls_slow_cheating_and_missing_kernels_what_they_are() -> None:
    cheats.leave()
    cheat = cheats.kernel(cheats.results_cached_by_pointer)
    gpu = default_registry().kernel("rms_norm", "rms_norm_flashinfer")
    rows = compare([_case(slowed.SLOWER, cheat, gpu)], place("cpu"), Rule())
    actual = {row.kernel: row for row in rows}
    assert actual["rms_norm_slower"].verdict == SLOWER and actual["rms_norm_slower"].noise is not None
    assert actual[cheat.name].verdict == WRONG and actual[cheat.name].us is None
    assert actual[gpu.name].verdict == GAP and "runs on" in actual[gpu.name].reason
    fields: Any = actual["rms_norm_slower"].as_dict()
    assert fields["low"] <= fields["ratio"] <= fields["high"] and fields["timing"] == "eager,cold"


def test_a_wrong_baseline_spoils_its_rows() -> None:
    cheats.leave()
    wrong = cheats.kernel(cheats.results_cached_by_pointer)
    rows = compare([Case(slowed.OP, slowed.PROBLEM, wrong, (slowed.HONEST,))], place("cpu"), Rule())
    assert {row.kernel: row.verdict for row in rows} == {wrong.name: WRONG, slowed.HONEST.name: GAP}


def test_compare_on_the_command_line(tmp_path: Path) -> None:
    result = run(
        "compare",
        "rms_norm",
        "--target",
        "cpu",
        "--baseline",
        "rms_norm_torch",
        "--kernels",
        "*_cpu",
        "--problem",
        "m=16,n=512",
        "--min-effect",
        "0.2",
        "--results",
        str(tmp_path / "r.json"),
        "--json",
    )
    row = json.loads(result.stdout)[0]
    assert (
        result.exit_code == 0
        and row["verdict"] in (FASTER, SAME, "UNCLEAR")
        and row["baseline"] == "rms_norm_torch"
    )
    stored = json.loads((tmp_path / "r.json").read_text())
    assert len(stored["rows"][0]["samples"]) == row["rounds"] and stored["environment"]["command"].startswith(
        "kernelbench"
    )
    result = run(
        "compare", "rms_norm", "--target", "cpu", "--baseline", "rms_norm_cpu", "--kernels", "rms_norm_cpu"
    )
    assert result.exit_code != 0 and "nothing to compare" in result.output
