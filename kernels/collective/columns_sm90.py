"""All-gather and all-to-all of columns in CUDA C++ for Hopper GPUs that can write each other's memory, in one launch (`_columns_sm90.cu`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem, problems
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.collective.pushed import begin, launch_rows
from gristmill.kernels.collective.symmetric import BUFFER_BYTES, RANKS
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllGatherCall, AllToAllCall

ALL_GATHER = CallEntry("gm_all_gather_sm90", "all_gather")
ALL_TO_ALL = CallEntry("gm_all_to_all_sm90", "all_to_all")


def launch_all_gather(config: Config, call: AllGatherCall) -> None:
    """x [M, N] -> out [M, world * N]. A -0 may arrive as +0."""
    _launch(ALL_GATHER, config, call)


def launch_all_to_all(config: Config, call: AllToAllCall) -> None:
    """x [M, world, N] -> out [M, world, N]. A -0 may arrive as +0."""
    _launch(ALL_TO_ALL, config, call)


def _launch(entry: CallEntry, config: Config, call: AllGatherCall | AllToAllCall) -> None:
    options = {**config, **begin(call, entry.op.name, "x", "out")}
    most = BUFFER_BYTES // ((call.world - 1) * call.x.shape[-1] * call.x.element_size())
    launch_rows(entry, options, call, most, "x", "out")


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    n, world = problem.integer("n"), problem.integer("world")
    row = n * ITEM_BYTES[problem.text("x")]
    if not 2 <= world <= RANKS:
        return f"made for 2 to {RANKS} ranks, not {world}"
    if row % 16:
        return f"made for rows of a multiple of 16 bytes, not {row}"
    if (world - 1) * row > BUFFER_BYTES:
        return (
            f"a rank receives {(world - 1) * row} bytes per row, more than the {BUFFER_BYTES} of its memory"
        )
    return None


_HOPPER = Requirement(
    features=(frozenset({"wgmma", "tma"}),),
    vendors=("nvidia",),
    code="cuda:sm_90a",
    packages=(("torch", "2.11"),),
)

KERNELS = tuple(
    Kernel(
        op=op,
        name=f"{op}_sm90",
        provider="gristmill",
        language="cuda",
        target=f"{__name__}:launch_{op}",
        requires=_HOPPER,
        summary=summary,
        accepts=accepts,
        examples=problems(
            "m=0,n=64,world=2  m=1,n=8,world=2  m=7,n=264,world=2,x=fp32  m=33,n=768,world=2,x=fp16  m=70,n=64128,world=2"
        ),
        batch_invariant=True,
        waits=True,
        triggers=True,
        priority=60,
    )
    for op, summary in (
        (
            "all_gather",
            "every rank writes its columns into the memory of all others, which wait for each vector; no barrier",
        ),
        (
            "all_to_all",
            "every rank writes a block of its columns into the memory of each other one, which waits for each vector; no barrier",
        ),
    )
)
