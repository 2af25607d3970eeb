"""vLLM's own kernels: experts in Triton, routing, sampling and norms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gristmill.kernel_registry.problem import Problem
from lab.peers.adapter import Adapter, Arguments, Peer, Run, in_place
from lab.peers.libraries._fp8 import BLOCKS


def accepts_experts(problem: Problem) -> str | None:
    plain = problem.text("w") in ("bf16", BLOCKS) and not problem.flags("epilogue")
    return None if plain else f"called for bf16 and {BLOCKS} without biases"


def pack_experts(problem: Problem, arguments: Arguments) -> Arguments:
    """Dense weights, or [codes, codes, the configuration of their scales]."""
    w13, w2 = arguments[3:5]
    if problem.text("w") == "bf16":
        return [*arguments[:3], w13.dense(), w2.dense(), *arguments[5:]]
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    config = fp8_w8a8_moe_quant_config(
        w13.scales.float().contiguous(), w2.scales.float().contiguous(), block_shape=[128, 128]
    )
    codes = [weight.codes.view(torch.float8_e4m3fn) for weight in (w13, w2)]
    return [*arguments[:3], *codes, config, *arguments[6:]]


def bind_experts(problem: Problem, arguments: Arguments) -> Run:
    """Ids of other ranks are those of an expert that a map places on none."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    x, weights, ids, w13, w2, config = arguments[:6]
    options: dict[str, Any] = {} if problem.text("w") == "bf16" else {"quant_config": config}
    e = problem.integer("e")
    if bool((ids < 0).any()):
        places = torch.arange(e + 1, dtype=torch.int32, device=x.device)
        places[e] = -1
        ids = torch.where(ids < 0, e, ids)
        options |= {"global_num_experts": e + 1, "expert_map": places}
    return partial(fused_experts, x, w13, w2, weights, ids, **options)


def accepts_routing(problem: Problem) -> str | None:
    as_deepseek = problem["scoring"] == "sigmoid" and problem["bias"] and problem["renormalize"]
    return None if as_deepseek else "called with sigmoids and a bias, as in DeepSeek-V3"


def bind_routing(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops

    logits, top_k, bias, n_group, topk_group, _, renormalize, scale = arguments
    return partial(ops.grouped_topk, logits, n_group, topk_group, top_k, renormalize, scale, bias, 1)


def weights_and_ids(arguments: Arguments, result: Any) -> list[torch.Tensor]:
    return [result[0].float(), result[1].int()]


def bind_sample(problem: Problem, arguments: Arguments) -> Run:
    """As vLLM's sampler without a seed: it draws from torch's generator."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    logits, temperature, top_k, top_p = arguments[:4]

    def run() -> torch.Tensor:
        kept = apply_top_k_top_p_triton(logits.float() / temperature[:, None], top_k, top_p)
        probabilities = kept.softmax(-1)
        noise = torch.empty_like(probabilities).exponential_(1)
        tokens: torch.Tensor = probabilities.div(noise).argmax(-1)
        return tokens

    return run


def bind_add_norm(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops

    return partial(ops.fused_add_rms_norm, *arguments)


def bind_norm(problem: Problem, arguments: Arguments) -> Run:
    from vllm import _custom_ops as ops

    out = torch.full_like(arguments[0], float("nan"))

    def run() -> torch.Tensor:
        ops.rms_norm(out, *arguments)
        return out

    return run


PEER = Peer(
    name="vllm",
    package="vllm",
    modules=("vllm._custom_ops",),
    adapters=(
        Adapter(op="moe", accepts=accepts_experts, pack=pack_experts, bind=bind_experts),
        Adapter(op="grouped_topk", accepts=accepts_routing, bind=bind_routing, outputs=weights_and_ids),
        Adapter(op="sample", bind=bind_sample),
        Adapter(op="fused_add_rms_norm", bind=bind_add_norm, outputs=in_place),
        Adapter(op="rms_norm", bind=bind_norm),
    ),
)
