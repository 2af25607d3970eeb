"""Linear: y = x · Wᵀ (+ bias), then optionally silu(gate)·up, then + residual, over dense and quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.arguments import MATRIX, Scalar, Tensor, Weight, WorkspaceArgument
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.op import VERIFIED_ROWS, Cost, Op, Tolerance
from gristmill.kernel_registry.problem import Axis, Problem, problems
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels import given_codes
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.quantized_inputs import misfit, random_weight
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

    from gristmill.kernel_registry.layout import Layout
    from gristmill.quant.tensor import QuantTensor

    WeightLike = QuantTensor | torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]

EPILOGUE = ("bias", "residual", "silu_mul")
LONGEST_N, LONGEST_K = 1536, 16384
"""Larger weights are verified on a part: every column is an independent sum."""


def reference(
    x: torch.Tensor,
    weight: WeightLike,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu_mul: bool = False,
    n: int = 0,
    workspace: torch.Tensor | None = None,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [..., K] and a QuantTensor [N, K] (or a dense tensor, or a list of one) -> [..., N], [..., N / 2] with silu_mul.

    z = x · Wᵀ + bias; with silu_mul the first N / 2 rows of W are the gate and z = silu(gate) · up; y = z + residual.
    Everything in float32, with W dequantized in float32, and rounded once to x's dtype. A scheme with an activation
    part quantizes x first, by that format's rule.

    codes [..., K], scales float32 [rows, groups]: x as quantized in that format, as `rms_norm_quant` and `silu_and_mul_quant` write it
    (e4m3 or int8; scales [1, 1] of the tensor, or per row and group of columns). The values of x are not read then: it states the shape
    and the dtype of the result.
    """
    z = product(x, weight, codes, scales)
    if bias is not None:
        z = z + bias.float()
    if silu_mul:
        z = gated(z)
    if residual is not None:
        z = z + residual.float()
    return z.to(x.dtype)


