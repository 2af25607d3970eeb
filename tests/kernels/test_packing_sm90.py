"""Layers of public models on a Hopper that is not here: the library answers verifications, and weights are packed for kernels of every size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from gristmill.autotune.packing import plan_layouts
from gristmill.autotune.resolve import Resolver
from gristmill.autotune.worker import Worker
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import bucket_sizes
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from tests.kernels import native_answers

MOE = default_registry().op("moe")
BUILD = Build.of({"torch": "2.13.0", "triton": "3.9.0"}, cuda_archs=("sm_90a",), triton_backends=("cuda",))


class Library(Worker):
    """Takes every kernel for right whose launch the library would not refuse."""

    def verify(self, op: Op, kernel: Kernel, config: Config, problem: Problem, device: str) -> dict[str, Any]:
        answer = native_answers.answer(kernel, problem, config)
        ok = answer is None or answer > 0
        return {"ok": ok, "error": None, "reason": "" if ok else f"code {answer}", "judged": True}


@native_answers.needs_library
@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4"])
@pytest.mark.parametrize(
    "layer",
    [
        "top_k=2,e=8,h=4096,i=14336",  # Mixtral 8x7B
        "top_k=2,e=8,h=4096,i=3584",  # on four ranks
        "top_k=2,e=16,h=4096,i=6400",  # Phi-3.5-MoE
        "top_k=1,e=128,h=5120,i=8192",  # Llama 4 Maverick
        "top_k=8,e=128,h=2048,i=768",  # Qwen3-30B-A3B
    ],
)
def test_experts_are_packed_in_tiles_that_serve_every_size(layer: str, scheme: str, tmp_path: Path) -> None:
    policy, target = Policy(cache=str(tmp_path)), Target.parse("h200")
    resolver = Resolver("cuda:0", policy, build=BUILD, worker=Library(), target=target)
    static = MOE.static(MOE.problem(f"{layer},w={scheme}"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layouts = plan_layouts(resolver, static)
        for size in bucket_sizes():
            best = resolver.select(MOE, MOE.at_bucket(static, size), layouts).require()
            assert (best.kernel.name, best.verdict) == ("moe_sm90", "selected")
    assert layouts == {"w4_frag16_v1" if scheme == "int4_g128" else "f4_frag16_v1"}
