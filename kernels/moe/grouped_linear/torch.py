"""Grouped linear by torch: a product for each expert that has rows. Reads the offsets on the host, so it synchronises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from gristmill.kernels.calls import GroupedLinearCall


def launch(config: Config, call: GroupedLinearCall) -> None:
    """Sorted rows [P, K] and packed weights in any layout -> out [P, N or N / 2]."""
    from gristmill.kernels._packed_rows import dequantize_rows, gather, perm_of
    from gristmill.kernels.given_codes import activations
    from gristmill.kernels.linear._epilogue import finish_in_torch
    from gristmill.kernels.moe._clamped import clamped

    scheme, k = QuantScheme.parse(str(config["scheme"])), call.x.shape[1]
    rows = call.out.shape[1] * (2 if call.silu_mul else 1)
    source = call.x if call.permutation is None else call.x[call.permutation.long() // call.top_k]
    ends = call.expert_offsets.tolist()
    for e, (start, stop) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        if start == stop:
            continue
        part = activations(source[start:stop], scheme.activation, by_row=True)
        if len(call.weight) == 1:
            dense = call.weight[0][e].float()
        else:
            expert = of_expert(call.weight, e)
            part, dense = gather(part, perm_of(expert)), dequantize_rows(expert, scheme, k, 0, rows)
        z, added = part @ dense[:, : part.shape[1]].T, None if call.bias is None else call.bias[e]
        if call.clamp:
            z = clamped(z if added is None else z + added.float(), call.alpha, call.limit)
            call.out[start:stop].copy_(z)
        else:
            finish_in_torch(z, added, None, call.silu_mul, call.out[start:stop])
    call.out[ends[-1] :].zero_()


def of_expert(weight: Sequence[Tensor], e: int) -> list[Tensor]:
    """The packed tensors of expert e: row_block of plain_v1 and perm, the last, are shared by all."""
    shared = (4, 5) if len(weight) == 6 else (4,)
    return [t if place in shared or not t.numel() else t[e] for place, t in enumerate(weight)]


def accepts_named(problem: Problem) -> str | None:
    """None for weight-only and dense schemes that have a name of their own, what compiled kernels decode; else the reason why not."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.activation is not None:
        return f"takes activations in their own dtype, not {scheme.activation}"
    return None if scheme.is_named else f"decodes the schemes of ALL_WEIGHT_SCHEMES, not {scheme}"


def config(problem: Problem, target: Target) -> Config:
    """The scheme, which cannot be derived from packed tensors."""
    return {"scheme": problem.text("w")}


KERNEL = Kernel(
    op="grouped_linear",
    name="grouped_linear_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch's product, expert by expert; synchronises",
    capturable=False,
    config=config,
    layouts=("dense_v1", "plain_v1", "cpu_rows16_v1"),
    dequantizes=True,
)
