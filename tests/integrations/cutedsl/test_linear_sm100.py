"""Linear on data-centre Blackwell: what its programs are given, by programs in torch in their place, and what launches refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.cutedsl_sm100 import dense, fp8
from gristmill.kernels.linear.op import gated
from gristmill.kernels.linear.w8a8_sm80 import _launch_sm89
from gristmill.kernels.linear.w8a8_sm80._launch import Rows
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from gristmill.quant.sharding import concat
from gristmill.quant.tensor import QuantTensor
from tests.calls import make_call

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

LINEAR, TARGET = default_registry().op("linear"), Target.parse("sm_100")
SCHEMES = ("fp8_block.fp8_g128", "fp8_ch.fp8_token", "fp8.fp8_token")


def ended(config: Config, sums: Tensor, bias: Tensor, residual: Tensor, out: Tensor) -> None:
    """What a program of this configuration does with float32 sums [M, N]."""
    flags = str(config["epilogue"]).split("+")
    z = sums + bias.float() if "bias" in flags else sums
    z = gated(z) if "silu_mul" in flags else z
    out.copy_(z + residual.float() if "residual" in flags else z)


def fp8_in_torch(config: Config, seen: list[Tensor]) -> Callable[..., None]:
    """The program of a configuration in torch; `seen` gets the tensors that it reads."""

    def run(x: Tensor, w: Tensor, x_scales: Tensor, w_scales: Tensor, rows: Tensor, *rest: Tensor) -> None:
        seen.extend([x, x_scales])
        factors = w_scales[rows.long()] if config["blocks"] else w_scales
        left, right = (
            codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)[:, : codes.shape[1]]
            if config["blocks"]
            else codes.view(torch.float8_e4m3fn).float() * scales
            for codes, scales in ((x, x_scales), (w, factors))
        )
        ended(config, left @ right.T, *rest[:3])

    return run


def fp8_call(x: Tensor, weight: QuantTensor, epilogue: tuple[str, ...], **codes: Tensor | None) -> LinearCall:
    """A call with what the epilogue names."""
    n, generator = weight.shape[0], torch.Generator().manual_seed(1)
    columns = n // 2 if "silu_mul" in epilogue else n
    return call_of(x, list(pack(weight, "plain_v1").slots.values()), n, columns, epilogue, generator, **codes)


def call_of(
    x: Tensor,
    weight: list[Tensor],
    n: int,
    columns: int,
    epilogue: tuple[str, ...],
    generator: torch.Generator,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> LinearCall:
    call: LinearCall = make_call(
        "linear",
        x=x,
        weight=weight,
        bias=torch.randn(n, generator=generator).to(x.dtype) if "bias" in epilogue else None,
        residual=torch.randn(*x.shape[:-1], columns, generator=generator).to(x.dtype)
        if "residual" in epilogue
        else None,
        silu_mul="silu_mul" in epilogue,
        n=n,
        codes=codes,
        scales=scales,
        out=torch.empty(*x.shape[:-1], columns, dtype=x.dtype),
    )
    return call


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("epilogue", [(), ("bias", "residual", "silu_mul")])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_fp8_program_is_given_what_it_reads(
    scheme: str, epilogue: tuple[str, ...], given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whole blocks, and for blocks that were cut and joined; with codes, and with those that the quantizer writes into the workspace."""
    seen: list[Tensor] = []
    monkeypatch.setattr(fp8, "program", lambda build, config: fp8_in_torch(config, seen))

    def quantizer(config: Config, rows: Rows) -> None:
        act = quantize_activation(rows.x.reshape(rows.m, rows.k), str(config["activation"]))
        pitch = (rows.m + 3) // 4 * 4
        placed = torch.zeros(act.scales.shape[1], pitch)
        placed[:, : rows.m] = act.scales.T
        ctypes.memmove(rows.codes, act.values.contiguous().data_ptr(), rows.m * rows.k)
        ctypes.memmove(rows.scales, placed.data_ptr(), placed.nbytes)

    monkeypatch.setattr(_launch_sm89, "quantize", quantizer)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.cuda.Stream)
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 0, raising=False)
    generator = torch.Generator().manual_seed(0)
    stored = QuantScheme.parse(scheme).without_activation
    whole = quantize(torch.randn(384, 272, generator=generator), stored)
    x = torch.randn(3, 3, 272, generator=generator).bfloat16()
    act = quantize_activation(x.view(9, 272), str(QuantScheme.parse(scheme).activation))
    kernel = default_registry().kernel("linear", "linear_fp8_cutedsl_sm100")
    for weight in (whole, concat([whole.narrow(0, 64, 72), whole.narrow(0, 200, 136)], -2)):
        flags = "+".join(epilogue) or "none"
        problem = LINEAR.problem(
            f"m=9,n={weight.shape[0]},k=272,w={scheme},epilogue={flags},codes={str(given).lower()}"
        )
        codes = act.values.view(3, 3, 272) if given else None
        call = fp8_call(x, weight, epilogue, codes=codes, scales=act.scales if given else None)
        config = kernel.config(problem, TARGET)
        call = call.replace(workspace=torch.zeros(kernel.workspace(problem, config).bytes, dtype=torch.uint8))
        fp8.launch(config, call)
        expected = torch.empty_like(call.out).view(9, -1)
        bias, residual = (expected if one is None else one for one in (call.bias, call.residual))
        sums = act.dequantize() @ weight.dequantize("fp32").T
        ended(config, sums, bias, residual.reshape(expected.shape), expected)
        torch.testing.assert_close(call.out.view(9, -1), expected, rtol=2**-7, atol=1e-2)
        # TMA reads them: rows of 16 bytes, scales of a group behind each other, groups 16 bytes apart.
        codes_of_x, scales = seen[-2:]
        assert codes_of_x.stride(0) % 16 == 0 and scales.stride(0) == 1 and scales.stride(1) % 4 == 0


