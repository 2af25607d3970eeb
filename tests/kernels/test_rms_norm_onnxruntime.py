"""ONNX Runtime's norm: its requirements, its contract, and its timing where it is installed."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from gristmill.autotune.verify import verify
from gristmill.bench.cli import cli
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.target import Target
from gristmill.kernels.norm import rms_norm, rms_norm_onnxruntime
from tests.calls import make_call
from tests.kernels.running import padded_rows

KERNEL, CPU = rms_norm_onnxruntime.KERNEL, Target.parse("cpu:avx2")


@pytest.fixture
def host() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")


def test_what_it_requires() -> None:
    assert KERNEL.requires.check_hardware(Target.parse("sm_90")) and not KERNEL.requires.check_hardware(CPU)
    assert "onnxruntime" in KERNEL.requires.check_build(CPU, Build.none())[0]
    assert "bf16" in (KERNEL.accepts(rms_norm.OP.problem("m=1,n=8,x=bf16")) or "")
    assert not KERNEL.auto


@pytest.mark.parametrize(
    "problem", ["m=7,n=257,x=fp32", "m=33,n=768,x=fp16", "m=1,n=1,x=fp32", "m=0,n=16,x=fp16"]
)
def test_it_keeps_the_contract(host: None, problem: str) -> None:
    parsed = rms_norm.OP.problem(problem)
    outcome = verify(rms_norm.OP, KERNEL, {}, parsed, "cpu")
    assert outcome.ok, outcome.reason


def test_strides_leading_dimensions_and_eps(host: None) -> None:
    x, weight = padded_rows(torch.randn(6, 33)), torch.randn(33)
    for shape in ((6, 33), (2, 3, 33)):
        rows = x if len(shape) == 2 else x.contiguous().view(shape)
        out = padded_rows(torch.zeros(6, 33)) if len(shape) == 2 else torch.empty(shape)
        for eps in (1e-6, 0.5):
            rms_norm_onnxruntime.launch({}, make_call("rms_norm", rows, weight, eps, out))
            torch.testing.assert_close(out, rms_norm.reference(rows, weight, eps), rtol=1e-5, atol=1e-5)


def test_it_is_timed_and_audited_like_any_other(host: None, policy_file) -> None:
    """The session packs no weights: content that changes in place is followed."""
    policy_file()
    result = CliRunner().invoke(
        cli,
        [
            "bench",
            "rms_norm",
            "--problem",
            "m=64,n=1024,x=fp32",
            "--kernels",
            "*_onnxruntime",
            "--target",
            "cpu",
            "--seconds",
            "0.1",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["us"] > 0 and row["error"] <= row["tolerance"] and row["reason"] == ""
