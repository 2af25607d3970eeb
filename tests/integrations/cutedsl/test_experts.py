"""moe_block_scaled_cutedsl_sm100 with CuTe DSL: both programs of a call are given what they read, their PTX gathers rows of x, copies and multiplies
the scales of every slot, and its machine code spills nothing. test_experts_ptx.py executes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cutlass import BFloat16, cute

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cutedsl import CuteDslCase, compile_program
from gristmill.kernels.interpreter import install
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS, tensor_memory
from gristmill.kernels.linear.op import gated
from gristmill.kernels.moe._clamped import clamped
from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl import product as experts
from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl._experts_sm100 import (
    ExpertsProduct,
    experts_product,
)
from gristmill.quant.layouts._scales128x4 import tiled
from tests.integrations.cutedsl.test_block_scaled import Ptx, values

OP = default_registry().op("moe")
KERNEL = default_registry().kernel("moe", "moe_block_scaled_cutedsl_sm100")
GROUPED = default_registry().kernel("grouped_linear", "grouped_linear_block_scaled_cutedsl_sm100")
B200 = Target.parse("sm_100")


def in_torch(config: dict[str, object], fault: str = "") -> Callable[..., None]:
    """The program of a configuration in torch."""
    form, flags = FORMS[str(config["scheme"])], str(config["epilogue"]).split("+")

    def program(
        x,
        x_scales,
        w,
        w_scales,
        x_factors,
        factors,
        bias,
        offsets,
        permutation,
        out,
        top_k,
        ctas,
        alpha,
        limit,
    ) -> None:
        assert x.stride() == (x.shape[1], 1) and w.stride() == (w.shape[1], 1) and x.data_ptr() % 16 == 0
        assert 1 <= ctas <= int(config["ctas"]) and x_scales.dtype == torch.int32
        places, columns = out.shape
        count, n = offsets.shape[0] - 1, columns * (2 if "silu_mul" in flags else 1)
        source = torch.arange(places)
        if config["gather"]:
            source = permutation.long() // (1 if fault == "top_k" else top_k)
        down = -(-x.shape[0] // 128)
        lines = x_scales.view(torch.uint8).view(down, -1, 32, 4, 4)
        groups = lines.permute(0, 3, 2, 1, 4).reshape(128 * down, -1)[source.clamp(max=x.shape[0] - 1)]
        rows = values(x[source.clamp(max=x.shape[0] - 1)], tiled(groups), form.x, form.group)
        tiles = w_scales.view(count, -1, *w_scales.shape[1:])
        out.zero_()
        for e, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            own = values(w.view(count, n, -1)[e], tiles[e], form.w, form.group)
            z = rows[begin:end] @ own.T
            if form.group == 16:
                z = z * factors.view(count, n)[e].double() * x_factors[source[begin:end], None].double()
            if "bias" in flags:
                z = z + bias.view(count, n)[e].double()
            if "clamp" in flags:
                z = clamped(z, alpha, limit)
            elif "silu_mul" in flags:
                z = gated(z)
            out[begin:end] = z

    return program


def outcome(problem: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why a problem's call by programs in torch is wrong, None if it is right."""
    install()
    monkeypatch.setattr(experts, "program", lambda build, config: in_torch(config, fault))
    made = OP.problem(problem)
    result = verify(OP, KERNEL, KERNEL.config(made, B200), made, "cpu")
    return None if result.ok else result.reason


