"""DeepGEMM as vLLM has it: FP8 weights in blocks of 128 x 128; x is quantized by vLLM's kernel unless it is given as codes."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries._fp8 import BLOCKS, by_column, pack

ALIGNED_ROWS = 4
"""Columns of scales are copied by TMA, in multiples of 16 bytes."""


def accepts(problem: Problem) -> str | None:
    return None if problem.text("w") == BLOCKS else f"called for {BLOCKS}"


def bind(problem: Problem, arguments: Arguments) -> Run:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import fp8_gemm_nt

    x, weight, given, given_scales = *arguments[:2], *arguments[7:9]
    out = torch.full((x.shape[0], problem.integer("n")), float("nan"), dtype=x.dtype, device=x.device)
    codes = None if given is None else (given, by_column(given_scales, ALIGNED_ROWS))

    def run() -> torch.Tensor:
        quantized = codes or per_token_group_quant_fp8(
            x, 128, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
        )
        fp8_gemm_nt(quantized, tuple(weight), out, is_deep_gemm_e8m0_used=False)
        return out

    return run


PEER = Peer(
    name="deepgemm",
    package="vllm",
    modules=("vllm.utils.deep_gemm",),
    adapters=(Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),),
)
