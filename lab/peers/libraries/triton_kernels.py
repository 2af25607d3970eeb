"""triton_kernels as vLLM calls it for gpt-oss on Hopper: experts in mxfp4, with the routing of ids in each call."""

from __future__ import annotations

import importlib

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run
from lab.peers.libraries.marlin import accepts_mxfp4

EXPERTS = "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe"


def pack(problem: Problem, arguments: Arguments) -> Arguments:
    """Gate and up are interleaved."""
    importlib.import_module(EXPERTS)  # makes the copy of triton_kernels in vLLM's wheel importable
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    w13, w2, b13, b2 = arguments[3], arguments[4], arguments[7], arguments[8]
    i = problem.integer("i")
    order = torch.stack([torch.arange(i), torch.arange(i) + i], 1).flatten().to(b13.device)
    codes13, flex13, scales13 = _swizzle_mxfp4(
        w13.codes[:, order].contiguous(), w13.scales[:, order].contiguous()
    )
    codes2, flex2, scales2 = _swizzle_mxfp4(w2.codes.clone(), w2.scales.clone())
    config = mxfp4_w4a16_moe_quant_config(
        PrecisionConfig(weight_scale=scales13, flex_ctx=FlexCtx(rhs_data=flex13)),
        PrecisionConfig(weight_scale=scales2, flex_ctx=FlexCtx(rhs_data=flex2)),
        b13[:, order].float().contiguous(),
        b2.float(),
    )
    return [*arguments[:3], codes13, codes2, config, *arguments[6:7], None, None, *arguments[9:]]


def bind(problem: Problem, arguments: Arguments) -> Run:
    experts = importlib.import_module(EXPERTS)
    x, weights, ids, w13, w2, config = arguments[:6]
    e, top_k = problem.integers("e", "top_k")
    places = ids.long()

    def run() -> torch.Tensor:
        routing = experts.make_routing_data(places, weights, e)
        out: torch.Tensor = experts.triton_kernel_fused_experts(
            torch.empty_like(x), x, w13, w2, *routing, topk=top_k, quant_config=config
        )
        return out

    return run


PEER = Peer(
    name="triton_kernels",
    package="vllm",
    modules=(EXPERTS,),
    adapters=(Adapter(op="moe", accepts=accepts_mxfp4, pack=pack, bind=bind),),
)
