"""vLLM's Machete: products with int4 weights on Hopper."""

from __future__ import annotations

from functools import partial

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run


def accepts(problem: Problem) -> str | None:
    return None if problem.text("w") == "int4_g128" else "called for int4_g128"


def pack(problem: Problem, arguments: Arguments) -> Arguments:
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    x, weight, *rest = arguments
    words = weight.codes.view(torch.int32).t().contiguous()
    scales = weight.scales.to(x.dtype).t().contiguous()
    codes = ops.machete_prepack_B(words.t().contiguous().t(), x.dtype, scalar_types.uint4b8, x.dtype)
    return [x, [codes, scales], *rest]


def bind(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    x, (codes, scales) = arguments[:2]
    return partial(ops.machete_mm, x, codes, scalar_types.uint4b8, b_group_scales=scales, b_group_size=128)


PEER = Peer(
    name="machete",
    package="vllm",
    modules=("vllm._custom_ops",),
    adapters=(Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),),
)
