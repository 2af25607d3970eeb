"""Block-scaled codes in Triton: x is quantized bit for bit as the reference does it, and the interpreter's dot_scaled is right."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry import Target, default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.interpreter import install
from gristmill.kernels.linear.block_scaled_triton import kernel as block_scaled
from gristmill.kernels.linear.block_scaled_triton.quantize import OPERANDS
from gristmill.kernels.linear.block_scaled_triton.quantize import quantize as quantize_rows
from gristmill.quant.activations import quantize_activation
from gristmill.quant.packed import pack
from gristmill.quant.rtn import quantize

triton = pytest.importorskip("triton", reason="triton is not installed")
OP = default_registry().op("linear")
MX, NVFP4 = (default_registry().kernel("linear", f"linear_{name}_triton") for name in ("mx", "nvfp4"))


@pytest.fixture(autouse=True)
def repaired() -> None:
    install()


def rows(m: int, k: int) -> torch.Tensor:
    """Magnitudes from subnormals to the largest, ties of every format, zeros of both signs, a row of zeros."""
    generator = torch.Generator().manual_seed(m * k)
    x = torch.randn(m, k, generator=generator) * 2.0 ** torch.randint(-20, 20, (m, 1), generator=generator)
    x[0] = 0
    x[1, :16] = torch.tensor(
        [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.0, -0.25, -5.0, 7.0, 448, 1e-40, 3e38, 0]
    )
    x[2] *= 1e-44 / x[2].abs().max()
    return x


@pytest.mark.parametrize("form", OPERANDS)
@pytest.mark.parametrize(("m", "k"), [(3, 32), (5, 1056), (300, 96)])
def test_x_is_quantized_bit_for_bit(form: str, m: int, k: int) -> None:
    x = rows(m, k)
    of_x, scheme = OPERANDS[form], f"{form}.{form}"
    sizes = block_scaled._sizes(scheme, m, k)
    codes, scales = (torch.full((size,), 0xAA, dtype=torch.uint8) for size in sizes[:2])
    factor = torch.full((sizes[2] // 4,), float("nan"))
    quantize_rows(of_x, x, m, k, codes, scales, factor)
    expected = quantize_activation(x, form)
    count = m * k // of_x.packed
    assert torch.equal(codes[:count].view(m, -1), expected.values.view(torch.uint8))
    assert torch.equal(scales[: m * (k // of_x.group)].view(m, -1), expected.scales.view(torch.uint8))
    assert torch.equal(codes[count:], torch.full_like(codes[count:], 0xAA)), "written past the codes"
    if expected.global_scale is not None:
        assert torch.equal(factor[:1], expected.global_scale)


@pytest.mark.parametrize("form", ["mxfp8", "mxfp4"])
def test_a_group_without_numbers_has_no_scale(form: str) -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = float("inf"), float("nan")
    of_x = OPERANDS[form]
    codes, scales = (
        torch.zeros(size, dtype=torch.uint8) for size in block_scaled._sizes(f"{form}.{form}", 2, 64)[:2]
    )
    quantize_rows(of_x, x, 2, 64, codes, scales, torch.zeros(0))
    assert scales[:4].tolist() == quantize_activation(x, form).scales.flatten().tolist()
    assert scales[0] == 255 and scales[3] == 255 and scales[1] != 255


def call(scheme: str, x: torch.Tensor, n: int, **more: object) -> tuple[object, torch.Tensor]:
    """(a call of the operation, its weight's values)."""
    weight = quantize(torch.randn(n, x.shape[-1]), QuantScheme.parse(scheme).without_activation)
    tensors = list(pack(weight, "plain_v1").tensors)
    out = torch.full((*x.shape[:-1], n), float("nan"), dtype=x.dtype)
    fields = {"bias": None, "residual": None, "silu_mul": False, "n": n, "workspace": None, **more}
    from types import SimpleNamespace

    return SimpleNamespace(x=x, weight=tensors, out=out, **fields), weight.dequantize()


@pytest.mark.parametrize("scheme", [*block_scaled.MX, *block_scaled.NVFP4])
def test_strided_rows_and_a_workspace(scheme: str) -> None:
    """Rows of x far apart; a workspace that is poisoned, and one that is too small."""
    x = torch.randn(4, 200)[:, :96]
    kernel = NVFP4 if "nvfp4" in scheme else MX
    problem = OP.problem(f"m=4,n=24,k=96,x=fp32,w={scheme}")
    config = kernel.config(problem, Target.parse("sm_100"))
    size = kernel.workspace(problem, config).bytes
    made, weight = call(scheme, x, 24, workspace=torch.full((size,), 0xFF, dtype=torch.uint8))
    block_scaled.launch(config, made)
    exact = (
        quantize_activation(x.contiguous(), str(QuantScheme.parse(scheme).activation)).dequantize() @ weight.T
    )
    assert torch.allclose(made.out, exact, rtol=1e-5, atol=1e-4)
    made.workspace = made.workspace[:-256]
    with pytest.raises(ValueError, match="workspace must be"):
        block_scaled.launch(config, made)


def test_another_weight_is_refused_by_name() -> None:
    made, _ = call("mxfp8.mxfp8", torch.randn(2, 64), 16)
    made.weight[0] = made.weight[0][:, :32]
    with pytest.raises(ValueError, match=r"expected codes \[16, 64\] and scales \[16, 2\]"):
        block_scaled.launch(
            MX.config(OP.problem("m=2,n=16,k=64,w=mxfp8.mxfp8"), Target.parse("sm_100")), made
        )


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MX, "m=1,n=8,k=64,w=mxfp4.mxfp8", None),
        (MX, "m=1,n=8,k=64,w=nvfp4.nvfp4", "not nvfp4.nvfp4"),
        (MX, "m=1,n=8,k=64,w=mxfp4", "not mxfp4"),
        (NVFP4, "m=1,n=8,k=48,w=nvfp4.nvfp4", None),
        (NVFP4, "m=1,n=8,k=64,w=mxfp4.mxfp4", "not mxfp4.mxfp4"),
    ],
)
def test_accepts(kernel: object, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["sm_90", "sm_89", "gfx942", "gfx1201"])
def test_targets_without_block_scales(name: str) -> None:
    for kernel in (MX, NVFP4):
        assert "lacks" in kernel.requires.check_hardware(Target.parse(name))[0]
    assert NVFP4.requires.check_hardware(Target.parse("gfx950")) and not MX.requires.check_hardware(
        Target.parse("gfx950")
    )
