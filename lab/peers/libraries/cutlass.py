"""vLLM's CUTLASS products of FP8 weights and activations: scales per block or per channel; x is quantized unless it is given as codes."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries._fp8 import BLOCKS, CHANNELS, by_column, pack


def accepts(problem: Problem) -> str | None:
    return None if problem.text("w") in (BLOCKS, CHANNELS) else f"called for {BLOCKS} and {CHANNELS}"


def bind(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x, (codes, scales), given, given_scales = *arguments[:2], *arguments[7:9]
    blocks = problem.text("w") == BLOCKS
    w, w_scales = codes.t(), scales.t() if blocks else scales.view(1, problem.integer("n"))
    if given is not None:
        x_scales = by_column(given_scales) if blocks else given_scales
        return lambda: ops.cutlass_scaled_mm(given, w, x_scales, w_scales, x.dtype)

    def run() -> torch.Tensor:
        if blocks:
            q, s = per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=False)
        else:
            q, s = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        product: torch.Tensor = ops.cutlass_scaled_mm(q, w, s, w_scales, x.dtype)
        return product

    return run


PEER = Peer(
    name="cutlass",
    package="vllm",
    modules=("vllm._custom_ops",),
    adapters=(Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),),
)