@pytest.mark.parametrize("problem", KERNEL.examples)
def test_the_programs_are_given_what_they_read(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(problem, "", monkeypatch) is None


@pytest.mark.parametrize("problem", GROUPED.examples)
def test_the_program_of_one_product_is_given_what_it_reads(
    problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(experts, "program", lambda build, config: in_torch(config))
    op = default_registry().op("grouped_linear")
    made = op.problem(problem)
    result = verify(op, GROUPED, GROUPED.config(made, B200), made, "cpu")
    assert result.ok, result.reason


def test_rows_of_other_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome("m=9,top_k=3,e=5,h=128,i=256,w=mxfp8.mxfp8", "top_k", monkeypatch)


@pytest.mark.parametrize("scheme", ["nvfp4.nvfp4", "mxfp4.mxfp8"])
def test_rows_are_gathered_to_where_cute_has_them(scheme: str) -> None:
    """Places of codes and scales in a ring by CuTe's layouts for tcgen05: rows of 128 bytes, whose 16-byte pieces a swizzle exchanges by row % 8, and
    of row r of a tile of scales word r // 32 of line r % 32."""
    config = {"scheme": scheme, "bn": 64, "slots": 3, "epilogue": "none", "gather": True, "x": "bf16"}
    made = ExpertsProduct(BFloat16, config)
    bits = 4 if made.form.x == "e2m1" else 8
    step = 32 * 8 // bits  # columns of an instruction
    pieces = [(row, column) for row in range(128) for column in range(0, made.bk, 16)]
    places: list[tuple[int, int]] = []
    swizzle: list[str] = []

    @cute.jit
    def record():
        ring, ring_scales = made.describe()[1][:2]
        swizzle.append(str(ring.inner))
        at = [((row, column % step), 0, column // step, 2) for row, column in pieces]
        places.extend((ring.outer(one), ring_scales(one)) for one in at)

    cute.compile(record, options="--gpu-arch sm_100a")
    assert swizzle == ["S<3,4,3>"], "as `gather` makes it"
    for (row, column), (of_codes, of_scales) in zip(pieces, places, strict=True):
        assert of_codes * bits // 8 == (2 * 128 + row) * 128 + column * bits // 8
        group = column // made.group
        word = (2 * made.across + group // 4) * 128 + row % 32 * 4 + row // 32
        assert of_scales == 4 * word + group % 4


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("case", experts.aot(B200), ids=lambda case: case.name)
def test_products_are_described_and_find_their_scales(case: CuteDslCase, arch: str, tmp_path: Path) -> None:
    """A tile of scales, 512 bytes of a slot, goes to 4 columns of tensor memory, as in linear; the four products of a slot read them."""
    config = {**case.config, "arch": arch}
    form, bn = FORMS[str(config["scheme"])], int(config["bn"])
    tiles_w = -(-bn // 128)
    compile_program(experts_product(config), arch, "--keep-ptx", f"--dump-dir={tmp_path}")
    ptx = Ptx(next(tmp_path.glob("*.ptx")).read_text(encoding="utf-8"))
    across, base = form.columns // form.group // 4, tensor_memory(bn).of_x
    copied = {ptx.at(to)[1] - base for to, _ in ptx.found("tcgen05.cp.cta_group::1.32x128b.warpx4")}
    assert copied == {4 * part for part in range(across)} | {16 + 4 * i for i in range(across * tiles_w)}
    products = ptx.found("tcgen05.mma.cta_group::1")
    step = (64 if form.x == "e2m1" else 32) // form.group
    assert products and len(products) % 4 == 0
    for index, operands in enumerate(products):
        tile, first = divmod(index % 4 * step, 4)
        of_x, of_w = (ptx.at(register)[1] & 0xFFFFFFFF for register in operands[4:6])
        assert of_x == (first << 30) + base + 4 * tile and not ptx.is_half(operands[4])
        # Of 64 rows of W a half of a tile is added, which execution checks (test_experts_ptx.py).
        assert bn < 128 or of_w == (first << 30) + base + 16 + 4 * tile * tiles_w
    # Eight copies of codes of a thread and a word of scales for each tile of scales, then one arrival, before which tcgen05 reads nothing.
    sizes = re.findall(r"cp\.async\.ca\.shared\.global[^;]*, (\d+), \1;", ptx.text)
    assert sizes.count("16") == 8 * (len(sizes) // (8 + across)) and sizes.count("4") % across == 0
    assert len(re.findall(r"cp\.async\.mbarrier\.arrive\.noinc", ptx.text)) == len(sizes) // (8 + across)
    assert "fence.proxy.async.shared::cta" in ptx.text


def test_machine_code_is_asked_for_by_the_compile_matrix() -> None:
    """Registers, spills and instructions of every case are in the baseline; none spills."""
    table = json.loads(Path("ci/compile_baseline.json").read_text(encoding="utf-8"))
    names = {
        f"{GROUPED.name}/{case.name}@{target}"
        for case in experts.aot(B200)
        for target in ("sm_100", "sm_103")
    }
    assert names <= table.keys() and not any(table[name]["spills"] for name in names)
