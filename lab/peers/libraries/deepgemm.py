"""DeepGEMM as vLLM has it: FP8 weights in blocks of 128 x 128; x is quantized by vLLM's kernel unless it is given as codes. Experts in bf16."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries import grouped_mm
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


TILE_ROWS = 128
"""Rows of a tile, of which each has one expert."""


def bind_experts(problem: Problem, arguments: Arguments) -> Run:
    """Rows of experts begin at tiles, in copies that are made here; which expert a row has is told row by row."""
    try:
        from vllm.third_party import deep_gemm
    except ImportError:
        import deep_gemm
    x, weight, offsets = arguments[:3]
    counts = offsets.diff().long()
    high = (counts + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    begins = (high.cumsum(0) - high).repeat_interleave(counts)
    own = torch.arange(len(begins), device=x.device) - offsets[:-1].long().repeat_interleave(counts)
    places = begins + own
    rows = torch.zeros(int(high.sum()), x.shape[1], dtype=x.dtype, device=x.device)
    rows[places] = x[: len(places)]
    of_rows = torch.arange(len(counts), dtype=torch.int32, device=x.device).repeat_interleave(high)
    out = torch.full((len(rows), weight.shape[1]), float("nan"), dtype=x.dtype, device=x.device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, weight, out, of_rows)
        return out, places

    return run


def in_order(arguments: Arguments, result: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """The rows of x out of tiles."""
    out, places = result
    return [out[places]]


PEER = Peer(
    name="deepgemm",
    package="vllm",
    modules=("vllm.utils.deep_gemm",),
    adapters=(
        Adapter(op="linear", accepts=accepts, pack=pack, bind=bind),
        Adapter(
            op="grouped_linear",
            accepts=grouped_mm.accepts,
            pack=grouped_mm.pack,
            bind=bind_experts,
            outputs=in_order,
        ),
    ),
)
