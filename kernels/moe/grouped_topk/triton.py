"""Grouped top-k in Triton: one program per token; its scores as [groups, experts of a group] in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import next_power_of_2
from gristmill.kernel_registry.target import Target
from gristmill.kernels.aot import AotCase
from gristmill.kernels.common import row_stride
from gristmill.kernels.dependent_launch import begin, overlap_on, overlapped
from gristmill.kernels.lazy_triton import jit, tl

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedTopkCall


def config(problem: Problem, target: Target) -> Config:
    """One warp for each 256 experts."""
    return {"warps": min(8, max(1, problem.integer("e") // 256))}


@jit
def ordered_key(values, index):
    """Distinct positive int64 keys in the order of float32 values, the lower index first among equals; NaN is -inf."""
    values = tl.where(values != values, float("-inf"), values)
    values = tl.where(values == 0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits).to(tl.int64) + 2147483649
    return order * 4096 + (4095 - index)


@jit
def grouped_topk_kernel(
    logits,
    bias,
    weights,
    ids,
    stride,
    scale,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    expert = g[:, None] * SIZE + s[None, :]
    inside = (g[:, None] < GROUPS) & (s[None, :] < SIZE)
    x = tl.load(logits + row * stride + expert, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-x))
    else:
        nan = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
        top = tl.max(tl.max(x, 1), 0)
        power = tl.exp(x - top)
        scores = power / tl.sum(tl.sum(power, 1), 0)
        scores = tl.where(nan > 0, float("nan"), scores)
    choice = scores
    if BIAS:
        choice = scores + tl.load(bias + expert, mask=inside, other=0.0)
    keys = tl.where(inside, ordered_key(choice, expert), 0)
    if TOPK_GROUPS < GROUPS:
        clean = tl.where(inside & (choice == choice), choice, float("-inf"))
        best = tl.max(clean, 1)
        if BIAS and SIZE > 1:
            # Mask the first maximum; the maximum of the others is the second.
            at = tl.min(tl.where(clean == best[:, None], s[None, :], BLOCK_S), 1)
            best = best + tl.max(tl.where(s[None, :] == at[:, None], float("-inf"), clean), 1)
        group_keys = tl.where(g < GROUPS, ordered_key(best, g), 0)
        is_kept = tl.zeros([BLOCK_G], dtype=tl.int32)
        for _ in tl.static_range(TOPK_GROUPS):
            first = group_keys == tl.max(group_keys, 0)
            is_kept = tl.where(first, 1, is_kept)
            group_keys = tl.where(first, 0, group_keys)
        keys = tl.where(is_kept[:, None] > 0, keys, 0)
    place = tl.arange(0, BLOCK_K)
    out_ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    out_weights = tl.zeros([BLOCK_K], dtype=tl.float32)
    for k in range(TOP_K):
        is_best = keys == tl.max(tl.max(keys, 1), 0)
        chosen = tl.sum(tl.sum(tl.where(is_best, expert, 0), 1), 0)
        score = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), 1), 0)
        out_ids = tl.where(place == k, chosen, out_ids)
        out_weights = tl.where(place == k, score, out_weights)
        keys = tl.where(is_best, 0, keys)
    if RENORMALIZE:
        out_weights = out_weights / (tl.sum(out_weights, 0) + 1e-20)
    tl.store(weights + row * TOP_K + place, out_weights * scale, mask=place < TOP_K)
    tl.store(ids + row * TOP_K + place, out_ids, mask=place < TOP_K)


def launch(config: Config, call: GroupedTopkCall) -> None:
    """logits [..., E] -> weights, ids [..., top_k]."""
    experts = call.logits.shape[-1]
    rows = call.logits.numel() // experts
    if rows:
        # If all groups are kept, they have no effect.
        groups = call.n_group if call.topk_group < call.n_group else 1
        grouped_topk_kernel[(rows,)](
            call.logits,
            call.logits if call.bias is None else call.bias,
            call.weights,
            call.ids,
            row_stride(call.logits),
            call.scale,
            EXPERTS=experts,
            SIZE=experts // groups,
            TOP_K=call.top_k,
            GROUPS=groups,
            TOPK_GROUPS=min(call.topk_group, groups),
            SIGMOID=call.scoring == "sigmoid",
            BIAS=call.bias is not None,
            RENORMALIZE=call.renormalize,
            BLOCK_G=next_power_of_2(groups),
            BLOCK_S=next_power_of_2(experts // groups),
            BLOCK_K=next_power_of_2(call.top_k),
            num_warps=config["warps"],
            **overlapped(call.logits),
        )


def aot(target: Target) -> list[AotCase]:
    """What the compile matrix builds: DeepSeek-V3's router, and a softmax one."""
    types = {
        "logits": "*bf16",
        "bias": "*fp32",
        "weights": "*fp32",
        "ids": "*i32",
        "stride": "i32",
        "scale": "fp32",
    }
    deepseek = {
        "EXPERTS": 256,
        "SIZE": 32,
        "TOP_K": 8,
        "GROUPS": 8,
        "TOPK_GROUPS": 4,
        "SIGMOID": True,
        "BIAS": True,
        "RENORMALIZE": True,
        "BLOCK_G": 8,
        "BLOCK_S": 32,
        "BLOCK_K": 8,
    }
    softmax = {
        "EXPERTS": 128,
        "SIZE": 128,
        "TOP_K": 8,
        "GROUPS": 1,
        "TOPK_GROUPS": 1,
        "SIGMOID": False,
        "BIAS": False,
        "RENORMALIZE": True,
        "BLOCK_G": 1,
        "BLOCK_S": 128,
        "BLOCK_K": 8,
    }
    return [
        AotCase(
            "deepseek",
            grouped_topk_kernel,
            types | {"logits": "*fp32"},
            deepseek | overlap_on(target),
            {"num_warps": 1},
        ),
        AotCase("softmax", grouped_topk_kernel, types, softmax | overlap_on(target), {"num_warps": 1}),
    ]


KERNEL = Kernel(
    op="grouped_topk",
    name="grouped_topk_triton",
    provider="gristmill",
    language="triton",
    target=f"{__name__}:launch",
    aot=f"{__name__}:aot",
    requires=Requirement(code="triton"),
    summary="one program per token, experts in registers, repeated maximum of integer keys",
    config=config,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=50,
)
