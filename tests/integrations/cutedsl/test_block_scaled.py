"""linear_block_scaled_cutedsl_sm100 with CuTe DSL: CuTe's layout of scales is that of the weights, the program is given what it reads, and its PTX
copies and multiplies the scales of every slot."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cutlass import cute
from cutlass.utils.blockscaled_layout import BlockScaledBasicChunk

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import compile_program
from gristmill.kernels.interpreter import install
from gristmill.kernels.linear.block_scaled_cutedsl import spec
from gristmill.kernels.linear.block_scaled_cutedsl._product_sm100 import product
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS, tensor_memory
from gristmill.quant import numeric, pack, quantize
from gristmill.quant.activations import quantize_activation
from gristmill.quant.layouts._scales128x4 import tiled, untiled
from tests.calls import make_call

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_block_scaled_cutedsl_sm100")
B200 = Target.parse("sm_100")


@pytest.mark.parametrize(("rows", "columns", "group"), [(300, 160, 16), (128, 4096, 32), (257, 96, 32)])
def test_tiles_of_scales_are_those_of_cute(rows: int, columns: int, group: int) -> None:
    places: list[int] = []

    @cute.jit
    def record():
        layout = cute.tile_to_shape(BlockScaledBasicChunk(group).layout, (rows, columns), (2, 1))
        places.extend(layout((row, column)) for row in range(rows) for column in range(0, columns, group))

    cute.compile(record, options="--gpu-arch sm_100a")
    scales = torch.randint(1, 256, (rows, columns // group), dtype=torch.uint8)
    stored = tiled(scales).flatten()
    assert torch.equal(stored[torch.tensor(places)], scales.flatten())
    assert int((stored != 0).sum()) == scales.numel()


def values(codes: torch.Tensor, scales: torch.Tensor, kind: str, group: int) -> torch.Tensor:
    """Codes [rows, bytes] and tiles of scales as a program reads them, in float64."""
    packed = kind == "e2m1"
    numbers = numeric.e2m1_decode(numeric.unpack_bits(codes, 4, codes.shape[1] * 2)) if packed else codes
    numbers = (numbers if packed else codes.view(torch.float8_e4m3fn)).double()
    per_group = untiled(scales, numbers.shape[0], numbers.shape[1] // group)
    decoded = per_group.view(torch.float8_e4m3fn).double() if group == 16 else None
    decoded = numeric.e8m0_decode(per_group).double() if decoded is None else decoded
    return numbers * decoded.repeat_interleave(group, 1)


def in_torch(config: dict[str, object]) -> Callable[..., None]:
    """The program of a configuration in torch."""
    form, flags = FORMS[str(config["scheme"])], str(config["epilogue"]).split("+")

    def program(x, x_scales, w, w_scales, factor, factors, bias, residual, out, ctas) -> None:
        assert 1 <= ctas <= int(config["ctas"]) and out.shape[0] == x.shape[0]
        assert x.stride() == (x.shape[1], 1) and w.stride() == (w.shape[1], 1)
        z = values(x, x_scales, form.x, form.group) @ values(w, w_scales, form.w, form.group).T
        if form.group == 16:
            z = z * factors.double() * factor.double()
        if "bias" in flags:
            z = z + bias.double()
        if "silu_mul" in flags:
            assert w.shape[0] % 256 == 0, "up begins in the middle of a tile of scales"
            gate, up = z.chunk(2, -1)
            z = torch.nn.functional.silu(gate) * up
        if "residual" in flags:
            z = z + residual.double()
        assert z.shape == out.shape
        out.copy_(z)

    return program


@pytest.mark.parametrize("scheme", FORMS)
@pytest.mark.parametrize(
    ("shape", "epilogue"),
    [
        ((9, 264, 384), "none"),
        ((131, 512, 128), "bias+residual+silu_mul"),
        ((5, 48, 256), "bias+residual+silu_mul"),
    ],
)
def test_the_program_is_given_what_it_reads(
    scheme: str, shape: tuple[int, int, int], epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program in torch: gating within it, and after it."""
    install()
    monkeypatch.setattr(spec, "program", lambda build, config: in_torch(config))
    (m, n, k), flags = shape, epilogue.split("+")
    generator = torch.Generator().manual_seed(n)
    weight = quantize(torch.randn(n, k, generator=generator), QuantScheme.parse(scheme).without_activation)
    x = torch.randn(m, k, generator=generator).bfloat16()
    columns = n // 2 if "silu_mul" in flags else n
    bias = torch.randn(n, generator=generator).bfloat16() if "bias" in flags else None
    residual = torch.randn(m, columns, generator=generator).bfloat16() if "residual" in flags else None
    out = torch.full((m, columns), float("nan"), dtype=torch.bfloat16)
    problem = OP.problem(f"m={m},n={n},k={k},w={scheme},epilogue={epilogue}")
    config = KERNEL.config(problem, B200)
    spec.launch(
        config,
        make_call(
            "linear",
            x=x,
            weight=pack(weight, "scales128x4_v1").tensors,
            bias=bias,
            residual=residual,
            silu_mul="silu_mul" in flags,
            n=n,
            workspace=torch.full((KERNEL.workspace(problem, config).bytes,), 0xFF, dtype=torch.uint8),
            out=out,
        ),
    )
    given = quantize_activation(x, str(QuantScheme.parse(scheme).activation)).dequantize().double()
    z = given @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    if "silu_mul" in flags:
        gate, up = z.chunk(2, -1)
        z = torch.nn.functional.silu(gate) * up
    expected = z + (0 if residual is None else residual.double())
    torch.testing.assert_close(out.double(), expected, rtol=2**-6, atol=0.05)


