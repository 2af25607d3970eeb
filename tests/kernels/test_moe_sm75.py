"""Experts over frag16 tiles on sm_75 without a GPU: accepted problems, shapes that fit, what the library and the launcher refuse, the chain, and
the machine code. tests/native/test_sm75_fibers.py executes the schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels import interpreter
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.frag16_sm75.decode import SHARED, STATIC_SHARED, THREADS
from gristmill.kernels.linear.frag16_sm75.gemm import Shape
from gristmill.kernels.linear.frag16_sm80.formats import FORMATS, Format, format_of
from gristmill.kernels.moe.grouped_linear import op as grouped_linear
from gristmill.kernels.moe.grouped_linear.frag16_sm75 import _launch, shapes
from gristmill.kernels.moe.grouped_linear.frag16_sm80.args import ARGS
from gristmill.kernels.moe.grouped_linear.frag16_sm80.shapes import MAX_EXPERTS
from gristmill.kernels.moe.moe import op as moe
from gristmill.kernels.moe.moe import sm75
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.kernels.machine_code import assembled_of, entries_of, needs_compiler
from tests.kernels.test_linear_sm75 import TABLE, compiled, needs_library, quick
from tests.kernels.test_moe_sm80 import tensors_of

if TYPE_CHECKING:
    from gristmill.kernels.calls import GroupedLinearCall

REGISTRY, TARGET = default_registry(), Target.parse("sm_75")
MOE, GROUPED = REGISTRY.kernel("moe", "moe_sm75"), REGISTRY.kernel("grouped_linear", "grouped_linear_sm75")
FOLDER = Path(_launch.__file__).parent
GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = -1, -2, -5


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MOE, "m=1,top_k=8,e=128,h=2048,i=768,x=fp16,w=int4_g128", None),
        (MOE, "m=0,top_k=4,e=32,h=2880,i=2880,x=fp16,w=mxfp4,epilogue=w13_bias+w2_bias+clamp", None),
        (
            MOE,
            "m=1,top_k=2,e=4,h=256,i=256,w=int6_g16",
            "fp16 activations alone, as Turing's tensor cores do, not bf16",
        ),
        (MOE, "m=1,top_k=2,e=4,h=256,i=264,x=fp16,w=int4_ch", "whole tiles of 16 rows"),
        (MOE, "m=1,top_k=2,e=1025,h=256,i=256,x=fp16,w=int4_g128", "1024 experts"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,x=fp16,w=int4_g128,act_order=true", "act-order"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,x=fp16,w=fp16", "weight-only formats, compiled for int4_g128"),
        (GROUPED, "m=5,e=3,n=96,k=256,x=fp16,w=mxfp4,epilogue=bias", None),
        (GROUPED, "m=5,e=3,n=96,k=130,x=fp16,w=int4_ch", "not a multiple of 8"),
        (GROUPED, "m=5,e=3,n=96,k=256,x=fp32,w=int4_g128", "not fp32"),
        (GROUPED, "m=5,e=3,n=96,k=256,x=fp16,w=int4_g128,act_order=true", "act-order"),
    ],
)
def test_accepts(kernel: Kernel, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(REGISTRY.op(kernel.op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_shapes_are_those_of_the_library() -> None:
    text = (FOLDER / "entry.h").read_text(encoding="utf-8")
    rows = re.findall(r"K\((\d+), (\d+), (\d+), __VA_ARGS__\)", text)
    assert [Shape(*map(int, row)) for row in rows] == [*shapes.SHAPES["small"], *shapes.SHAPES["large"]]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_shape_fits_a_multiprocessor_of_turing(form: Format) -> None:
    for shape in shapes.shapes_of(form):
        assert shapes.all_shared_bytes(shape, form, MAX_EXPERTS) + STATIC_SHARED <= SHARED
        usual = shape.ctas * (shapes.all_shared_bytes(shape, form, 128) + STATIC_SHARED)
        assert usual <= SHARED and shape.ctas * shape.warps * 32 <= THREADS, shape


@pytest.mark.parametrize("m", [0, 1, 64, 257, 100000])
@pytest.mark.parametrize("w", ["int4_g128", "fp8_block"])
def test_the_default_suits_the_rows_of_an_expert(m: int, w: str) -> None:
    problem = REGISTRY.op("grouped_linear").problem(f"m={m},e=8,n=512,k=1024,x=fp16,w={w}")
    form = format_of(QuantScheme.parse(w))
    assert form is not None
    tried = list(GROUPED.space(problem, TARGET))  # type: ignore[misc]
    assert GROUPED.config(problem, TARGET) == tried[0]
    assert {(one["mt"], one["warps"]) for one in tried} == {shape[:2] for shape in shapes.shapes_of(form)}
    mt = int(tried[0]["mt"])
    assert mt == 64 or mt >= m / 8 and (mt == 16 or mt // 2 < m / 8)


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
    valid |= {"top_k": 1, "x_type": 1, "scale_type": 1, "mt": 16, "warps": 4, "grid": 40}
    entry = ptx_entry(f"gm_grouped_linear_{form}_sm75", ARGS, "compute_75")
    return entry(ARGS.new(**(valid | changed)))


@needs_library
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_library_has_every_shape_and_counts_the_same_shared_memory(form: Format) -> None:
    for shape in shapes.shapes_of(form):
        for experts in (1, 128, MAX_EXPERTS):
            for scale_type in (1, 2):
                answer = ask(
                    form.name, mt=shape.mt, warps=shape.warps, experts=experts, scale_type=scale_type
                )
                assert answer == shapes.all_shared_bytes(shape, form, experts)


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"x_type": 2}, GM_E_ARG),  # compiled for fp16 alone
        ({"x_type": 0}, GM_E_DTYPE),
        ({"mt": 80}, GM_E_ARG),
        ({"experts": 1025}, GM_E_SHAPE),
        ({"ldx": 1020}, GM_E_SHAPE),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert ask("int4_g128", **changed) == code


def test_the_launcher_refuses_tensors_that_do_not_fit() -> None:
    problem = REGISTRY.op("grouped_linear").problem("m=5,e=3,n=64,k=256,x=fp16,w=int4_g128")
    config = GROUPED.config(problem, TARGET)
    tensors, offsets = tensors_of()
    x, out = torch.zeros(5, 256).half(), torch.zeros(5, 64).half()

    def call(x: torch.Tensor = x, tensors: list[torch.Tensor] = tensors, out: torch.Tensor = out) -> None:
        given = (x, tensors, offsets, None, 1, False, 0, None, False, 1.702, 7.0, out)
        _launch.launch(config, make_call("grouped_linear", *given))

    call(out=out[:0])  # no rows, no launch
    with pytest.raises(ValueError, match=r"3 experts of \[64, 256\] have \d+ bytes of tiles"):
        call(tensors=[tensors[0][:2], *tensors[1:]])
    with pytest.raises(ValueError, match="act-order"):
        call(tensors=[*tensors[:2], torch.zeros(256, dtype=torch.int32)])
    with pytest.raises(ValueError, match="row multipliers"):
        call(tensors=[tensors[0], torch.zeros(7), tensors[2]])
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        call(x=torch.zeros(5, 260).half()[:, :256])


def _product(config: dict[str, object], call: GroupedLinearCall) -> None:
    """The reference in the place of the native product."""
    assert {"format", "tile_bytes", "mt", "warps", "grid"} == {*config}
    call.out.copy_(grouped_linear.reference(*call.values()[:-1]))


@pytest.mark.skipif(HAS_GPU, reason="Triton's interpreter is for machines without a GPU")
@pytest.mark.parametrize("text", MOE.examples)
def test_the_chain_around_the_products(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permutation, arguments of both products and combination, in a workspace of exactly its size, full of NaN."""
    interpreter.install()
    monkeypatch.setattr(_launch, "launch", _product)
    op = REGISTRY.op("moe")
    problem = op.problem(text)
    arguments = op.inputs(problem, 3, "cpu")
    given, out = list(arguments), torch.full_like(arguments[0], float("nan"))
    given[3:5] = [[w.dequantize()] for w in given[3:5]]
    config = MOE.config(problem, TARGET)
    given[6] = torch.full((MOE.workspace(problem, config).bytes,), 255, dtype=torch.uint8)
    sm75.launch(config, make_call("moe", *given, out))
    error = moe.error(problem, arguments, [out], [moe.reference(*arguments)])
    assert error <= op.tolerance(problem).limit


@needs_compiler
@pytest.mark.parametrize("form", quick())
def test_machine_code(form: Format, tmp_path: Path) -> None:
    ptx = compiled(FOLDER / "_grouped_linear_sm75.cu.in", form, tmp_path)
    by_name = {
        f"grouped_fp16_{scales}_{shape.mt}x{shape.warps}": shape
        for scales in TABLE[form.name]["operands"]
        for shape in shapes.shapes_of(form)
    }
    assert {*entries_of(ptx)} == by_name.keys()
    used, code = assembled_of(ptx, "sm_75", [*by_name])
    for name, (registers, stack) in used.items():
        shape, text = by_name[name], code[name]
        assert stack == 0 and "STL" not in text, f"{name} spills"
        assert registers * shape.warps * 32 * shape.ctas <= 65536, f"{name}: {registers} registers"
        assert len(re.findall(r"HMMA\.1688\.F32", text)) == 16 * 2 * shape.mt // 8, name
        assert "HMMA.16816" not in text and "LDGSTS" not in text, name
