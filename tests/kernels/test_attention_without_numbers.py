"""A query that is not a number gives an output and a log-sum-exp that are none, in the reference and in every kernel that runs on a CPU: what damaged
weights or activations do must show in the logits. A row without keys gives 0 and -inf instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.load import load
from tests.conftest import HAS_GPU
from tests.native.levels import runnable_levels

REGISTRY = default_registry()
PROBLEMS = {
    "paged_attention": (
        "q_tokens=9,seqs=3,max_q=7,max_ctx=40,total_ctx=60,heads=4,kv_heads=2,head_dim=64,x=fp32,lse=true",
        "q_tokens=2,seqs=2,max_q=1,max_ctx=1500,total_ctx=2500,heads=4,kv_heads=2,head_dim=64,x=fp32,lse=true",
    ),
    "varlen_attention": (
        "q_tokens=9,seqs=3,max_q=7,max_ctx=40,total_ctx=60,heads=4,kv_heads=2,qk_dim=64,v_dim=64,x=fp32,lse=true",
    ),
    "mla_attention": (
        "q_tokens=11,seqs=3,max_q=9,max_ctx=40,total_ctx=77,heads=4,latent_dim=96,rope_dim=32,block_size=8,x=fp32,lse=true",
        "q_tokens=2,seqs=2,max_q=1,max_ctx=900,total_ctx=1100,heads=4,latent_dim=64,rope_dim=16,block_size=8,x=fp32,lse=true",
    ),
}
PLACES = {"torch": Target.parse("sm_80"), "triton": Target.parse("sm_80"), "cpp": Target.parse("cpu:base")}
"""Languages whose kernels run here, and the device whose configuration they take."""
LEVEL = [level for level in runnable_levels() if level in ("base", "avx2", "avx512", "neon")][-1]
ROW, HEAD = 1, 2


def cases() -> list[Any]:
    found = []
    for op, problems in PROBLEMS.items():
        for kernel in REGISTRY.kernels_of(op):
            if kernel.provider != "gristmill" or kernel.language not in PLACES:
                continue
            if kernel.language == "triton" and HAS_GPU:  # compiled there: tests/gpu
                continue
            found += [
                pytest.param(kernel, problem, id=f"{kernel.name}-{number}")
                for number, problem in enumerate(problems)
                if kernel.accepts(REGISTRY.op(op).problem(problem)) is None
            ]
    return found


def outputs(kernel: Kernel | None, op: str, problem: str, arguments: list[Any]) -> tuple[torch.Tensor, ...]:
    """out and lse of a kernel, or of the reference."""
    spec = REGISTRY.op(op)
    lse = torch.full(arguments[0].shape[:2], 7.0)
    given = [lse if name == "lse" else value for name, value in zip(spec.Call.names, arguments, strict=False)]
    if kernel is None:
        return spec.reference(*given), lse
    out = torch.full_like(spec.reference(*given), math.pi)
    lse.fill_(7.0)
    config = dict(kernel.config(spec.problem(problem), PLACES[kernel.language]))
    if kernel.language == "cpp":
        config["level"] = LEVEL
    load(kernel)(config, spec.Call(*given, *([None] * (len(spec.Call.names) - len(given) - 1)), out))
    return out, lse


@pytest.mark.parametrize("kernel,problem", cases())
def test_it_shows(kernel: Kernel, problem: str) -> None:
    op = kernel.op
    spec = REGISTRY.op(op)
    arguments = spec.inputs(spec.problem(problem), 3, "cpu")
    before = outputs(kernel, op, problem, arguments)
    arguments[0] = arguments[0].clone()
    arguments[0][ROW, HEAD] = math.nan
    for computed, without in zip(outputs(kernel, op, problem, arguments), before, strict=True):
        assert bool(computed[ROW, HEAD].isnan().all()), "hidden"
        computed[ROW, HEAD] = without[ROW, HEAD]
        torch.testing.assert_close(computed, without)


@pytest.mark.parametrize("op", PROBLEMS)
def test_the_reference_shows_it(op: str) -> None:
    spec, problem = REGISTRY.op(op), PROBLEMS[op][0]
    arguments = spec.inputs(spec.problem(problem), 3, "cpu")
    arguments[0] = arguments[0].clone()
    arguments[0][ROW, HEAD] = math.nan
    out, lse = outputs(None, op, problem, arguments)
    assert bool(out[ROW, HEAD].isnan().all()) and bool(lse[ROW, HEAD].isnan())
    assert int(out.isnan().sum()) == out.shape[2] and int(lse.isnan().sum()) == 1
