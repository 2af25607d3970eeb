"""A product of FP8 codes with two-level sums in CuTe DSL for Hopper (`_cutedsl_fp8.py`), which was gristmill's and never the fastest; x is quantized
by vLLM's kernel unless it is given as codes."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries._fp8 import BLOCKS, by_column, pack

TILE: dict[str, int] = {"bm": 128, "bn": 128, "slots": 6}
"""Rows of x and of W of a tile: the registers of two warpgroups hold the sums of a slot and of all; and slots."""


def accepts(problem: Problem) -> str | None:
    """A tile of W is one block of rows."""
    if problem.text("w") != BLOCKS:
        return f"called for {BLOCKS}"
    return None if problem.integer("n") % 128 == 0 else "takes whole blocks of rows of W"


def bind(problem: Problem, arguments: Arguments) -> Run:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    from lab.peers.libraries._cutedsl_fp8 import multiply

    x, (codes, scales), given, given_scales = *arguments[:2], *arguments[7:9]
    out = torch.full((x.shape[0], problem.integer("n")), float("nan"), dtype=x.dtype, device=x.device)
    held = None if given is None else (given, by_column(given_scales))

    def run() -> torch.Tensor:
        q, s = held or per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=False)
        multiply(q, codes, s, scales, out)
        return out

    return run


PEER = Peer(
    name="cutedsl",
    package="nvidia-cutlass-dsl",
    modules=("cutlass", "vllm.model_executor.layers.quantization.utils.fp8_utils"),
    adapters=(Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),),
)
