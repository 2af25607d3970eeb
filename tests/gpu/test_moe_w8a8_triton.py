"""Experts in FP8 in Triton on a GPU that multiplies e4m3: every configuration of the space, with few rows of an expert and many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.verify import verify
from gristmill.kernel_registry import Kernel, default_registry
from gristmill.kernel_registry.policy import Policy

REGISTRY = default_registry()
GROUPED = REGISTRY.kernel("grouped_linear", "grouped_linear_w8a8_triton")
MOE = REGISTRY.kernel("moe", "moe_w8a8_triton")
TARGET = device_target("cuda", Policy()) if torch.cuda.is_available() else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        TARGET is None or bool(MOE.requires.check_hardware(TARGET)), reason="needs a GPU that multiplies e4m3"
    ),
]


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (GROUPED, "m=70,e=8,n=520,k=1100,epilogue=bias+silu_mul"),
        (GROUPED, "m=200,e=8,n=768,k=2048"),
        (GROUPED, "m=700,e=8,n=768,k=2048,x=fp16,gather=4,epilogue=silu_mul"),
        (GROUPED, "m=3000,e=6,n=640,k=1536,epilogue=bias"),
        (MOE, "m=5,top_k=8,e=64,h=2048,i=768"),
        (MOE, "m=300,top_k=4,e=16,h=1040,i=400,x=fp16,epilogue=w13_bias+w2_bias+clamp"),
        (MOE, "m=900,top_k=2,e=4,h=1024,i=512,codes=true"),
    ],
)
@pytest.mark.parametrize("scheme", ["fp8_block.fp8_g128", "fp8_ch.fp8_token"])
def test_every_configuration(kernel: Kernel, text: str, scheme: str) -> None:
    op: Any = REGISTRY.op(kernel.op)
    problem = op.problem(f"{text},w={scheme}")
    assert kernel.space is not None and TARGET is not None
    for config in kernel.space(problem, TARGET):
        outcome = verify(op, kernel, config, problem, "cuda")
        assert outcome.ok, (config, outcome.reason)