@pytest.mark.parametrize("epilogue", [(), ("bias",), ("bias", "residual", "silu_mul")])
@pytest.mark.parametrize("strides", ["rows", "apart", "unaligned"])
def test_the_dense_program_is_given_what_it_reads(
    strides: str, epilogue: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    def in_torch(config: Config) -> Callable[..., None]:
        def run(x: Tensor, w: Tensor, *rest: Tensor) -> None:
            seen.append(x)
            ended(config, x.float() @ w.float().T, *rest[:3])

        return run

    monkeypatch.setattr(dense, "program", lambda build, config: in_torch(config))
    generator = torch.Generator().manual_seed(0)
    width = {"rows": 72, "apart": 80, "unaligned": 75}[strides]
    x = torch.randn(9, width, generator=generator).half()[:, :72]
    weight = torch.randn(48, 72, generator=generator).half()
    call = call_of(x, [weight], 48, 24 if "silu_mul" in epilogue else 48, epilogue, generator)
    problem = LINEAR.problem(f"m=9,n=48,k=72,x=fp16,w=fp16,epilogue={'+'.join(epilogue) or 'none'}")
    dense.launch(default_registry().kernel("linear", "linear_cutedsl_sm100").config(problem, TARGET), call)
    expected = LINEAR.reference(x, [weight], call.bias, call.residual, call.silu_mul)
    torch.testing.assert_close(call.out, expected, rtol=2**-9, atol=2e-3)
    assert (seen[0].data_ptr() == x.data_ptr()) is (strides != "unaligned")
    assert seen[0].stride(0) % 8 == 0


def test_a_launch_says_what_is_wrong_with_a_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    x, wide = (torch.randn(rows, 272, generator=generator).bfloat16() for rows in (9, 64))
    config = (
        default_registry()
        .kernel("linear", "linear_cutedsl_sm100")
        .config(LINEAR.problem("m=9,n=64,k=264"), TARGET)
    )
    with pytest.raises(ValueError, match=r"start at multiples of 16 bytes, got strides \(272, 1\)"):
        dense.launch(config, call_of(x[:, :264], [wide[:, 4:268]], 64, 64, (), generator))

    kernel = default_registry().kernel("linear", "linear_fp8_cutedsl_sm100")
    weight = quantize(wide, "fp8_block")
    problem = LINEAR.problem("m=9,n=64,k=272,w=fp8_block.fp8_g128")
    call = fp8_call(x, weight, ())
    rows_only = kernel.config(LINEAR.problem("m=9,n=64,k=272,w=fp8_ch.fp8_token"), TARGET)
    with pytest.raises(
        ValueError, match=r"expected scales one for each of 64 rows, got \[1, 3\] and 64 block"
    ):
        fp8.launch(rows_only, call)
    by_rows = fp8_call(x, quantize(wide, "fp8_ch"), ())
    with pytest.raises(
        ValueError, match=r"block rows, 3\] with a block row for each of 64 rows, got \[64, 1\] and 0"
    ):
        fp8.launch(kernel.config(problem, TARGET), by_rows)
    permuted = call.replace(weight=[*call.weight[:5], torch.arange(272, dtype=torch.int32)])
    with pytest.raises(ValueError, match=r"expected codes \[64, 272\].* and a permutation"):
        fp8.launch(kernel.config(problem, TARGET), permuted)
    small = call.replace(workspace=torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"workspace must be 2592 contiguous bytes"):
        fp8.launch(kernel.config(problem, TARGET), small)


def test_nothing_is_launched_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "program", lambda build, config: pytest.fail("launched"))
    call = call_of(torch.zeros(0, 64).half(), [torch.zeros(64, 64).half()], 64, 64, (), torch.Generator())
    dense.launch({"ctas": 1}, call)
