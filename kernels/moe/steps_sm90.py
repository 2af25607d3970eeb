"""Permute and combine in CUDA C++ for Hopper (`_moe_steps_sm90.cu`), and the rows of x in the order of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.args import ROWS
from gristmill.kernels.native import check, cuda_entry
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import CombineCall, PermuteCall

PERMUTE = CallEntry("gm_moe_permute_sm90", "permute")
COMBINE = CallEntry("gm_moe_combine_sm90", "combine")
MAX_EXPERTS = 1024


def permute(config: Config, call: PermuteCall) -> None:
    """ids [T, K] -> expert_offsets [experts + 1], permutation and inverse [T * K], in one launch."""
    PERMUTE.cuda(config, call, call.ids.get_device())


def gather_rows(x: Tensor, permutation: Tensor, offsets: Tensor, top_k: int, out: Tensor) -> None:
    """x [T, H] -> out [P, H]: row p is x[permutation[p] // top_k]; rows past the last expert's are not written."""
    import torch

    args = ROWS.new(x.get_device(), x.shape[1], top_k, torch.cuda.current_stream(x.device).cuda_stream)
    args.x, args.ldx, args.y = x.data_ptr(), x.stride(0), out.data_ptr()
    args.permutation, args.last = permutation.data_ptr(), offsets[-1:].data_ptr()
    args.entries = out.shape[0]
    check(cuda_entry("gm_moe_rows_sm90", ROWS)(args), "gather_rows")


def combine(config: Config, call: CombineCall) -> None:
    """y [P, H], inverse [T * K], weights [T, K] -> out [T, H]; k in order."""
    COMBINE.cuda(config, call, call.y.get_device())


def accepts_permute(problem: Problem) -> str | None:
    """None, or the reason why not."""
    experts = problem.integer("e")
    return None if experts <= MAX_EXPERTS else f"made for up to {MAX_EXPERTS} experts, not {experts}"


def accepts_combine(problem: Problem) -> str | None:
    """None, or the reason why not."""
    x = problem.text("x")
    return None if x in ("fp16", "bf16") else f"takes fp16 or bf16, not {x}"


_HOPPER = Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a")

KERNELS = (
    Kernel(
        op="permute",
        name="permute_sm90",
        provider="gristmill",
        language="cuda",
        target=f"{__name__}:permute",
        requires=_HOPPER,
        summary="counting sort in one launch: a CTA places 2048 entries and counts the others; no atomics on places",
        accepts=accepts_permute,
        batch_invariant=True,  # integers: nothing is rounded
        waits=True,
        triggers=True,
        priority=60,
        proven="sm_90: H200",
    ),
    Kernel(
        op="combine",
        name="combine_sm90",
        provider="gristmill",
        language="cuda",
        target=f"{__name__}:combine",
        requires=_HOPPER,
        summary="float32 sums in registers, k in order, up to eight rows loaded at a time",
        accepts=accepts_combine,
        batch_invariant=True,
        waits=True,
        triggers=True,
        priority=60,
        proven="sm_90: H200",
    ),
)
