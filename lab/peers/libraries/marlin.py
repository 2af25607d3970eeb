"""vLLM's Marlin: products with int4 weights, and experts in int4 and mxfp4, with vLLM's sum over experts."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from gristmill.autotune.device import device_target
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant import QuantTensor
from lab.marlin import marlin_call, marlin_packed, marlin_refusal
from lab.peers.adapter import Adapter, Arguments, Peer, Run

GPT_OSS = {"w13_bias", "w2_bias", "clamp"}


def accepts_linear(problem: Problem) -> str | None:
    return marlin_refusal(problem.text("w"))


def pack_linear(problem: Problem, arguments: Arguments) -> Arguments:
    x, weight, *rest = arguments
    return [x, marlin_packed(weight, x.dtype), *rest]


def bind_linear(problem: Problem, arguments: Arguments) -> Run:
    x, packed, n = arguments[0], arguments[1], problem.integer("n")
    out = torch.full((x.shape[0], n), float("nan"), dtype=x.dtype, device=x.device)
    processors = device_target(str(x.device), Policy()).multiprocessors or 132
    product = marlin_call([packed], x, out, processors)

    def run() -> torch.Tensor:
        product(0)
        return out

    return run


def accepts_int4(problem: Problem) -> str | None:
    plain = problem.text("w") == "int4_g128" and not problem.flags("epilogue")
    return None if plain else "called for int4_g128 without biases"


def _experts(weight: QuantTensor, dtype: torch.dtype) -> list[torch.Tensor]:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales

    assert weight.scales is not None
    words = weight.codes.view(torch.int32).transpose(1, 2).contiguous()
    scales = weight.scales.to(dtype).transpose(1, 2).contiguous()
    perm = torch.empty(weight.shape[0], 0, dtype=torch.int32, device=words.device)
    codes = ops.gptq_marlin_moe_repack(words, perm, weight.k, weight.n, 4)
    return [codes, marlin_moe_permute_scales(scales, weight.k, weight.n, 128)]


def pack_int4(problem: Problem, arguments: Arguments) -> Arguments:
    dtype = arguments[0].dtype
    return [_experts(a, dtype) if isinstance(a, QuantTensor) else a for a in arguments]


def bind_int4(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    x, weights, ids, (w13, s13), (w2, s2) = arguments[:5]
    out, kind = torch.full_like(x, float("nan")), scalar_types.uint4b8.id

    def run() -> torch.Tensor:
        fused_marlin_moe(x, w13, w2, None, None, s13, s2, weights, ids, kind, moe_sum=ops.moe_sum, output=out)
        return out

    return run


def accepts_mxfp4(problem: Problem) -> str | None:
    as_gpt_oss = problem.text("w") == "mxfp4" and {*problem.flags("epilogue")} == GPT_OSS
    return None if as_gpt_oss else "called for mxfp4 with biases and a clamp, as in gpt-oss"


def pack_mxfp4(problem: Problem, arguments: Arguments) -> Arguments:
    """H is rounded up to a multiple of 256 and I to one of 128, as vLLM does."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        prepare_moe_mxfp4_layer_for_marlin,
    )

    x, w13, w2, b13, b2 = arguments[0], arguments[3], arguments[4], arguments[7], arguments[8]
    h, i, e = problem.integers("h", "i", "e")
    wide_h, wide_i = cdiv(h, 256) * 256, cdiv(i, 128) * 128

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(e, *shape, dtype=dtype, device=x.device)

    codes13, scales13 = zeros(2 * wide_i, wide_h // 2), zeros(2 * wide_i, wide_h // 32)
    codes2, scales2 = zeros(wide_h, wide_i // 2), zeros(wide_h, wide_i // 32)
    bias13, bias2 = zeros(2 * wide_i, dtype=x.dtype), zeros(wide_h, dtype=x.dtype)
    for half in (0, 1):
        rows, own = slice(half * wide_i, half * wide_i + i), slice(half * i, (half + 1) * i)
        codes13[:, rows, : h // 2], scales13[:, rows, : h // 32] = w13.codes[:, own], w13.scales[:, own]
        bias13[:, rows] = b13[:, own]
    codes2[:, :h, : i // 2], scales2[:, :h, : i // 32], bias2[:, :h] = w2.codes, w2.scales, b2
    prepared = prepare_moe_mxfp4_layer_for_marlin(
        SimpleNamespace(params_dtype=x.dtype), codes13, codes2, scales13, scales2, bias13, bias2
    )
    return [*arguments[:3], [*prepared], None, *arguments[5:7], None, None, *arguments[9:]]


def bind_mxfp4(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    x, weights, ids, (q13, q2, p13, p2, m13, m2) = arguments[:4]
    alpha, limit = arguments[10:12]
    h, wide_h = x.shape[1], cdiv(x.shape[1], 256) * 256
    settings: dict[str, Any] = {
        "activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE,
        "clamp_limit": limit,
        "gemm1_alpha": alpha,
        "gemm1_beta": 1.0,
    }
    kind, experts = scalar_types.float4_e2m1f.id, partial(fused_marlin_moe, moe_sum=ops.moe_sum, **settings)

    def run() -> torch.Tensor:
        y = torch.nn.functional.pad(x, (0, wide_h - h)) if wide_h > h else x
        out = torch.empty_like(y)
        experts(y, q13, q2, m13, m2, p13, p2, weights, ids, kind, output=out)
        return out[:, :h]

    return run


PEER = Peer(
    name="marlin",
    package="vllm",
    modules=("vllm._custom_ops",),
    adapters=(
        Adapter(op="linear", accepts=accepts_linear, pack=pack_linear, bind=bind_linear),
        Adapter(op="moe", accepts=accepts_int4, pack=pack_int4, bind=bind_int4),
        Adapter(op="moe", variant="mxfp4", accepts=accepts_mxfp4, pack=pack_mxfp4, bind=bind_mxfp4),
    ),
)
