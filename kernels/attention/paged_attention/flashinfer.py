"""Paged attention by FlashInfer (flashinfer-python), where it is installed."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement


def accepts(problem: Problem) -> str | None:
    """Half precision, heads of 64, 128 or 256, no sinks, no soft cap."""
    if problem["x"] == "fp32":
        return "FlashInfer takes fp16 and bf16"
    if problem["kv"] != "x":
        return f"called with caches of q's dtype only, not {problem['kv']}"
    if problem["head_dim"] not in (64, 128, 256):
        return f"head_dim {problem['head_dim']}: FlashInfer has 64, 128 and 256"
    if problem["softcap"]:
        return "called without a soft cap of the scores"
    return "FlashInfer's paged wrappers take no sinks on every architecture" if problem["sinks"] else None


KERNEL = Kernel(
    op="paged_attention",
    name="paged_attention_flashinfer",
    provider="flashinfer",
    language="cuda",
    target="gristmill.kernels.attention._flashinfer:launch_paged",
    requires=Requirement.any(
        {"ldmatrix"},  # FlashInfer starts at sm_75
        vendors=("nvidia",),
        packages=(("flashinfer-python", "0.6"),),
        offers=(
            "flashinfer:BatchPrefillWithPagedKVCacheWrapper.plan",
            "flashinfer:BatchDecodeWithPagedKVCacheWrapper.plan",
        ),
    ),
    summary="FlashInfer's paged prefill and decode wrappers; planning waits for the device once per step",
    accepts=accepts,
    examples=(
        "q_tokens=29,seqs=4,max_q=17,max_ctx=53,total_ctx=120,heads=8,kv_heads=2,head_dim=128,lse=true",
        "q_tokens=7,seqs=7,max_q=1,max_ctx=90,total_ctx=300,heads=8,kv_heads=8,head_dim=64,window=33",
    ),
    priority=60,
    auto=False,
    capturable=False,  # `plan` reads lengths on the host
)
