"""Absorbed latent attention by FlashInfer (flashinfer-python), where it is installed."""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement


def accepts(problem: Problem) -> str | None:
    """Half precision, DeepSeek's widths."""
    if problem["x"] == "fp32":
        return "FlashInfer takes fp16 and bf16"
    widths = problem["latent_dim"], problem["rope_dim"]
    return (
        None if widths == (512, 64) else f"latent {widths[0]} and rope {widths[1]}: FlashInfer has 512 and 64"
    )


KERNEL = Kernel(
    op="mla_attention",
    name="mla_attention_flashinfer",
    provider="flashinfer",
    language="cuda",
    target="gristmill.kernels.attention._flashinfer:launch_mla",
    requires=Requirement.any(
        {"cp_async"},  # its MLA kernels start at sm_80
        vendors=("nvidia",),
        packages=(("flashinfer-python", "0.6"),),
        offers=("flashinfer.mla:BatchMLAPagedAttentionWrapper.plan",),
    ),
    summary="FlashInfer's paged MLA wrapper; planning waits for the device once per step",
    accepts=accepts,
    examples=("q_tokens=11,seqs=3,max_q=9,max_ctx=40,total_ctx=77,heads=16,lse=true",),
    priority=60,
    auto=False,
    capturable=False,  # `plan` reads lengths on the host
)
