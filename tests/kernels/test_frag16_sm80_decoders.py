"""The decoders of linear/frag16_sm80, of every source and over every code and scale: their PTX, run on the CPU, against the dequantized weight."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format
from gristmill.quant import QuantTensor, numeric, pack
from gristmill.quant.layouts.w4_frag16_v1 import groups_per_tile
from tests.kernels import machine_code, ptx_on_cpu

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels/linear/frag16_sm80"
CASES = [(form, scheme) for form in FORMATS for scheme in form.schemes]
NAMES = [f"{scheme}_k" if form.factored else scheme for form, scheme in CASES]
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@cache
def text() -> str:
    """The sources, with kernels that only decode in the place of their entry headers."""
    parts = ['#include "frag16_decoders.cuh"']
    for path in sorted(SOURCES.glob("_linear_*_sm80.cu")):
        source = path.read_text(encoding="utf-8")
        body = re.sub(r'#include "decode_entry.h"', "GM_DECODE(fp16, __half)\nGM_DECODE_BF16", source)
        body = re.sub(r'#include "gemm_entry.h"', "GM_OPERANDS(GM_OPERAND)", body)
        assert body != source, path
        parts.append(body)
        parts += [f"#undef {name}" for name in re.findall(r"#define (\w+)", source)]
    return "\n".join(parts)


def ptx_of(folder: Path, arch: str, *flags: str) -> Path:
    """The path of their PTX."""
    source, folders = (
        folder / "decoders.cu",
        (ROOT / "kernels", ROOT / "kernels/_native", Path(__file__).parent),
    )
    source.write_text(text(), encoding="utf-8")
    options = ("-std=c++20", "-O3", f"-arch={arch}", "-ptx", *flags)
    return machine_code.compiled(source, folder / "decoders.ptx", *options, folders=folders)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The bodies of the kernels by name."""
    return ptx_on_cpu.kernels(ptx_of(tmp_path_factory.mktemp("ptx"), "compute_80").read_text())


def factored(shape: tuple[int, ...], signed: bool, generator: torch.Generator) -> torch.Tensor:
    """float32 [N, groups] as K-quants have them: a float16 per row of a tile times integers, all that there are."""
    tiles = shape[1] // 2
    d = (torch.rand(shape[0], 2, 1, generator=generator) * 0.01 + 1e-4).half().float()
    count = 256 if signed else 64
    each = torch.arange(shape[0] * shape[1]).view(shape[0], 2, tiles) * 7 % count - (128 if signed else 0)
    return (d * each).flatten(1)


