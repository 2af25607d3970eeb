"""linear_w8a8_tensor_sm90 without a GPU: what it accepts, its workspaces, and its launcher, by entries that are written in torch here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels import native
from gristmill.kernels.linear import w8a8_tensor_sm90
from gristmill.kernels.linear.w8a8_sm90 import _launch
from gristmill.kernels.linear.w8a8_tensor_sm90 import room_of
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w8a8_tensor_sm90")
OF_ROWS = default_registry().kernel("linear", "linear_w8a8_sm90")
HOPPER = Target.parse("sm_90")
DTYPES = {1: torch.float16, 2: torch.bfloat16}


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=fp8.fp8", None),
        ("m=0,n=8,k=16,x=fp16,w=fp8_ch.fp8,epilogue=bias+residual+silu_mul,codes=true", None),
        ("m=1,n=64,k=256,w=fp8.fp8_token", "not fp8.fp8_token"),
        ("m=1,n=64,k=256,w=fp8", "not fp8"),
        ("m=1,n=64,k=264,w=fp8.fp8", "K a multiple of 16"),
        ("m=1,n=64,k=256,x=fp32,w=fp8.fp8", "fp16 or bf16"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not KERNEL.requires.check_hardware(HOPPER)


@pytest.mark.parametrize("m", [0, 1, 17, 257, 4096])
@pytest.mark.parametrize(("n", "k"), [(7, 272), (2112, 7168), (24576, 1536)])
def test_products_are_those_with_scales_of_rows(m: int, n: int, k: int) -> None:
    problem, twin = (OP.problem(f"m={m},n={n},k={k},w={w}") for w in ("fp8.fp8", "fp8.fp8_token"))
    assert list(KERNEL.space(problem, HOPPER)) == list(OF_ROWS.space(twin, HOPPER))
    assert KERNEL.config(problem, HOPPER) == OF_ROWS.config(twin, HOPPER)
    mine, of_rows = KERNEL.estimate(problem, HOPPER), OF_ROWS.estimate(twin, HOPPER)
    assert mine is not None and of_rows is not None and mine > of_rows
    given, of_rows = (
        kernel.estimate(one.with_values(codes=True), HOPPER)
        for kernel, one in ((KERNEL, problem), (OF_ROWS, twin))
    )
    assert given == of_rows


def numbers(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory at an address."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype, count=count)


def quantize_in_torch(args: Any) -> int:
    """gm_quantize_fp8_sm90."""
    assert args.format == 2 and args.ldx >= args.k and args.ldx % 8 == 0 and args.x % 16 == 0
    x = numbers(args.x, (args.m - 1) * args.ldx + args.k, DTYPES[args.x_type]).as_strided(
        (args.m, args.k), (args.ldx, 1)
    )
    made = quantize_activation(x, "fp8")
    numbers(args.maxima, 256, torch.float32).fill_(float("nan"))
    numbers(args.codes, args.m * args.k, torch.uint8).copy_(made.values.view(torch.uint8).flatten())
    numbers(args.scales, args.m, torch.float32).copy_(made.scales.expand(args.m))
    return 0


def multiply_in_torch(args: Any) -> int:
    """gm_linear_w8a8_fp8_sm90."""
    m, n, k, dtype = args.m, args.n, args.k, DTYPES[args.y_type]
    assert args.ldx == k and args.w_type == 0

    def floats(codes: int, scales: int, rows: int) -> torch.Tensor:
        values = numbers(codes, rows * k, torch.float8_e4m3fn).float().view(rows, k)
        return values * numbers(scales, rows, torch.float32).view(rows, 1)

    z = floats(args.x, args.x_scale, m) @ floats(args.w, args.w_scale, n).T
    if args.bias:
        z += numbers(args.bias, n, dtype)
    if args.residual:
        z += numbers(args.residual, m * n, dtype).view(m, n)
    numbers(args.y, m * n, dtype).copy_(z.flatten())
    return 0


ENTRIES = {
    "gm_quantize_fp8_sm90": quantize_in_torch,
    "gm_linear_w8a8_fp8_sm90": multiply_in_torch,
}


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (native, _launch):
        monkeypatch.setattr(module, "cuda_entry", lambda name, args: ENTRIES[name])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))


def launched(problem: str, x: torch.Tensor, given: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of the launcher in a workspace that holds NaN, and that of the operation's reference."""
    parsed = OP.problem(problem)
    (m, n, k), flags = parsed.integers(*"mnk"), parsed.flags("epilogue")
    generator = torch.Generator().manual_seed(m + n)
    stored = quantize(torch.randn(n, k, generator=generator), parsed.text("w").partition(".")[0])
    columns = n // 2 if "silu_mul" in flags else n
    bias = torch.randn(n, generator=generator).to(x.dtype) if "bias" in flags else None
    residual = torch.randn(m, columns, generator=generator).to(x.dtype) if "residual" in flags else None
    made = quantize_activation(x, "fp8")
    out = torch.full((m, columns), float("nan"), dtype=x.dtype)
    room = KERNEL.workspace(parsed, {}).bytes
    call = make_call(
        "linear",
        x,
        pack(stored, "plain_v1").tensors,
        bias,
        residual,
        "silu_mul" in flags,
        columns,
        torch.full((room,), 255, dtype=torch.uint8),
        codes=made.values if given else None,
        scales=made.scales.view(1, 1) if given else None,
        out=out,
    )
    w8a8_tensor_sm90.launch(KERNEL.config(parsed, HOPPER), call)
    z = made.dequantize() @ stored.dequantize().T
    z = z if bias is None else z + bias.float()
    if "silu_mul" in flags:
        z = torch.nn.functional.silu(z[:, :columns]) * z[:, columns:]
    return out, z if residual is None else z + residual.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "epilogue"),
    [
        (1, 64, 128, "none"),
        (7, 257, 272, "bias"),
        (33, 66, 16, "bias+silu_mul"),
        (65, 40, 144, "bias+residual"),
    ],
)
@pytest.mark.usefixtures("in_torch")
def test_the_launcher(m: int, n: int, k: int, epilogue: str, given: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    wide = torch.randn(m, k + 8, generator=generator).to(dtype)
    for x in (
        wide[:, :k].contiguous(),
        wide[:, :k],
        wide[:, 3 : k + 3],
    ):  # one that loads of 16 bytes cannot read
        for w in ("fp8.fp8", "fp8_ch.fp8"):
            problem = f"m={m},n={n},k={k},x={'bf16' if dtype == torch.bfloat16 else 'fp16'},w={w},epilogue={epilogue}"
            found, expected = launched(f"{problem},codes={str(given).lower()}", x, given)
            torch.testing.assert_close(found.float(), expected, rtol=2**-6, atol=2**-5)


@pytest.mark.usefixtures("in_torch")
def test_a_scale_that_is_not_copied_to_every_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_row_alone(args: Any) -> int:
        code = quantize_in_torch(args)
        numbers(args.scales, args.m, torch.float32)[1:] = float("nan")
        return code

    monkeypatch.setitem(ENTRIES, "gm_quantize_fp8_sm90", first_row_alone)
    x = torch.randn(3, 128).bfloat16()
    found, _ = launched("m=3,n=64,k=128,w=fp8.fp8", x)
    assert not found[0].isnan().any() and found[1:].isnan().all()


def test_the_parts_of_a_workspace_are_apart() -> None:
    for m, k, gated in ((1, 16, 0), (7, 272, 64), (257, 2880, 130)):
        room = room_of(m, k, gated, False)
        assert (
            m * k <= room.scales and room.scales + 4 * m <= room.maxima and room.maxima + 1024 <= room.gated
        )
        assert room.gated + 2 * m * gated == room.size and not (room.scales | room.maxima | room.gated) % 16
        given = room_of(m, k, gated, True)
        assert given.scales == 0 and 4 * m <= given.gated and given.gated + 2 * m * gated == given.size


@pytest.mark.parametrize("changed", ["codes", "scales", "perm"])
def test_weights_of_another_shape_are_refused(changed: str) -> None:
    slots = dict(pack(quantize(torch.randn(64, 272), "fp8_ch"), "plain_v1").slots)
    slots[changed] = {
        "codes": torch.zeros(64, 256, dtype=torch.uint8),
        "scales": torch.ones(63, 1),
        "perm": torch.arange(272, dtype=torch.int32),
    }[changed]
    x, out = torch.randn(1, 272).bfloat16(), torch.empty(1, 64).bfloat16()
    config = KERNEL.config(OP.problem("m=1,n=64,k=272,w=fp8_ch.fp8"), HOPPER)
    with pytest.raises(ValueError, match="linear_w8a8_tensor_sm90: expected codes"):
        w8a8_tensor_sm90.launch(
            config, make_call("linear", x, list(slots.values()), None, None, False, 64, None, out)
        )
