"""All-reduce by torch.distributed in the output's memory, then residual addition and norm by torch, in Triton or in C++.

The ordered variants gather x and add it in the order of ranks: the same bits for every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.collective import all_reduce_torch
from gristmill.kernels.collective.all_reduce import OP as ALL_REDUCE
from gristmill.kernels.norm import (
    fused_add_rms_norm_cpu,
    fused_add_rms_norm_torch,
    fused_add_rms_norm_triton,
)
from gristmill.kernels.norm.fused_add_rms_norm import OP as ADD_NORM

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllReduceAddRmsNormCall, FusedAddRmsNormCall


def _sum(config: Config, call: AllReduceAddRmsNormCall) -> FusedAddRmsNormCall:
    """The sum of all ranks in the output's memory, and the call that adds the residual and normalizes it there."""
    if call.out.data_ptr() != call.x.data_ptr():
        call.out.copy_(call.x)
    add = all_reduce_torch.launch_in_order if config["ordered"] else all_reduce_torch.launch
    add({}, ALL_REDUCE.Call(call.out, call.group, call.world))
    norm: FusedAddRmsNormCall = ADD_NORM.Call(call.out, call.residual, call.weight, call.eps, call.out)
    return norm


def launch_torch(config: Config, call: AllReduceAddRmsNormCall) -> None:
    """x [M, N], residual [M, N] (written in place), weight [N] -> out [M, N]."""
    fused_add_rms_norm_torch.launch({}, _sum(config, call))


def launch_triton(config: Config, call: AllReduceAddRmsNormCall) -> None:
    """As `launch_torch`."""
    fused_add_rms_norm_triton.launch(config, _sum(config, call))


def launch_cpu(config: Config, call: AllReduceAddRmsNormCall) -> None:
    """As `launch_torch`."""
    fused_add_rms_norm_cpu.launch(config, _sum(config, call))


def _configs(
    norm: Callable[[Problem, Target], Iterable[Config]], ordered: bool
) -> Callable[[Problem, Target], list[Config]]:
    return lambda problem, target: [{**config, "ordered": ordered} for config in norm(problem, target)]


def _kernel(by: str, ordered: bool, norm: Kernel, requires: Requirement, priority: int) -> Kernel:
    first = _configs(lambda problem, target: [norm.config(problem, target)], ordered)
    how = "all-gather, one sum in float32 in rank order" if ordered else "torch.distributed.all_reduce"
    return Kernel(
        op="all_reduce_add_rms_norm",
        name=f"all_reduce_add_rms_norm_{'ordered_' if ordered else ''}{by}",
        provider=norm.provider,
        language=norm.language,
        target=f"{__name__}:launch_{by}",
        requires=requires,
        summary=f"{how}, then {norm.name}",
        config=lambda problem, target: first(problem, target)[0],
        space=None if norm.space is None else _configs(norm.space, ordered),
        batch_invariant=ordered and norm.batch_invariant,
        priority=priority - (5 if ordered else 0),
    )


_TORCH = (("torch", "2.11"),)
_WAYS = (
    ("torch", fused_add_rms_norm_torch.KERNEL, Requirement(packages=_TORCH), 10),
    ("triton", fused_add_rms_norm_triton.KERNEL, Requirement(code="triton", packages=_TORCH), 20),
    ("cpu", fused_add_rms_norm_cpu.KERNEL, Requirement(vendors=("cpu",), code="cpp", packages=_TORCH), 30),
)
KERNELS = tuple(
    _kernel(by, ordered, norm, requires, priority)
    for by, norm, requires, priority in _WAYS
    for ordered in (False, True)
    if not ordered or norm.batch_invariant
)
