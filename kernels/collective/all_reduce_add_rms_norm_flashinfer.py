"""All-reduce, residual addition and RMSNorm by FlashInfer: `flashinfer.comm.trtllm_allreduce_fusion` (TensorRT-LLM's), over CUDA IPC."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem, problems
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.target import Target
from gristmill.kernels.collective.groups import enter

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllReduceAddRmsNormCall

BYTES = 8 << 20
"""Of x: FlashInfer allocates 3 * world² times as many per group."""


@cache
def _workspace(group: str, world: int, n: int) -> tuple[Any, int]:
    """The memory of a group for rows of n values, and the rank in it. A collective call, so the first call cannot be captured."""
    from flashinfer.comm import trtllm_create_ipc_workspace_for_all_reduce_fusion

    ranks = enter(group, world)
    rows = BYTES // (2 * n)
    _, workspace = trtllm_create_ipc_workspace_for_all_reduce_fusion(
        ranks.rank(), world, rows, n, group=ranks
    )
    return workspace, ranks.rank()


def launch(config: Config, call: AllReduceAddRmsNormCall) -> None:
    """x [M, N], residual [M, N] (written in place), weight [N] -> out [M, N]."""
    from flashinfer.comm import AllReduceFusionPattern, trtllm_allreduce_fusion

    enter(call.group, call.world)
    m, n = call.x.shape
    if m == 0:
        return
    workspace, rank = _workspace(call.group, call.world, n)
    trtllm_allreduce_fusion(
        allreduce_in=call.x,
        world_size=call.world,
        world_rank=rank,
        token_num=m,
        hidden_dim=n,
        workspace_ptrs=workspace,
        launch_with_pdl=True,
        trigger_completion_at_end=False,
        fp32_acc=True,
        pattern_code=AllReduceFusionPattern.kARResidualRMSNorm,
        use_oneshot=config["shots"] == 1,
        allreduce_out=None,
        residual_in=call.residual,
        residual_out=call.residual,
        norm_out=call.out,
        quant_out=None,
        scale_out=None,
        rms_gamma=call.weight,
        rms_eps=call.eps,
        scale_factor=None,
        layout_code=None,
    )


def accepts(problem: Problem) -> str | None:
    """None, or the reason why not."""
    (m, n), world, x = problem.integers("m", "n"), problem.integer("world"), problem.text("x")
    if world not in (2, 4, 8, 16):
        return f"made for 2, 4, 8 or 16 ranks, not {world}"
    if x not in ("fp16", "bf16"):
        return f"takes fp16 or bf16, not {x}"
    if n % 8:
        return f"made for rows of a multiple of 8 values, not {n}"
    if 2 * m * n > BYTES:
        return f"takes {2 * m * n} bytes, more than the {BYTES} of its memory"
    return None


def space(problem: Problem, target: Target) -> list[dict[str, int]]:
    """One shot, and two where every rank has a row."""
    return [
        {"shots": shots} for shots in (1, 2) if shots == 1 or problem.integer("m") > problem.integer("world")
    ]


KERNEL = Kernel(
    op="all_reduce_add_rms_norm",
    name="all_reduce_add_rms_norm_flashinfer",
    provider="flashinfer",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement.any(
        {"wgmma", "tma"},
        {"tcgen05"},
        vendors=("nvidia",),
        packages=(("flashinfer-python", "0.6.0"), ("torch", "2.11")),
        offers=("flashinfer.comm:trtllm_allreduce_fusion",),
    ),
    summary="flashinfer.comm.trtllm_allreduce_fusion over CUDA IPC, without multicast",
    accepts=accepts,
    config=lambda problem, target: {"shots": 1},
    space=space,
    examples=problems("m=1,n=64,world=2  m=33,n=4096,world=2,x=fp16"),
    priority=30,
    waits=True,
    triggers=True,
)
