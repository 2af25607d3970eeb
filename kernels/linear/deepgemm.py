"""fp8_block weights with fp8 activations by DeepGEMM (DeepSeek, MIT): its own package, or the copy in vLLM's wheel.

x is quantized by the launch that `linear_w8a8_sm90` has: its scales are in the order that DeepGEMM multiplies, which transposes others in a launch
of its own. No extra of gristmill installs the library: `deep-gemm` on PyPI has no ``fp8_gemm_nt``. DeepGEMM compiles a tile for a weight's N and K
when a call first needs it, which takes seconds and the CUDA compiler that it finds, and keeps it on disk (``DG_JIT_CACHE_DIR``). Hopper alone: on
Blackwell it rounds scales to powers of two.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from gristmill.kernel_registry.kernel import Config, Kernel, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import BLOCK, cdiv
from gristmill.kernels.linear.w8a8_sm90.shapes import operands_of, workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from gristmill.kernels.calls import LinearCall

OPERANDS = operands_of("fp8_block")
MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Where the library may be, the first that has the function first."""
FUNCTION = "fp8_gemm_nt"
PITCH = 4
"""Scales of a group of columns begin at multiples of so many floats, as TMA copies them."""
_ran: set[tuple[int, ...]] = set()
"""The device, M, N and K of the calls that have run outside of captures."""


def product() -> Callable[..., None]:
    """The function of the library. ImportError: neither module has it."""
    # A search for a module that is missing takes longer than a launch.
    for name in MODULES:
        if (found := getattr(sys.modules.get(name), FUNCTION, None)) is not None:
            return cast("Callable[..., None]", found)
    try:
        from deep_gemm import fp8_gemm_nt
    except ImportError:
        from vllm.third_party.deep_gemm import fp8_gemm_nt
    return cast("Callable[..., None]", fp8_gemm_nt)


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K] bf16, the six tensors of plain_v1 in fp8_block -> out [..., N or N / 2].

    Raises:
        ValueError: scales that are not those of whole blocks of 128 x 128, or a workspace that is too small.
        ImportError: the library is not installed.
        RuntimeError: these sizes have not run before a capture, in which DeepGEMM would compile them; or an error of the library or the driver.
    """
    import torch

    from gristmill.kernels.common import need, need_workspace
    from gristmill.kernels.linear._epilogue import finish

    x, (codes, scales) = call.x, call.weight[:2]
    k, rows = x.shape[-1], codes.shape[0]
    m = x.numel() // k
    blocks = cdiv(rows, BLOCK), cdiv(k, BLOCK)
    need(
        tuple(scales.shape) == blocks,
        f"linear_deepgemm: block scales must be {blocks} of whole 128 x 128 blocks of [{rows}, {k}], "
        f"got {tuple(scales.shape)}: fused or sharded inside a block",
    )
    if m == 0:
        return
    plain = call.bias is None and call.residual is None and not call.silu_mul
    size = workspace_bytes(OPERANDS, m, k, 0 if plain else rows, given=call.codes is not None)
    workspace = call.workspace
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    need_workspace("linear", workspace, size, x.device)
    operand = _given(call, m, k) if call.codes is not None else _quantized(x, m, k, workspace)
    z = call.out if plain else workspace[size - 2 * m * rows : size].view(x.dtype)
    _multiply(operand, (codes.view(torch.float8_e4m3fn), scales.float()), z.view(m, rows))
    if not plain:
        finish(z.view(*x.shape[:-1], rows), call.bias, call.residual, call.silu_mul, call.out)


def _multiply(x: tuple[Tensor, Tensor], weight: tuple[Tensor, Tensor], z: Tensor) -> None:
    """The product of codes and scales, outside of captures if its sizes are new."""
    import torch

    sizes = z.get_device(), *z.shape, x[0].shape[1]
    if sizes not in _ran and z.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"linear_deepgemm: M={sizes[1]}, N={sizes[2]}, K={sizes[3]} has not run yet, and DeepGEMM compiles what it first runs: "
            "call it once before it is captured"
        )
    product()(x, weight, z)
    _ran.add(sizes)


def _quantized(x: Tensor, m: int, k: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
    """x in the workspace: codes e4m3 [M, K], float32 scales [M, groups] by columns."""
    import torch

    from gristmill.kernels.linear.w8a8_sm90._launch import quantize_rows

    device = x.get_device()
    stream = torch.cuda.current_stream(device).cuda_stream
    rows = quantize_rows(OPERANDS, x, m, k, workspace, device, stream)
    start, groups = rows.scales - rows.codes, cdiv(k, BLOCK)
    by_column = (
        workspace[start : start + 4 * groups * rows.pitch].view(torch.float32).view(groups, rows.pitch)
    )
    return workspace[: m * k].view(torch.float8_e4m3fn).view(m, k), by_column.T[:m]


def _given(call: LinearCall, m: int, k: int) -> tuple[Tensor, Tensor]:
    """Given codes, with scales by columns; copied unless they are so already."""
    assert call.codes is not None and call.scales is not None
    pitch, scales = cdiv(m, PITCH) * PITCH, call.scales
    if scales.stride() != (1, pitch) or scales.data_ptr() % 16:
        scales = scales.new_empty(scales.shape[1], pitch).T[:m].copy_(scales)
    return call.codes.reshape(m, k), scales


def accepts(problem: Problem) -> str | None:
    """DeepSeek's format, bf16 in and out, whole blocks along K, columns in order."""
    if problem.text("w") not in OPERANDS.schemes:
        return f"multiplies {' and '.join(OPERANDS.schemes)}, not {problem.text('w')}"
    if problem.text("x") != "bf16":
        return f"writes bf16, not {problem.text('x')}"
    if problem["act_order"]:
        return "takes no act-order"
    n, k = problem.integers("n", "k")
    return (
        None if k % 128 == 0 and n % 64 == 0 else f"needs K a multiple of 128 and N of 64, got N={n}, K={k}"
    )


def workspace(problem: Problem, config: Config) -> Workspace:
    """Quantized rows of x, and the product where something follows it."""
    m, n, k = problem.integers(*"mnk")
    beside = n if problem.flags("epilogue") else 0
    return Workspace(workspace_bytes(OPERANDS, m, k, beside, given=bool(problem["codes"])))


KERNEL = Kernel(
    op="linear",
    name="linear_deepgemm",
    provider="deepgemm",
    language="cuda",
    target=f"{__name__}:launch",
    requires=Requirement(
        features=(frozenset({"wgmma", "tma"}),),
        vendors=("nvidia",),
        offers=(" or ".join(f"{module}:{FUNCTION}" for module in MODULES),),
        code="cuda:sm_90a",
        origin="https://github.com/deepseek-ai/DeepGEMM (not PyPI's deep-gemm), or vLLM's wheel",
    ),
    summary="DeepGEMM fp8_gemm_nt after a launch that quantizes x",
    accepts=accepts,
    workspace=workspace,
    supports=("codes",),
    layouts=("plain_v1",),
    examples=(
        "m=7,n=192,k=256,w=fp8_block.fp8_g128",
        "m=257,n=384,k=640,w=fp8_block.fp8_g128,epilogue=bias+residual+silu_mul",
        "m=33,n=128,k=1152,w=fp8_block.fp8_g128,codes=true",
    ),
    priority=60,
    proven="",
)
