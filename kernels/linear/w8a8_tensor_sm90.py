"""FP8 weights with FP8 activations that share one scale, for Hopper: x is quantized in two launches and multiplied by `linear_w8a8_sm90`'s product.

The first launch finds the largest number of x, the second writes codes, and the scale once for each row (`quantize_fp8.h`): a scale of the tensor is
to the product one of rows, which are all alike. Given codes come with one scale, which is copied to every row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm80.shapes import MAXIMA, Room, pitch_of
from gristmill.kernels.linear.w8a8_sm90 import spec as of_rows
from gristmill.kernels.linear.w8a8_sm90.shapes import operands_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

OPERANDS = operands_of("fp8")
TWIN = {"fp8.fp8": "fp8.fp8_token", "fp8_ch.fp8": "fp8_ch.fp8_token"}
"""Scheme -> the scheme of the same weight with a scale for each row of x."""
LAUNCH = 2.0
"""Microseconds of the launch that finds the largest number."""


def room_of(m: int, k: int, gated: int, given: bool) -> Room:
    """The parts for M rows of x, without codes and maxima if codes are given, with `gated` columns of gate and up together; no sums of CTAs."""
    scales = 0 if given else cdiv(m * k, 16) * 16
    maxima = scales + pitch_of(m) * 4
    end = maxima + (0 if given else 4 * MAXIMA)
    return Room(0, 0, scales, maxima, end, end + 2 * m * gated)


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] fp16 or bf16, the six tensors of plain_v1 -> out [..., N or N / 2].

    Raises:
        ValueError: tensors that are not those of a weight with a scale for each row, in the order of x's columns, or a workspace that is too small.
        NativeLibraryError: this build has no such library.
        RuntimeError: no driver, or an error of the driver.
    """
    import torch

    from gristmill.kernels.common import need, need_workspace
    from gristmill.kernels.linear._epilogue import finish
    from gristmill.kernels.linear.w8a8_sm80._launch import quantize_to_fp8, rows_of
    from gristmill.kernels.linear.w8a8_sm80.args import QUANTIZE_FP8
    from gristmill.kernels.linear.w8a8_sm90._launch import Rows, gated_rows, multiply
    from gristmill.kernels.native import cuda_entry

    x, (codes, scales, _, _, _, perm) = call.x, call.weight
    k, rows = x.shape[-1], call.out.shape[-1] * (2 if call.silu_mul else 1)
    m = x.numel() // k
    need(
        tuple(codes.shape) == (rows, k) and scales.numel() == rows and not perm.numel(),
        f"linear_w8a8_tensor_sm90: expected codes [{rows}, {k}] in the order of x's columns and a scale for each row, "
        f"got {list(codes.shape)} and {scales.numel()} scales"
        + (" and a permutation" if perm.numel() else ""),
    )
    if m == 0:
        return
    room = room_of(m, k, rows if call.silu_mul else 0, call.codes is not None)
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(room.size, dtype=torch.uint8, device=x.device)
    need_workspace("linear", workspace, room.size, x.device)
    start, stream = workspace.data_ptr(), torch.cuda.current_stream(x.device).cuda_stream
    of_x = start
    if call.codes is None or call.scales is None:
        entry = cuda_entry("gm_quantize_fp8_sm90", QUANTIZE_FP8)
        quantize_to_fp8(entry, "fp8", rows_of(x, m, k, start, room))
    else:
        given = call.codes.reshape(m, k).contiguous()
        of_x = given.data_ptr()
        workspace[room.scales : room.scales + 4 * m].view(torch.float32).copy_(
            call.scales.reshape(1).expand(m)
        )
    out = gated_rows(workspace, room.size, m, rows, x.dtype) if call.silu_mul else call.out.view(m, rows)
    residual = None if call.silu_mul else call.residual
    quantized = Rows(of_x, start + room.scales, 0, pitch_of(m))
    multiply(config, quantized, k, call.weight, call.bias, residual, out, stream)
    if call.silu_mul:
        # the product has added the bias
        finish(out.view(*call.out.shape[:-1], rows), None, call.residual, True, call.out)


def twin(problem: Problem) -> Problem:
    """The problem of `linear_w8a8_sm90` with the same product."""
    return problem.with_values(w=TWIN[str(QuantScheme.parse(problem.text("w")))])


def accepts(problem: Problem) -> str | None:
    """fp8 weights per row or tensor with one scale for x; else as `linear_w8a8_sm90`."""
    scheme = str(QuantScheme.parse(problem.text("w")))
    if scheme not in TWIN:
        return f"multiplies {' and '.join(TWIN)}, not {scheme}"
    return of_rows.accepts(twin(problem))


def space(problem: Problem, target: Target) -> Iterable[Config]:
    """Every shape of a CTA that suits the problem, best first by the model."""
    return of_rows.space(twin(problem), target)


def config(problem: Problem, target: Target) -> Config:
    """The first of `space`."""
    return next(iter(space(problem, target)))


def estimate(problem: Problem, target: Target) -> float | None:
    """Microseconds on an H200: those with scales of rows, and where x is quantized a launch and one more reading of x."""
    product, (m, k) = of_rows.estimate(twin(problem), target), problem.integers("m", "k")
    return product if product is None or problem["codes"] else product + LAUNCH + 2 * m * k / 3.5e6


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x, and gate and up before they are multiplied."""
    m, n, k = problem.integers(*"mnk")
    return Workspace(
        room_of(m, k, n if "silu_mul" in problem.flags("epilogue") else 0, bool(problem["codes"])).size
    )


KERNEL = Kernel(
    op="linear",
    name="linear_w8a8_tensor_sm90",
    provider="gristmill",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(features=(frozenset({"wgmma", "tma"}),), vendors=("nvidia",), code="cuda:sm_90a"),
    summary="x quantized in two launches, by its largest number; then the product of linear_w8a8_sm90",
    accepts=accepts,
    supports=("codes",),
    config=config,
    space=space,
    misfit=of_rows.misfit,
    workspace=workspace,
    estimate=estimate,
    layouts=("plain_v1",),
    examples=(
        "m=0,n=64,k=128,w=fp8.fp8",
        "m=1,n=64,k=128,w=fp8.fp8",
        "m=7,n=257,k=2880,w=fp8_ch.fp8,epilogue=bias",
        "m=257,n=130,k=272,x=fp16,w=fp8.fp8,epilogue=bias+residual",
        "m=65,n=6,k=1168,w=fp8_ch.fp8,epilogue=bias+silu_mul",
        "m=33,n=200,k=656,w=fp8.fp8,epilogue=silu_mul,codes=true",
        "m=300,n=520,k=4096,x=fp16,w=fp8.fp8,codes=true",
    ),
    waits=True,
    triggers=True,
    priority=106,
)
