"""torch's product of FP8 codes by cuBLAS, `torch._scaled_mm`, with scales per block; x is quantized by vLLM's kernel unless it is given as codes."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries._fp8 import BLOCKS, by_column, pack

PITCH = 4
"""Scales of a row of blocks begin at multiples of so many."""


def accepts(problem: Problem) -> str | None:
    return None if problem.text("w") == BLOCKS else f"called for {BLOCKS}"


def bind(problem: Problem, arguments: Arguments) -> Run:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x, (codes, scales), given, given_scales = *arguments[:2], *arguments[7:9]
    w, w_scales = codes.t(), by_column(scales.t(), PITCH)
    held = None if given is None else (given, by_column(given_scales))

    def run() -> torch.Tensor:
        q, s = held or per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=False)
        return torch._scaled_mm(q, w, scale_a=s, scale_b=w_scales, out_dtype=x.dtype)

    return run


PEER = Peer(
    name="scaled_mm",
    package="torch",
    modules=("vllm.model_executor.layers.quantization.utils.fp8_utils",),
    adapters=(Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),),
)
