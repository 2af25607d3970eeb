"""All-reduce, residual addition and RMSNorm in one launch in CUDA C++ for Hopper GPUs that can write each other's memory
(`_all_reduce_add_rms_norm_sm90.cu`, `_push.h`).

The algorithm is that of TensorRT-LLM's allReduceFusion kernels: one-shot, in which memory says by its value that it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem, problems
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.collective.pushed import begin, launch_rows
from gristmill.kernels.collective.symmetric import BUFFER_BYTES, RANKS
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllReduceAddRmsNormCall

ENTRY = CallEntry("gm_all_reduce_add_rms_norm_sm90", "all_reduce_add_rms_norm")
_THREADS = 512


def launch(config: Config, call: AllReduceAddRmsNormCall) -> None:
    """x [M, N], residual [M, N] (written in place), weight [N] -> out [M, N]."""
    options = {**config, **begin(call, "all_reduce_add_rms_norm", "x", "residual", "weight", "out")}
    most = BUFFER_BYTES // ((call.world - 1) * call.x.shape[1] * 2)
    launch_rows(ENTRY, options, call, most, "x", "residual", "out")


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    n, world, x = problem.integer("n"), problem.integer("world"), problem.text("x")
    if not 2 <= world <= RANKS:
        return f"made for 2 to {RANKS} ranks, not {world}"
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16, not {x}"
    if n % 8 or n > 16 * _THREADS:
        return f"made for rows of up to {16 * _THREADS} values, a multiple of 8, not {n}"
    if world > 2 and (received := (world - 1) * problem.integer("m") * n * 2) > BUFFER_BYTES:
        return f"a rank receives {received} bytes, more than the {BUFFER_BYTES} of its memory"
    return None


def config(problem: Problem, target: Target) -> dict[str, int]:
    """each: vectors of 16 bytes per thread. One, where a CTA has enough threads: all of a row is on its way at once."""
    return {"each": 1 if problem.integer("n") <= 8 * _THREADS else 2}


def space(problem: Problem, target: Target) -> list[dict[str, int]]:
    """Vectors per thread."""
    return [{"each": each} for each in (1, 2) if problem.integer("n") <= 8 * each * _THREADS]


KERNEL = Kernel(
    op="all_reduce_add_rms_norm",
    name="all_reduce_add_rms_norm_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(
        features=(frozenset({"wgmma", "tma"}),),
        vendors=("nvidia",),
        code="cuda:sm_90a",
        packages=(("torch", "2.11"),),
    ),
    summary="one-shot all-reduce without a barrier; a CTA per row keeps the sums in registers for the norm",
    accepts=accepts,
    config=config,
    examples=problems(
        "m=0,n=64,world=2  m=1,n=8,world=2  m=33,n=768,world=2,x=fp16  m=3,n=4104,world=2  m=257,n=4096,world=2  m=1030,n=4096,world=2"
    ),
    space=space,
    batch_invariant=True,
    waits=True,
    triggers=True,
    priority=60,
    proven="sm_90: H200",
)
