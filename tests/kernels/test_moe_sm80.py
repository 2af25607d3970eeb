"""Experts over frag16 tiles on sm_80 and newer without a GPU: accepted problems, shapes that fit, what the library and the launchers refuse, and
the machine code. tests/native/test_sm80_fibers.py runs the schedule on the CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels import interpreter
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of
from gristmill.kernels.linear.frag16_sm80.gemm import MOST_SHARED
from gristmill.kernels.moe.grouped_linear import op as grouped_linear
from gristmill.kernels.moe.grouped_linear.frag16_sm80 import _launch, shapes
from gristmill.kernels.moe.grouped_linear.frag16_sm80.args import ARGS
from gristmill.kernels.moe.moe import op as moe
from gristmill.kernels.moe.moe import sm80
from gristmill.kernels.native import library_dir
from gristmill.quant import pack, quantize
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.kernels.machine_code import assembled, entries, needs_assembler
from tests.kernels.test_linear_sm80 import BUILT, needs_library

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall

REGISTRY, TARGET = default_registry(), Target.parse("sm_86")
MOE, GROUPED = REGISTRY.kernel("moe", "moe_sm80"), REGISTRY.kernel("grouped_linear", "grouped_linear_sm80")
FOLDER = Path(_launch.__file__).parent
GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = -1, -2, -5


def built() -> list[Format]:
    """The formats in this build: `make test` leaves out the rare ones."""
    manifest = library_dir() / "manifest.json"
    left_out = json.loads(manifest.read_text(encoding="utf-8"))["left_out"] if BUILT else []
    return [form for form in FORMATS if f"_grouped_linear_{form.name}_rare_sm80" not in left_out]


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MOE, "m=1,top_k=8,e=128,h=2048,i=768,w=int4_g128", None),
        (MOE, "m=0,top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp", None),
        (MOE, "m=1,top_k=2,e=4,h=256,i=192,x=fp16,w=int8_ch", None),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,w=int6_g16", None),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=264,w=int4_ch", "whole tiles of 16 rows"),
        (MOE, "m=1,top_k=2,e=4,h=252,i=256,w=int4_ch", "not a multiple of 8"),
        (MOE, "m=1,top_k=2,e=1025,h=256,i=256,w=int4_g128", "1024 experts"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,w=int4_g128,act_order=true", "act-order"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256", "weight-only formats, compiled for int4_g128"),
        (GROUPED, "m=5,e=3,n=96,k=256,w=mxfp4,epilogue=bias", None),
        (GROUPED, "m=5,e=3,n=17,k=256,w=nvfp4", None),
        (GROUPED, "m=5,e=3,n=80,k=256,w=int4_g128,epilogue=silu_mul", "whole tiles of 16 rows"),
        (GROUPED, "m=5,e=3,n=96,k=130,w=int4_ch", "not a multiple of 8"),
        (GROUPED, "m=5,e=3,n=96,k=256,w=int4_g128.int8_g128", "weight-only"),
    ],
)
def test_accepts(kernel: Kernel, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(REGISTRY.op(kernel.op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_sources_are_those_of_the_formats_of_linear() -> None:
    """Of each format one source, with the operands of the dense kernel."""
    found = {re.sub(r"_rare", "", path.name): path for path in FOLDER.glob("_grouped_linear_*.cu")}
    assert found.keys() == {f"_grouped_linear_{form.name}_sm80.cu" for form in FORMATS}
    rare = {path.stem for path in found.values() if "_rare_" in path.name}
    schemes = [QuantScheme.parse(scheme) for form in FORMATS for scheme in form.schemes]
    assert {stem for scheme in schemes for stem in shapes.sources_of(scheme)} == rare
    assert len(rare) == len(FORMATS) - len(shapes.USUAL)
    assert {form.layout for form in FORMATS} == {*shapes.TILE_LAYOUTS} == {*GROUPED.layouts} == {*MOE.layouts}
    dense = FOLDER.parents[2] / "linear" / "frag16_sm80"
    for form in FORMATS:
        text = found[f"_grouped_linear_{form.name}_sm80.cu"].read_text(encoding="utf-8")
        of_linear = (dense / f"_linear_{form.name}_gemm_sm80.cu").read_text(encoding="utf-8")
        parts = [re.search(r"#define GM_TILE_BYTES.*(?=#include)", one, re.S) for one in (text, of_linear)]
        assert parts[0] is not None and parts[1] is not None and parts[0][0] == parts[1][0]
        assert f"#define GM_ENTRY gm_grouped_linear_{form.name}_sm80\n" in text


def test_shapes_are_those_of_the_library() -> None:
    text = (FOLDER / "entry.h").read_text(encoding="utf-8")
    rows = re.findall(r"K\((\d+), (\d+), (\d+), (\d+), (\d+), __VA_ARGS__\)", text)
    assert [shapes.Shape(*map(int, row)) for row in rows] == [
        *shapes.SHAPES["small"],
        *shapes.SHAPES["large"],
    ]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_shape_fits_the_smallest_multiprocessor(form: Format) -> None:
    for shape in shapes.shapes_of(form):
        assert shapes.shared_bytes(shape, form, shapes.MAX_EXPERTS) + 1024 <= MOST_SHARED, shape


@pytest.mark.parametrize("m", [0, 1, 7, 64, 257, 4096, 100000])
@pytest.mark.parametrize("w", ["int4_g128", "fp8_block", "int6_g16"])
def test_the_default_suits_the_rows_of_an_expert(m: int, w: str) -> None:
    problem = REGISTRY.op("grouped_linear").problem(f"m={m},e=8,n=512,k=1024,w={w}")
    form = format_of(QuantScheme.parse(w))
    assert form is not None
    tried = list(GROUPED.space(problem, TARGET))  # type: ignore[misc]
    assert GROUPED.config(problem, TARGET) == tried[0]
    compiled = {(shape.mt, shape.warps) for shape in shapes.shapes_of(form)}
    assert {(int(one["mt"]), int(one["warps"])) for one in tried} == compiled and len(tried) == len(compiled)
    mt, most = int(tried[0]["mt"]), max(mt for mt, _ in compiled)
    assert mt == most or mt >= m / 8 and (mt == 16 or mt // 2 < m / 8)


def ask(form: str = "int4_g128", **changed: int) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    valid = {
        "device": -1,
        "offsets": 16,
        "rows": 9,
        "x_rows": 9,
        "experts": 8,
        "n": 256,
        "k": 1024,
        "ldx": 1024,
    }
    valid |= {"top_k": 1, "x_type": 2, "scale_type": 2, "mt": 16, "warps": 4, "grid": 132}
    return ptx_entry(f"gm_grouped_linear_{form}_sm80", ARGS)(ARGS.new(**(valid | changed)))


@needs_library
@pytest.mark.parametrize("form", built(), ids=lambda form: form.name)
def test_the_library_has_every_shape_and_counts_the_same_shared_memory(form: Format) -> None:
    for shape in shapes.shapes_of(form):
        for experts in (1, 128, shapes.MAX_EXPERTS):
            for x_type in (1, 2):
                for scale_type in (1, 2):
                    fields = {"experts": experts, "x_type": x_type, "scale_type": scale_type}
                    answer = ask(form.name, mt=shape.mt, warps=shape.warps, **fields)
                    assert answer == shapes.shared_bytes(shape, form, experts)


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, None),
        ({"x_type": 0}, GM_E_DTYPE),
        ({"scale_type": 3}, GM_E_DTYPE),
        ({"mt": 24}, GM_E_ARG),
        ({"offsets": 0}, GM_E_ARG),
        ({"top_k": 0}, GM_E_ARG),
        ({"grid": 0}, GM_E_ARG),
        ({"experts": 1025}, GM_E_SHAPE),
        ({"experts": 0}, GM_E_SHAPE),
        ({"k": 1020}, GM_E_SHAPE),
        ({"ldx": 1020}, GM_E_SHAPE),
        ({"ldx": 512}, GM_E_SHAPE),
        ({"x": 8}, GM_E_SHAPE),
        ({"silu_mul": 1, "n": 240}, GM_E_ARG),
        ({"clamp": 1}, GM_E_ARG),
        ({"silu_mul": 1, "clamp": 1}, None),
        ({"x_rows": 2**31 - 1, "ldx": 1 << 20}, GM_E_SHAPE),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int | None) -> None:
    answer = ask(**changed)
    assert answer > 0 if code is None else answer == code


def tensors_of(n: int = 64, k: int = 256, experts: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A packed weight, and offsets that give all five rows to the last expert."""
    q = quantize(torch.randn(experts, n, k, generator=torch.Generator().manual_seed(0)), "int4_g128")
    return list(pack(q, "w4_frag16_v1").tensors), torch.tensor([0] * experts + [5], dtype=torch.int32)


