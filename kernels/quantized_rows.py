"""Operations that quantize the rows that they compute: what rms_norm_quant and silu_and_mul_quant have in common.

The formats are those of activations with 8 bits (`quant/activations.py`), and so are their rules: a scale is amax / 448 or
amax / 127 with a lower bound of amax, codes are value / scale, both IEEE float32 divisions, rounded to nearest even, saturating.
The values are first rounded to the dtype of x: the result is that of the operation without quantization, quantized afterwards.

==========  =============  =====================  ==============================
format      codes [..., N]  scales [rows, groups]  of
==========  =============  =====================  ==============================
fp8         e4m3           [1, 1]                 the tensor: given, not written
fp8_token   e4m3           [m, 1]                 a row
fp8_g128    e4m3           [m, ceil(N / 128)]     128 columns of a row
int8_token  int8           [m, 1]                 a row
int8_g32    int8           [m, ceil(N / 32)]      32 columns of a row
int8_g128   int8           [m, ceil(N / 128)]     128 columns of a row
==========  =============  =====================  ==============================
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gristmill.kernel_registry.arguments import ROWS, STRIDED, Scalar, Tensor
from gristmill.kernel_registry.kernel import ConfigValue
from gristmill.kernel_registry.op import Tolerance
from gristmill.kernel_registry.problem import Axis, Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.code_intervals import outside
from gristmill.kernels.common import FLOATS, ITEM_BYTES
from gristmill.kernels.given_codes import GROUPS
from gristmill.kernels.random_inputs import Draw

if TYPE_CHECKING:
    import torch

AXES = (
    Axis("m", "int", "rows (tokens)", dynamic=True),
    Axis("n", "int", "length of an output row", minimum=1),
    Axis("x", "dtype", "dtype of x", default="bf16", choices=FLOATS),
    Axis("q", "dtype", "dtype of the codes", default="fp8", choices=("fp8", "int8")),
    Axis(
        "format", "choice", "what shares a scale, and the codes", default="fp8_token", choices=tuple(GROUPS)
    ),
)
ARGUMENTS = (
    Tensor("codes", "... n", dtype="q", strides=ROWS, mutable=True),
    Tensor("scales", "rows groups", dtype="fp32", strides=STRIDED, mutable=True),
    Scalar("format", "str"),
)


def misfit(problem: Problem) -> str | None:
    """Why the dtype of the codes is not the format's; None if it is."""
    q, text = problem.text("q"), problem.text("format")
    return None if text.startswith(q) else f"the codes of {text} are {text.partition('_')[0]}, got {q}"


def config_of(problem: Problem) -> dict[str, ConfigValue]:
    """What a launcher needs of the format: columns of a group (0: a row), lower bound of amax (0: the scale is given), largest
    code."""
    text = problem.text("format")
    least = 0.0 if text == "fp8" else 1e-4 if text == "fp8_g128" else 1e-10
    return {"group": GROUPS[text], "least": least, "top": 127.0 if text.startswith("int8") else 448.0}


def as_stored(codes: torch.Tensor) -> torch.Tensor:
    """The same codes as kernels in Triton store them: int8, or the bytes of e4m3."""
    import torch

    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)


def quantize_into(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, format: str) -> None:
    """Codes and scales of values [..., N]."""
    from gristmill.quant.activations import quantize_activation

    quantized = quantize_activation(values, format, scale=scales.view(1) if format == "fp8" else None)
    codes.copy_(quantized.values)
    scales.copy_(quantized.scales.view(scales.shape))


def empty(draw: Draw) -> list[object]:
    """Codes and scales to write, and the format; the scale of a tensor is given."""
    import torch

    from gristmill.kernels.common import torch_dtype

    problem = draw.problem
    m, n, text = *problem.integers("m", "n"), problem.text("format")
    shape = (1, 1) if text == "fp8" else (m, cdiv(n, GROUPS[text] or n))
    codes = torch.zeros(m, n, dtype=torch_dtype(problem.text("q")), device=draw.device)
    return [codes, torch.full(shape, 1 / 64, dtype=torch.float32, device=draw.device), text]


def written_bytes(problem: Problem) -> int:
    """Bytes of codes and scales."""
    m, n = problem.integers("m", "n")
    size = GROUPS[problem.text("format")] or n
    return m * n * ITEM_BYTES["int8"] + (4 if problem.text("format") == "fp8" else 4 * m * cdiv(n, size))


def error(problem: Problem, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> float:
    """How far `values` of the reference [M, N] are from all values that round to the codes: |Δ| / max(|value|, RMS of its row / 1000);
    and how far the scales are from those of the values, relative. Infinite for a given scale that has changed."""
    import torch

    from gristmill.quant.activations import quantize_activation

    text = problem.text("format")
    if not codes.numel():
        return 0.0
    if text == "fp8":
        worst = 0.0 if bool((scales == 1 / 64).all()) else math.inf
    else:
        expected = quantize_activation(values, text).scales.view(scales.shape)
        worst = float((scales.double() / expected.double() - 1).abs().max())
    size = GROUPS[text] or values.shape[-1]
    scale = scales.double().repeat_interleave(size, -1)[:, : values.shape[-1]]
    exact = values.double()
    gap = outside(codes, exact / scale) * scale
    rms = exact.square().mean(-1, keepdim=True).sqrt()
    least = torch.maximum(exact.abs(), 1e-3 * rms).clamp_min(1e-30)
    return max(worst, float((gap / least).max()))


def tolerance(problem: Problem) -> Tolerance:
    """One rounding of the dtype, in which the values are before they are quantized."""
    return Tolerance("codes", {"fp32": 4e-6, "fp16": 1.1e-3, "bf16": 8.5e-3}[problem.text("x")])