def test_another_weight_is_refused_by_name() -> None:
    weight = quantize(torch.randn(64, 128), "nvfp4")
    tensors = list(pack(weight, "scales128x4_v1").tensors)
    tensors[1] = tensors[1][:, :1]
    config = KERNEL.config(OP.problem("m=2,n=64,k=128,w=nvfp4.nvfp4"), B200)
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    call = make_call(
        "linear", x=torch.zeros(2, 128, dtype=torch.bfloat16), weight=tensors, silu_mul=False, n=64, out=out
    )
    expected = r"expected codes \[64, 64\], scales \[1, 2, 512\] and 64 multipliers of rows, got \[64, 64\], \[1, 1, 512\] and 64"
    with pytest.raises(ValueError, match=expected):
        spec.launch(config, call)


class Ptx:
    """Addresses in PTX, as a register and what was added to it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sums = {
            to: (of, int(by)) for to, of, by in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (-?\d+);", text)
        }
        # Where a register is added, it is the half of a tile of scales that 64 rows of W have, 0 or 2 columns.
        twice = set(re.findall(r"shl\.b32\s+(%r\d+), %r\d+, 1;", text))
        added = re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (%r\d+);", text)
        self.halves = {to: of for to, half, of in added if half in twice}
        self.sums |= {to: (of, 0) for to, of in self.halves.items()}
        self.pairs = dict(re.findall(r"mov\.b64\s+(%rd\d+), \{(%r\d+), %r\d+\};", text))

    def at(self, register: str) -> tuple[str, int]:
        """The register that an address is reached from, and the distance."""
        added = 0
        while register in self.sums:
            register, by = self.sums[register]
            added += by
        return register, added

    def is_half(self, register: str) -> bool:
        """Whether a half was added on the way to an address."""
        while register not in self.halves:
            if register not in self.sums:
                return False
            register, _ = self.sums[register]
        return True

    def found(self, instruction: str) -> list[tuple[str, ...]]:
        """The operands of an instruction."""
        lines = re.findall(rf"\b{re.escape(instruction)}[\w.:]*\s+([^;]*);", self.text)
        return [tuple(re.findall(r"%\w+", line)) for line in lines]


@pytest.mark.parametrize(
    ("scheme", "bn"),
    [
        ("nvfp4.nvfp4", 256),
        ("nvfp4.nvfp4", 64),
        ("mxfp4.mxfp4", 128),
        ("mxfp8.mxfp8", 256),
        ("mxfp4.mxfp8", 128),
    ],
)
def test_products_are_described_and_find_their_scales(scheme: str, bn: int, tmp_path: Path) -> None:
    """A tile of scales, 512 bytes of a slot, goes to 4 columns of tensor memory; those of all rows of W and one part of K are next to each other.
    A product of 64 or 32 columns of K is given the column of the tile, and in bits 30 and 31 which of its 4 groups comes first."""
    form, tiles_w = FORMS[scheme], cdiv(bn, 128)
    config = spec._config(scheme, bn, "none", "bf16", 148, B200)
    compile_program(product(config), "sm_100a", "--keep-ptx", f"--dump-dir={tmp_path}")
    ptx = Ptx(next(tmp_path.glob("*.ptx")).read_text(encoding="utf-8"))
    across = form.columns // form.group // 4  # tiles of a slot along K
    base = tensor_memory(bn).of_x
    copied: dict[int, tuple[str, int]] = {}
    for to, source in ptx.found("tcgen05.cp.cta_group::1.32x128b.warpx4"):
        root, place = ptx.at(ptx.pairs[source])
        copied[ptx.at(to)[1] - base] = (root, place)
    x_root, w_root = copied[0][0], copied[16][0]
    assert x_root != w_root
    # Addresses of shared memory count 16 bytes.
    expected = {4 * part: (x_root, 32 * part) for part in range(across)}
    for part in range(across):
        for tile in range(tiles_w):
            expected[16 + 4 * (part * tiles_w + tile)] = (w_root, 32 * (tile * across + part))
    assert copied == expected
    products = ptx.found("tcgen05.mma.cta_group::1")
    step = (64 if form.x == "e2m1" else 32) // form.group  # groups of a product
    assert len(products) % 4 == 0
    for index, operands in enumerate(products):
        tile, first = divmod(index % 4 * step, 4)
        of_x, of_w = (ptx.at(register)[1] & 0xFFFFFFFF for register in operands[4:6])
        assert ptx.is_half(operands[5]) == (bn < 128) and not ptx.is_half(operands[4])
        assert of_x == (first << 30) + base + 4 * tile
        assert of_w == (first << 30) + base + 16 + 4 * tile * tiles_w
    # The instruction descriptor (PTX ISA): types of x and W, N / 8, whether scales are e8m0, M / 128. A bit that negates x is chosen at run time.
    (described,) = {
        int(without)
        for negated, without in re.findall(r"selp\.b32\s+%r\d+, (\d+), (\d+), %p\d+;", ptx.text)
        if int(negated) - int(without) == 1 << 13
    }
    types = {"e4m3": 0, "e2m1": 5} if "e4m3" in (form.x, form.w) else {"e2m1": 1}
    fields = types[form.x] << 7 | types[form.w] << 10 | bn // 8 << 17 | (form.group == 32) << 23 | 1 << 27
    assert described == fields
