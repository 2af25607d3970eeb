"""A query that is not a number gives an output and a log-sum-exp that are none, in every kernel of attention on this GPU, also where a context is
cut into parts: what damaged weights or activations do must show in the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from tests.conftest import HAS_GPU

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")]
DEVICE = "cuda:0"
REGISTRY = default_registry()
HEADS = "heads=8,kv_heads=2"
PROBLEMS = {
    "paged_attention": (
        f"q_tokens=40,seqs=3,max_q=37,max_ctx=65,total_ctx=100,{HEADS},lse=true",
        f"q_tokens=3,seqs=3,max_q=1,max_ctx=9000,total_ctx=12000,{HEADS},lse=true",
        f"q_tokens=3,seqs=3,max_q=1,max_ctx=9000,total_ctx=12000,{HEADS},kv=fp8,kv_scale=head,lse=true",
        f"q_tokens=300,seqs=2,max_q=290,max_ctx=3000,total_ctx=3500,{HEADS},softcap=true,lse=true",
    ),
    "varlen_attention": (
        "q_tokens=90,seqs=2,max_q=80,max_ctx=300,total_ctx=400,heads=8,kv_heads=8,qk_dim=128,v_dim=128,lse=true",
    ),
    "mla_attention": (
        "q_tokens=3,seqs=3,max_q=1,max_ctx=9000,total_ctx=12000,heads=16,lse=true",
        "q_tokens=40,seqs=3,max_q=37,max_ctx=65,total_ctx=100,heads=16,lse=true",
    ),
}
ROW, HEAD = 2, 1


def cases() -> list[Any]:
    if not HAS_GPU:
        return []
    target = device_target(DEVICE, Policy())
    build, found = confirmed_build(REGISTRY, target, Policy()), []
    for op, problems in PROBLEMS.items():
        for kernel in REGISTRY.kernels_of(op):
            found += [
                pytest.param(kernel, problem, id=f"{kernel.name}-{number}")
                for number, problem in enumerate(problems)
                if kernel.provider == "gristmill"
                and not kernel.why_not(REGISTRY.op(op).problem(problem), target, build)
            ]
    return found


@pytest.mark.parametrize("kernel,problem", cases())
def test_it_shows(kernel: Kernel, problem: str) -> None:
    spec = REGISTRY.op(kernel.op)
    asked = spec.problem(problem)
    config = kernel.config(asked, device_target(DEVICE, Policy()))
    need = kernel.workspace(asked, config)

    def outputs(arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(spec.Call.names, arguments, strict=False))
        q = named["q"]
        named["lse"] = torch.full(q.shape[:2], 7.0, device=DEVICE)
        if "workspace" in spec.Call.names:
            make = torch.zeros if need.zeroed else torch.empty
            named["workspace"] = make(max(need.bytes, 1), dtype=torch.uint8, device=DEVICE)
        reference = spec.reference(*arguments)
        out = torch.full_like(reference, math.pi)
        load(kernel)(config, spec.Call(**named, **{spec.outputs[0]: out}))
        torch.cuda.synchronize()
        return out, named["lse"]

    arguments = spec.inputs(asked, 3, DEVICE)
    before = outputs(arguments)
    arguments[0] = arguments[0].clone()
    arguments[0][ROW, HEAD] = math.nan
    for computed, without in zip(outputs(arguments), before, strict=True):
        assert bool(computed[ROW, HEAD].isnan().all()), "hidden"
        computed[ROW, HEAD] = without[ROW, HEAD]
        torch.testing.assert_close(computed, without)
