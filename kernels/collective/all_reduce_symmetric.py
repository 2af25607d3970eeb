"""All-reduce by torch's own kernels over symmetric memory: one-shot, and two-shot in place.

x is copied into memory that all ranks map. torch's kernels begin and end with a barrier of all ranks, and round to the dtype of x after
each addition. They need no NVLink multicast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem, problems
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.collective.groups import enter
from gristmill.kernels.collective.pushed import parts
from gristmill.kernels.collective.symmetric import BUFFER_BYTES, symmetric
from gristmill.kernels.common import ITEM_BYTES

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllReduceCall


def launch(config: Config, call: AllReduceCall) -> None:
    """x [M, N], in place."""
    import torch

    enter(call.group, call.world)
    memory, ops = symmetric(call.group), torch.ops.symm_mem
    if memory.staging is None:
        raise RuntimeError(f"group {call.group!r} has no memory for torch's symmetric kernels")
    values, staging, name = call.x.view(-1), memory.staging.view(call.x.dtype), memory.group_name
    for begin, end in parts(values.numel(), staging.numel()):
        x, shared = values[begin:end], staging[: end - begin]
        if config["shots"] == 1:
            ops.one_shot_all_reduce_copy_out(shared, x, "sum", name, x)
        else:
            shared.copy_(x)
            ops.two_shot_all_reduce_(shared, "sum", name)
            x.copy_(shared)


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    (m, n), world, x = problem.integers("m", "n"), problem.integer("world"), problem.text("x")
    if world < 2:
        return "made for several ranks"
    if x not in ("bf16", "fp32"):
        return f"torch's symmetric memory adds bf16 and fp32, not {x}"
    if m * n * ITEM_BYTES[x] % (16 * world):
        return f"made for a multiple of {16 * world} bytes, not {m * n * ITEM_BYTES[x]}"
    return None


def accepts_one(problem: Problem) -> str | None:
    """None, or the reason why not."""
    received = problem.integer("m") * problem.integer("n") * ITEM_BYTES[problem.text("x")]
    if received > BUFFER_BYTES:
        return f"takes {received} bytes, more than the {BUFFER_BYTES} of its memory"
    return accepts(problem)


def config_one(problem: Problem, target: Target) -> dict[str, int]:
    """One shot."""
    return {"shots": 1}


def config_two(problem: Problem, target: Target) -> dict[str, int]:
    """Two shots."""
    return {"shots": 2}


KERNELS = tuple(
    Kernel(
        op="all_reduce",
        name=f"all_reduce_{name}_shot_symmetric",
        provider="torch",
        language="python",
        target=f"{__name__}:launch",
        requires=Requirement(
            features=(frozenset({"cp_async"}),),
            vendors=("nvidia",),
            code="torch",
            packages=(("torch", "2.11"),),
            offers=("torch.distributed._symmetric_memory:rendezvous",),
        ),
        summary=f"torch's {name}-shot all-reduce over symmetric memory, between barriers of all ranks",
        accepts=accepts_one if shots == 1 else accepts,
        config=config_one if shots == 1 else config_two,
        examples=problems("m=0,n=64,world=2  m=8,n=264,world=2,x=fp32  m=33,n=4096,world=2"),
        batch_invariant=shots == 1,
        priority=30 - shots,
    )
    for name, shots in (("one", 1), ("two", 2))
)