def weight(scheme: QuantScheme, scales: torch.dtype) -> QuantTensor:
    """A weight in which every code is at every place of a tile; [N, 256]. Scales in float32 are products."""
    bits, size = scheme.bits, scheme.group_size or 256
    count = 1 << bits
    n, k = 16 * count, 256
    rows, columns = torch.arange(n)[:, None], torch.arange(k)
    codes = (rows // 16 + rows * 5 + columns * 3) % count
    generator = torch.Generator().manual_seed(bits)
    each = torch.arange(n * k // size).view(n, k // size)  # counts the groups
    random = torch.rand(n, k // size, generator=generator) * 0.01 + 1e-4
    scale: torch.Tensor | None = None
    zero = global_scale = None
    if scheme.scale_dtype == "e4m3":  # every scale
        codes = torch.where((each % 127 == 0).repeat_interleave(size, 1), codes & 8, codes)
        scale, global_scale = (each % 127).to(torch.uint8).view(torch.float8_e4m3fn), torch.tensor([2.0**-9])
    elif scheme.scale_dtype == "e8m0":  # as far apart as fp16 holds their products exactly
        scale = (each % 24 + 110).to(torch.uint8)
    elif scheme.is_integer:
        scale = (
            factored(each.shape, not scheme.minimums, generator)
            if scales == torch.float32
            else random.to(scales)
        )
    else:
        codes = torch.where(codes % 128 == 127, codes ^ 1, codes)  # no NaN
        if scheme.granularity == "tensor":
            global_scale = random[0, :1].contiguous()
        else:
            scale = random[::128].contiguous() if scheme.granularity == "block" else random
    if scheme.zero_points:
        zero = torch.randint(0, 16, each.shape, generator=generator, dtype=torch.uint8)
    if scheme.minimums:
        random = torch.rand(each.shape, generator=generator) * 0.02 - 0.01
        zero = factored(each.shape, False, generator) if scales == torch.float32 else random.to(scales)
    stored = numeric.pack_bits(codes.to(torch.uint8).contiguous(), bits)
    return QuantTensor(stored, scale, (n, k), scheme, zero, global_scale)


def in_matrix(lanes: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """The 16-bit numbers of [tiles, lane, step, register, 2] at their places, [N, K]: the A operand of mma.m16n8k16, by PTX's documentation."""
    blocks = lanes.view(
        n // 64, k // 128, 4, 8, 4, 8, 2, 2, 2
    )  # block, group, tile, g, t, step, k half, row half, odd
    return blocks.permute(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(n, k)


def decoded(
    kernels: dict[str, str], name: str, form: Format, tiles: torch.Tensor, half: bool, extra: int = 0
) -> tuple[torch.Tensor, float]:
    """(the registers that the kernel `name` writes, [tiles, lane, ...], what sums are multiplied by)."""
    raw = bytes(tiles.numpy())
    threads = len(raw) // form.tile_bytes * 32
    parameters = {0: 0, 1: ptx_on_cpu.OUT, 2: int(half)}
    out = ptx_on_cpu.run(kernels[name], parameters, raw, threads, threads * (32 + extra) * 4)
    factor = ptx_on_cpu.run(kernels[f"{name}_factor"], {0: ptx_on_cpu.OUT}, b"", 1, 4)
    return torch.from_numpy(np.frombuffer(out, np.int32).reshape(threads // 32, 32, -1).copy()), float(
        np.frombuffer(factor, np.float32)[0]
    )


def integers(q: QuantTensor) -> torch.Tensor:
    """The codes less their zero points, or the values of the codes, float64 [N, K]."""
    codes = numeric.unpack_bits(q.codes, q.scheme.bits, q.k)
    if not q.scheme.is_integer:
        return (numeric.e2m1_decode(codes) if q.scheme.bits == 4 else numeric.e4m3_decode(codes)).double()
    if q.zero is None or q.scheme.minimums:
        return codes.double() - q.scheme.implicit_zero
    return codes.double() - q.zero.double().repeat_interleave(q.k // q.zero.shape[1], 1)


@pytest.mark.parametrize("x", TYPES)
@pytest.mark.parametrize(("form", "scheme"), CASES, ids=NAMES)
def test_decode(kernels: dict[str, str], form: Format, scheme: str, x: str) -> None:
    q = weight(QuantScheme.parse(scheme), torch.float32 if form.factored else torch.float16)
    slots = pack(q, form.layout).slots
    # Of a tile whose sums are scaled; the scales of fp4 are in the products.
    groups = 0 if form.layout == "f4_frag16_v1" else groups_per_tile(q.scheme)
    name = f"gm_linear_{form.name}_decode_sm80_{x}"
    kinds = 2 if q.scheme.minimums else 1
    out, factor = decoded(kernels, name, form, slots["tiles"], True, 2 * groups * kinds)
    values = in_matrix(out[..., :32].contiguous().view(TYPES[x]).double() * factor, q.n, q.k)
    if groups == 0:
        assert torch.equal(values * slots["row_scale"].double()[:, None], q.dequantize().double())
        return
    assert torch.equal(values, integers(q))
    # block, group of 128, tile, g, t, scales or offsets, group, row half: the same for the four t.
    scales = out[..., 32:].contiguous().view(torch.float32).view(q.n // 64, 2, 4, 8, 4, kinds, groups, 2)
    assert bool((scales == scales[:, :, :, :, :1]).all())
    by_row = scales[:, :, :, :, 0].permute(4, 0, 2, 6, 3, 1, 5).reshape(kinds, q.n, 2 * groups)
    spread = by_row.repeat_interleave(128 // groups, 2)
    made = (values * spread[0].double()).float() - (spread[1] if kinds == 2 else 0)
    assert torch.equal(made, q.dequantize().float())


@pytest.mark.parametrize("scales", TYPES)
@pytest.mark.parametrize("x", TYPES)
@pytest.mark.parametrize(("form", "scheme"), CASES, ids=NAMES)
def test_operand(kernels: dict[str, str], form: Format, scheme: str, x: str, scales: str) -> None:
    q = weight(QuantScheme.parse(scheme), torch.float32 if form.factored else TYPES[scales])
    slots = pack(q, form.layout).slots
    start = f"gm_linear_{form.name}_gemm_sm80_{x}"
    name = next(one for one in (f"{start}_{scales}", f"{start}_any") if one in kernels)
    out, factor = decoded(kernels, name, form, slots["tiles"], scales == "fp16")
    values = in_matrix(out.view(TYPES[x]).double() * factor, q.n, q.k)
    if form.layout == "f4_frag16_v1":
        assert torch.equal(values * slots["row_scale"].double()[:, None], q.dequantize().double())
    else:
        assert torch.equal(values, q.dequantize().float().to(TYPES[x]).double())


def test_a_changed_bit_would_show(kernels: dict[str, str]) -> None:
    form = next(form for form in FORMATS if form.name == "int8")
    q = weight(QuantScheme.parse("int8_ch"), torch.bfloat16)
    changed = dataclasses.replace(q, codes=q.codes.clone())
    changed.codes[77, 200] ^= 1
    out, factor = decoded(
        kernels, "gm_linear_int8_gemm_sm80_bf16_bf16", form, pack(changed, form.layout).slots["tiles"], False
    )
    differ = (
        in_matrix(out.view(torch.bfloat16).double() * factor, q.n, q.k) != q.dequantize().bfloat16().double()
    )
    assert differ.nonzero().tolist() == [[77, 200]]


def test_those_of_fp16_are_code_for_turing(tmp_path: Path) -> None:
    path = ptx_of(tmp_path, "compute_75", "-DGM_FP16_ONLY")
    subprocess.run(["ptxas", "-arch=sm_75", "-o", tmp_path / "out.cubin", path], check=True)