def gated(z: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of z [..., 2 N], gate first."""
    gate, up = z.chunk(2, -1)
    return gate * gate.sigmoid() * up


def gated_error(z: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """The size of an error of silu(gate) · up when gate and up, [..., 2 N] = z, have errors of `size`."""
    gate, up = z.chunk(2, -1)
    of_gate, of_up = size.chunk(2, -1)
    return 1.1 * of_gate * up.abs() + of_up * (gate * gate.sigmoid()).abs() + 1e-3 * of_gate * of_up


def product(
    x: torch.Tensor,
    weight: WeightLike,
    codes: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x · Wᵀ in float32, [..., N]."""
    weight = as_quant(weight)
    return given_codes.activations(x, weight.scheme.activation, codes, scales) @ weight.dequantize().T


def as_quant(weight: WeightLike) -> QuantTensor:
    """A QuantTensor from itself, from a dense tensor, or from a list of one dense tensor."""
    from gristmill.quant.tensor import QuantTensor

    if isinstance(weight, list | tuple):
        if len(weight) != 1:
            raise ValueError(
                "linear: the reference takes a QuantTensor or one dense tensor, got a packed weight "
                f"of {len(weight)} tensors; unpack it first"
            )
        weight = weight[0]
    return weight if isinstance(weight, QuantTensor) else QuantTensor.from_dense(weight)


def check(problem: Problem) -> str | None:
    """Why the axes of `problem` are inconsistent; None if they are not."""
    n = problem.integer("n")
    if "silu_mul" in problem.flags("epilogue") and n % 2:
        return f"silu_mul needs an even number of rows (gate, then up), got n={n}"
    return misfit(problem.text("w"), problem.integer("k"), bool(problem["act_order"]))


def check_with_codes(problem: Problem) -> str | None:
    """`check`, and why x cannot be given as codes."""
    return check(problem) or given_codes.misfit(problem)


def inputs(problem: Problem, seed: int, device: str) -> list[Any]:
    """Random arguments; the weight is a QuantTensor whose rows and columns have very different sizes.

    The error is relative to each column of the output, so a wrong row, group or scale is detected.
    """
    draw, (m, n, k) = Draw(problem, seed, device), problem.integers(*"mnk")
    (x,), flags = draw.stored(draw.rows(m, k, spread=0.5)), problem.flags("epilogue")
    weight = random_weight(draw, n, k)
    columns = n // 2 if "silu_mul" in flags else n
    bias = draw.stored(draw.normal(n))[0] if "bias" in flags else None
    residual = draw.stored(draw.normal(m, columns))[0] if "residual" in flags else None
    arguments = [weight, bias, residual, "silu_mul" in flags, n, None]
    if not problem["codes"]:
        return [x, *arguments, None, None]
    codes = given_codes.codes_of(x, str(weight.scheme.activation))
    return [x.fill_(float("nan")), *arguments, *codes]  # x is not read


def pack(kernel: Kernel, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of an operation with its weights packed in the first layout of `kernel` that holds their scheme.

    The spec module of a wrapped library that packs weights itself declares no layout, but has ``pack_weight``.
    """
    from gristmill.kernel_registry.registry import default_registry
    from gristmill.quant.packed import pack as packed

    packed_arguments = list(arguments)
    for index, argument in enumerate(default_registry().op(kernel.op).arguments):
        if isinstance(argument, Weight):
            weight = as_quant(packed_arguments[index])
            if kernel.layouts:
                packed_arguments[index] = packed(weight, layout_for(kernel, weight.scheme)).tensors
            else:
                packed_arguments[index] = import_module(kernel.module).pack_weight(weight)
    return packed_arguments


def layout_for(kernel: Kernel, scheme: QuantScheme) -> Layout:
    """The first layout that `kernel` reads and that holds `scheme`; ValueError if there is none."""
    from gristmill.kernel_registry.registry import default_registry

    for name in kernel.layouts:
        layout = default_registry().layout(name)
        if layout.accepts(scheme):
            return layout
    raise ValueError(
        f"{kernel.name} reads {', '.join(kernel.layouts) or 'no layout'}; none of them holds {scheme}"
    )


def error(
    problem: Problem,
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    references: Sequence[torch.Tensor],
) -> float:
    """|Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS over the rows of x, of the worst column.

    The divisor is the average size of a sum of K such products, so one wrong scale, group or row of W shows in its
    column, however small the column is. |bias| and |residual| are added to it because they are rounded with the sum. With
    silu_mul it is propagated through the derivative of silu(gate)·up.
    """

    x, weight, bias, residual, silu_mul = arguments[:5]
    codes, scales = arguments[7:] or (None, None)
    out, ref = (t.double().reshape(-1, t.shape[-1]) for t in (outputs[0], references[0]))
    if out.numel() == 0:
        return 0.0
    weight = as_quant(weight)
    values = x if codes is None else given_codes.activations(x, weight.scheme.activation, codes, scales)
    rows = values.double().reshape(-1, x.shape[-1]).norm(dim=1, keepdim=True)
    scale = rows * weight.dequantize().norm(dim=1).double() / weight.k**0.5
    if bias is not None:
        scale = scale + bias.double().abs()
    if silu_mul:
        z = product(x, weight, codes, scales).double().reshape(scale.shape) + (
            0 if bias is None else bias.double()
        )
        scale = gated_error(z, scale)
    if residual is not None:
        scale = scale + residual.double().reshape(ref.shape).abs()
    return worst_column(out, ref, scale)


def worst_column(out: torch.Tensor, ref: torch.Tensor, scale: torch.Tensor) -> float:
    """RMS over rows of |Δ| / scale, of the worst column."""
    delta = ((out - ref).abs() / scale.clamp_min(1e-30)).where(out != ref, 0.0)
    return float(delta.square().mean(0).sqrt().max())


def cost(problem: Problem) -> Cost:
    """x and the weight read once, the output written once, and the inputs of the epilogue."""
    m, n, k = problem.integers(*"mnk")
    item, flags = ITEM_BYTES[problem.text("x")], problem.flags("epilogue")
    scheme = QuantScheme.parse(problem.text("w"))
    columns = n // 2 if "silu_mul" in flags else n
    moved = m * columns * (2 if "residual" in flags else 1) + (n if "bias" in flags else 0)
    read = m * k * (1 if problem["codes"] else item)
    unit = problem.text("x")
    if scheme.activation is not None:
        unit = "int8" if scheme.activation.startswith("int8") else "fp8"
    return Cost(bytes=moved * item + read + scheme.weight_bytes(n, k), flops=2 * m * n * k, unit=unit)


def tolerance(problem: Problem) -> Tolerance:
    """Rounding of the output and, in half precision, of the weight to the dtype of x.

    The base is for many rows: 6e-3 for 257 rows in bf16, which admits kernels that round dequantized weights to bf16 (humming
    has 5.8e-3 with int4_g128, ours 3e-3). With few rows the RMS of the worst column is larger; with one row it is the
    rounding of a single output, which may be several times the average sum.
    """
    base = {"fp32": 4e-6, "fp16": 4e-4, "bf16": 4.74e-3}[problem.text("x")]
    rows = max(1, problem.integer("m"))
    return Tolerance("columns", base * (1 + 4 / rows**0.5 + 4 / rows))


def shrink(problem: Problem) -> Problem:
    """At most 257 rows, and a part of large weights with the same remainders of N and K."""
    m, n, k = problem.integers(*"mnk")
    n = n if n <= LONGEST_N else 1024 + n % 512
    k = k if k <= LONGEST_K else LONGEST_K - 512 + k % 512
    return problem.with_values(m=min(m, VERIFIED_ROWS), n=n, k=k)


OP = Op(
    name="linear",
    family="linear",
    summary="y = x W^T with dense or quantized weights, and its epilogue",
    axes=(
        Axis("m", "int", "rows of x (tokens)", dynamic=True),
        Axis("n", "int", "rows of W (output features; gate and up together for silu_mul)", minimum=1),
        Axis("k", "int", "columns of W (input features)", minimum=1),
        Axis("x", "dtype", "dtype of x, bias, residual and the output", default="bf16", choices=FLOATS),
        Axis(
            "w", "scheme", "storage of the weight, and the format x is quantized to, if any", default="bf16"
        ),
        Axis("epilogue", "flags", "what follows the product", default="none", choices=EPILOGUE),
        Axis("act_order", "bool", "columns belong to groups in any order (GPTQ's desc_act)", default=False),
        Axis("codes", "bool", "x is given as codes and scales", default=False, opt_in=True),
    ),
    arguments=(
        Tensor("x", "... k", strides=MATRIX),
        Weight("weight", "n k"),
        Tensor("bias", "n", optional=True),
        Tensor("residual", "... n//(1+silu_mul)", optional=True),
        Scalar("silu_mul", "bool", False),
        Scalar("n", "int", 0, states="n"),
        WorkspaceArgument(),
        *given_codes.ARGUMENTS,
    ),
    rules=(given_codes.fits,),
    returns=(Tensor("out", "... n//(1+silu_mul)"),),
    reference=reference,
    inputs=inputs,
    check=check_with_codes,
    cost=cost,
    tolerance=tolerance,
    error=error,
    shrink=shrink,
    pack=pack,
    unplanned=frozenset({"dense_v1"}),
    bucket="m",
    examples=problems(
        """
        m=0,n=32,k=64,x=bf16  m=1,n=1,k=1,x=fp32,w=fp32  m=7,n=257,k=129,x=bf16  m=3,n=40,k=67,x=fp16,w=fp16
        m=33,n=96,k=256,x=fp32,w=fp32,epilogue=bias+residual+silu_mul
        m=2,n=30,k=64,x=bf16,w=fp32,epilogue=bias  m=1,n=257,k=256,x=bf16,w=int4_g128
        m=7,n=66,k=96,x=fp32,w=int4_g32_zp,epilogue=bias+silu_mul
        m=5,n=48,k=192,x=fp16,w=int4_g64,act_order=true
        m=4,n=33,k=129,x=bf16,w=int4_ch_zp,epilogue=residual  m=2,n=17,k=129,x=bf16,w=int8_ch
        m=19,n=31,k=256,x=bf16,w=int8_g128  m=3,n=50,k=77,x=fp32,w=fp8  m=1,n=65,k=129,x=fp16,w=fp8_ch
        m=9,n=257,k=129,x=bf16,w=fp8_block  m=2,n=70,k=96,x=bf16,w=mxfp8
        m=7,n=34,k=96,x=bf16,w=mxfp4,epilogue=bias  m=6,n=39,k=144,x=bf16,w=nvfp4
        m=3,n=20,k=80,x=fp32,w=nvfp4  m=5,n=130,k=257,x=bf16,w=fp8_block.fp8_g128
        m=18,n=33,k=64,x=bf16,w=int8_ch.int8_token  m=3,n=40,k=104,w=int4_g64
        m=2,n=33,k=40,x=fp16,w=int8_g128  m=4,n=24,k=136,w=mxfp4,act_order=true
        m=5,n=130,k=257,w=fp8_block.fp8_g128,codes=true  m=7,n=66,k=96,x=fp32,w=int8_ch.int8_token,epilogue=bias+silu_mul,codes=true
        m=19,n=40,k=272,x=fp16,w=fp8_ch.fp8_token,epilogue=residual,codes=true  m=3,n=31,k=200,w=int4_g64.int8_g32,codes=true
        m=4,n=24,k=64,w=fp8.fp8,codes=true
        """
    ),
    bench=problems(
        """
        m=1,n=4096,k=4096  m=1,n=4096,k=4096,w=int4_g128  m=16,n=4096,k=4096,w=int4_g128
        m=256,n=4096,k=4096,w=int4_g128  m=1,n=4096,k=4096,w=fp8_block  m=1,n=4096,k=4096,w=mxfp4
        m=1,n=4096,k=4096,w=nvfp4  m=256,n=4096,k=4096
        """
    ),
)