def test_the_launcher_refuses_tensors_that_do_not_fit() -> None:
    config = shapes.config_of(FORMATS[0], shapes.SHAPES["small"][0], 108)
    tensors, offsets = tensors_of()
    x, out = torch.zeros(5, 256, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)

    def call(x: torch.Tensor = x, tensors: list[torch.Tensor] = tensors, out: torch.Tensor = out) -> None:
        given = (x, tensors, offsets, None, 1, False, 0, None, False, 1.702, 7.0, out)
        _launch.launch(config, make_call("grouped_linear", *given))

    call(out=out[:0])  # no rows, no launch
    with pytest.raises(ValueError, match=r"expected \d+ bytes of tiles for 3 experts"):
        call(tensors=[tensors[0][:2], *tensors[1:]])
    with pytest.raises(ValueError, match="act-order"):
        call(tensors=[*tensors[:2], torch.zeros(256, dtype=torch.int32)])
    with pytest.raises(ValueError, match="row multipliers"):
        call(tensors=[tensors[0], torch.zeros(7), tensors[2]])
    wide = torch.zeros(5, 260, dtype=torch.bfloat16)
    for strided in (wide[:, :256], torch.zeros(256, 5, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            call(x=strided)


def _product(config: dict[str, object], call: GroupedLinearCall) -> None:
    """The reference in the place of the native product."""
    assert {"format", "tile_bytes", "mt", "warps", "grid"} == {*config}
    call.out.copy_(grouped_linear.reference(*call.values()[:-1]))


def run(text: str, monkeypatch: pytest.MonkeyPatch, place: int = 0, value: Any = None) -> float:
    """The error of the chain in a workspace of exactly its size, full of NaN, over its tolerance; with the argument at a `place` changed."""
    interpreter.install()
    monkeypatch.setattr(_launch, "launch", _product)
    op = REGISTRY.op("moe")
    problem = op.problem(text)
    arguments = op.inputs(problem, 3, "cpu")
    given, out = list(arguments), torch.full_like(arguments[0], float("nan"))
    if place:
        given[place] = arguments[place].roll(1, 0) if value == "rolled" else value
    given[3:5] = [[w.dequantize()] for w in given[3:5]]
    config = MOE.config(problem, TARGET)
    given[6] = torch.full((MOE.workspace(problem, config).bytes,), 255, dtype=torch.uint8)
    sm80.launch(config, make_call("moe", *given, out))
    return moe.error(problem, arguments, [out], [moe.reference(*arguments)]) / op.tolerance(problem).limit


@pytest.mark.skipif(HAS_GPU, reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("text", [*MOE.examples, "m=0,top_k=2,e=3,h=64,i=64,w=mxfp4,epilogue=w13_bias"])
def test_the_chain_around_the_products(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permutation, arguments of both products and combination; ids of other ranks among them."""
    assert run(text, monkeypatch) <= 1


@pytest.mark.skipif(HAS_GPU, reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize(
    ("place", "value"),
    [(7, None), (8, None), (7, "rolled"), (8, "rolled"), (9, False), (10, 1.0), (11, 1e30)],
    ids=["no w13_bias", "no w2_bias", "w13_bias rolled", "w2_bias rolled", "silu", "alpha", "not clamped"],
)
def test_each_argument_counts(place: int, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: the chain runs with one argument changed."""
    text = "m=24,top_k=2,e=4,h=64,i=64,w=mxfp4,epilogue=w13_bias+w2_bias+clamp"
    assert run(text, monkeypatch, place, value) > 1


@needs_assembler
@pytest.mark.parametrize(
    ("name", "arch", "step"),
    [
        ("mxfp4", "sm_80", 7),
        *(
            pytest.param(name, arch, 1, marks=pytest.mark.slow)
            for name, arch in (
                ("mxfp4", "sm_80"),
                ("int4_g128", "sm_80"),
                ("int4_g32_zp_rare", "sm_86"),
                ("int4_g64_rare", "sm_89"),
                ("nvfp4_rare", "sm_90"),
                ("int8_rare", "sm_80"),
                ("int8_g32_rare", "sm_86"),
                ("fp8_rare", "sm_89"),
                ("int4_g32_min_k_rare", "sm_80"),
                ("int5_g32_min_rare", "sm_86"),
                ("int6_g16_k_rare", "sm_80"),
            )
        ),
    ],
)
def test_machine_code(name: str, arch: str, step: int) -> None:
    form = next(form for form in FORMATS if form.name == name.removesuffix("_rare"))
    kernels = entries(f"_grouped_linear_{name}_sm80")
    used, code = assembled(f"_grouped_linear_{name}_sm80", arch, kernels[::step])
    assert used and len(used) == len(code)
    for kernel, (registers, stack) in used.items():
        mt, warps = map(int, kernel.rpartition("_")[2].split("x"))
        shape = next(shape for shape in shapes.shapes_of(form) if shape[:2] == (mt, warps))
        assert stack == 0 and "STL" not in code[kernel], f"{kernel} spills"
        assert registers * warps * 32 * shape.ctas <= 65536, f"{kernel}: {registers} registers"
        assert len(re.findall(r"HMMA\.16816\.F32", code[kernel])) == 8 * 2 * mt // 8, kernel
        assert "LDGSTS.E.BYPASS.128" in code[kernel], kernel
