"""gristmill.explain: its arguments, its results, and the command, which prints the same."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import gristmill
from gristmill.autotune.explanation import Table
from gristmill.bench.commands.explain import explain as command
from gristmill.kernel_registry import AxisError, Target, UnknownError, default_registry

PROBLEM = "m=4,n=64,x=fp32"


@pytest.fixture(autouse=True)
def own_store(policy_file) -> None:
    policy_file()


def test_every_way_to_ask() -> None:
    op = default_registry().op("rms_norm")
    explanations = [
        gristmill.explain("rms_norm", PROBLEM, "sm_121"),
        gristmill.explain("rms_norm", "m=4,n=64,x=float32", "SM121"),
        gristmill.explain(op, {"m": 4, "n": 64, "x": torch.float32}, Target.parse("sm_121")),
        gristmill.explain(op, op.problem(PROBLEM), Target.parse("sm_121")),
    ]
    first = explanations[0]
    assert first.selected == "rms_norm_triton" and first.device is None and first.plan is None
    assert str(first.problem) == PROBLEM and first.target.name == "sm_121"
    assert all(other.as_dict() == first.as_dict() and str(other) == str(first) for other in explanations[1:])


def test_a_device_here_is_verified_by_any_of_its_names() -> None:
    for target in ("cpu", torch.device("cpu")):
        explanation = gristmill.explain("rms_norm", PROBLEM, target)
        assert explanation.device == "cpu" and explanation.candidates[0].verdict == "selected"
        assert explanation.selected == explanation.candidates[0].kernel.name
    if not torch.cuda.is_available():
        assert gristmill.explain("rms_norm", PROBLEM).device == "cpu"
        with pytest.raises(ValueError, match="device cuda:3: this machine has 0"):
            gristmill.explain("rms_norm", PROBLEM, "cuda:3")


def test_verdicts_have_reasons_and_a_policy_counts() -> None:
    explanation = gristmill.explain("rms_norm", PROBLEM, "sm_90")
    verdicts = {c.kernel.name: c.verdict for c in explanation.candidates}
    assert set(verdicts) == {kernel.name for kernel in default_registry().kernels_of("rms_norm")}
    assert verdicts["rms_norm_cpu"] == "hardware" and verdicts["rms_norm_torch"] == "unverified"
    assert all(c.reasons for c in explanation.candidates)
    policy = gristmill.Policy(exclude=("*triton*",), origin="a test")
    without = gristmill.explain("rms_norm", PROBLEM, "sm_90", policy=policy)
    assert without.selected == "rms_norm_torch"
    assert "excluded by '*triton*' in policy a test" in str(without)


def test_a_layer_gets_its_plan() -> None:
    explanation = gristmill.explain("linear", "n=256,k=512,w=int4_g128", "h200")
    assert explanation.plan is not None and explanation.plan.layouts == ("w4_frag16_v1",)
    assert [row["m_max"] for row in explanation.as_dict()["plan"]][-2:] == [4096, None]
    assert "m up to" in str(explanation) and "Plan over w4_frag16_v1" in str(explanation)
    one = gristmill.explain("linear", "m=3,n=256,k=512,w=int4_g128", "h200")
    assert one.plan is None and "plan" not in one.as_dict()


@pytest.mark.parametrize("problem", [PROBLEM, "n=64"])
def test_the_command_prints_what_the_function_answers(problem: str) -> None:
    explanation = gristmill.explain("rms_norm", problem, "sm_121")
    printed = CliRunner().invoke(command, ["rms_norm", "--problem", problem, "--target", "sm_121"]).output
    for part in explanation.parts():
        lines = (
            [part.title, *("  ".join(row).split() for row in part.rows)]
            if isinstance(part, Table)
            else [part]
        )
        for line in lines:
            words = line if isinstance(line, list) else line.split()
            assert any(words == row.split() for row in printed.splitlines()), words
    data = (
        CliRunner().invoke(command, ["rms_norm", "--problem", problem, "--target", "sm_121", "--json"]).output
    )
    assert json.loads(data) == explanation.as_dict()


@pytest.mark.parametrize("op", ["linear", "moe"])
def test_given_codes_are_explained_where_a_kernel_would_dequantize(op: str) -> None:
    """The weights that would be faster there are asked about without codes."""
    sizes = "n=66,k=96" if op == "linear" else "e=4,top_k=2,h=96,i=64"
    answer = gristmill.explain(op, f"m=1,{sizes},x=fp32,w=int8_ch.int8_token,codes=true", target="sm_80")
    assert "dequantizes the whole weight in each call; faster: quant='fp32'" in answer.slow


def test_tables_are_aligned() -> None:
    table = Table("t", ("name", "µs"), (("a", "1"), ("long", "100")), right=("µs",))
    assert str(table) == "t\nname   µs\na       1\nlong  100"


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        (("rms_nrom", PROBLEM), UnknownError, "did you mean rms_norm"),
        (("rms_norm", "m=4,colour=red"), AxisError, "no axis colour"),
        (("rms_norm", {"m": 4}), AxisError, "missing n"),
        (("rms_norm", 4), TypeError, "problem is text, a Problem or a dict of axis values, got int"),
        ((4, PROBLEM), TypeError, "op is the name of an operation or an Op, got int"),
        (("rms_norm", PROBLEM, "sm_3"), ValueError, "sm_3"),
        (
            ("linear", default_registry().op("rms_norm").problem(PROBLEM)),
            AxisError,
            "got a problem of rms_norm",
        ),
    ],
    ids=str,
)
def test_mistakes_are_named(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gristmill.explain(*arguments)
