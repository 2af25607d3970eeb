"""All-reduce in CUDA C++ for Hopper GPUs that can write each other's memory, in one launch (`_all_reduce_sm90.cu`, `_push.h`).

The algorithms are those of the custom all-reduce kernels of TensorRT-LLM and vLLM: one-shot, and two-shot (reduce-scatter, then
all-gather). The sum has the order of ranks, in float32, so all ranks get the same bits, for any number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem, problems
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.collective.pushed import begin, parts
from gristmill.kernels.collective.symmetric import BUFFER_BYTES, RANKS
from gristmill.kernels.common import ITEM_BYTES
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllReduceCall

ENTRY = CallEntry("gm_all_reduce_sm90", "all_reduce")


def launch(config: Config, call: AllReduceCall) -> None:
    """x [M, N], in place."""
    x = call.x
    options, device = {**config, **begin(call, "all_reduce", "x")}, x.get_device()
    most = BUFFER_BYTES // (2 * (call.world - 1)) // 16 * 16 // x.element_size() * call.world
    if x.numel() <= most or config["shots"] == 1:
        ENTRY.cuda(options, call, device)
        return
    values = x.view(1, -1)
    for first, end in parts(x.numel(), most):
        ENTRY.cuda(options, call.replace(x=values[:, first:end]), device)


def _received(problem: Problem, shots: int) -> int:
    """Bytes that a rank receives from the others, whole vectors of 16 bytes."""
    (m, n), world = problem.integers("m", "n"), problem.integer("world")
    vectors = -(-m * n * ITEM_BYTES[problem.text("x")] // 16)
    return 16 * (world - 1) * (vectors if shots == 1 else 2 * -(-vectors // world))


def accepts_one(problem: Problem) -> str | None:
    """None, or the reason why not."""
    if reason := accepts_two(problem):
        return reason
    if (received := _received(problem, 1)) > BUFFER_BYTES:
        return f"a rank receives {received} bytes, more than the {BUFFER_BYTES} of its memory"
    return None


def accepts_two(problem: Problem) -> str | None:
    """None, or the reason why not. A call that does not fit in the memory of a rank is made in several launches."""
    world = problem.integer("world")
    return None if 2 <= world <= RANKS else f"made for 2 to {RANKS} ranks, not {world}"


def config_one(problem: Problem, target: Target) -> dict[str, int]:
    """Small calls in more CTAs: each vector crosses the link on its own."""
    return {"shots": 1, "threads": 128 if _received(problem, 1) <= 256 << 10 else 512}


def config_two(problem: Problem, target: Target) -> dict[str, int]:
    """As one-shot."""
    return {"shots": 2, "threads": 128 if _received(problem, 2) <= 256 << 10 else 512}


def space_one(problem: Problem, target: Target) -> list[dict[str, int]]:
    """Threads per CTA."""
    return [{"shots": 1, "threads": threads} for threads in (128, 256, 512)]


def space_two(problem: Problem, target: Target) -> list[dict[str, int]]:
    """Threads per CTA."""
    return [{"shots": 2, "threads": threads} for threads in (128, 256, 512)]


_HOPPER = Requirement(
    features=(frozenset({"wgmma", "tma"}),),
    vendors=("nvidia",),
    code="cuda:sm_90a",
    packages=(("torch", "2.11"),),
)
EXAMPLES = problems(
    "m=0,n=64,world=2  m=1,n=1,world=2,x=fp32  m=7,n=257,world=2  m=33,n=768,world=2,x=fp16  m=257,n=4096,world=2"
)

KERNELS = (
    Kernel(
        op="all_reduce",
        name="all_reduce_one_shot_sm90",
        provider="gristmill",
        language="cuda",
        target=f"{__name__}:launch",
        requires=_HOPPER,
        summary="every rank writes its values into the memory of all others, which wait for each vector; no barrier",
        accepts=accepts_one,
        config=config_one,
        examples=EXAMPLES,
        space=space_one,
        batch_invariant=True,
        waits=True,
        triggers=True,
        priority=60,
        proven="sm_90: H200",
    ),
    Kernel(
        op="all_reduce",
        name="all_reduce_two_shot_sm90",
        provider="gristmill",
        language="cuda",
        target=f"{__name__}:launch",
        requires=_HOPPER,
        summary="every rank adds a part of x and sends the sums to all others; values wait in memory as in the one-shot kernel",
        accepts=accepts_two,
        config=config_two,
        examples=(*EXAMPLES, *problems("m=1030,n=4096,world=2")),
        space=space_two,
        batch_invariant=True,
        waits=True,
        triggers=True,
        priority=55,
        proven="sm_90: H200",
    ),
)
