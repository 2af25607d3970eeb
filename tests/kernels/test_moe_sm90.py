"""Experts over frag16 tiles without a GPU: accepted problems, shapes that fit, what the library and the launchers refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.frag16_sm90.instances import formats
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import _launch, shapes
from gristmill.kernels.moe.grouped_linear.frag16_sm90.args import ARGS
from gristmill.kernels.moe.moe import sm90 as moe_sm90
from gristmill.kernels.native import cuda_entry, library_dir
from gristmill.quant import pack, quantize
from tests.calls import make_call

REGISTRY, TARGET = default_registry(), Target.parse("sm_90")
MOE, GROUPED = REGISTRY.kernel("moe", "moe_sm90"), REGISTRY.kernel("grouped_linear", "grouped_linear_sm90")
FOLDER = Path(_launch.__file__).parent
SILU = (None, None, False, 1.702, 7.0)
CTA_BYTES, RESERVED = 232448, 1024
needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(),
    reason="the CUDA library is not built: needs nvcc",
)


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MOE, "m=1,top_k=8,e=128,h=2048,i=768,w=int4_g128", None),
        (MOE, "m=0,top_k=4,e=32,h=2880,i=2880,w=mxfp4", None),
        (MOE, "m=1,top_k=2,e=4,h=256,i=192,x=fp16,w=int4_ch", None),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,w=int8_ch", "weight-only formats, compiled for int4_g128"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,x=fp32,w=int4_g128", "fp16 or bf16"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=264,w=int4_ch", "whole tiles of 16 rows"),
        (MOE, "m=1,top_k=2,e=4,h=252,i=256,w=int4_ch", "not a multiple of 8"),
        (MOE, "m=1,top_k=2,e=1025,h=256,i=256,w=int4_g128", "1024 experts"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,w=int4_g128,act_order=true", "act-order"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,w=mxfp4,epilogue=w2_bias+clamp", "without w2_bias and clamp"),
        (GROUPED, "m=5,e=3,n=96,k=256,w=mxfp4,epilogue=bias", "silu_mul alone, without bias"),
        (GROUPED, "m=5,e=3,n=96,k=256,w=mxfp4,epilogue=silu_mul+clamp", "silu_mul alone, without clamp"),
        (GROUPED, "m=5,e=3,n=17,k=256,w=int4_g128", None),
        (GROUPED, "m=5,e=3,n=96,k=136,w=int4_ch,epilogue=silu_mul,gather=2", None),
        (GROUPED, "m=5,e=3,n=80,k=256,w=int4_g128,epilogue=silu_mul", "whole tiles of 16 rows"),
        (GROUPED, "m=5,e=3,n=96,k=130,w=int4_ch", "not a multiple of 8"),
    ],
)
def test_accepts(kernel: object, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(REGISTRY.op(kernel.op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_hardware_is_hopper_alone() -> None:
    for op, name in (("moe", "moe_sm90"), ("permute", "permute_sm90"), ("combine", "combine_sm90")):
        requires = REGISTRY.kernel(op, name).requires
        assert not requires.check_hardware(TARGET)
        for other in ("sm_80", "sm_100", "gfx942"):
            assert requires.check_hardware(Target.parse(other)), (name, other)


def test_formats_are_those_of_linear() -> None:
    for form in shapes.FORMATS:
        row = formats()[form.name]
        assert (form.schemes, form.tile_bytes) == (row.schemes, row.tile_bytes)
        for scheme in form.schemes:
            assert row.layout in MOE.layouts and REGISTRY.layout(row.layout).accepts(scheme)


def test_shapes_are_those_of_the_library() -> None:
    rows = re.findall(r"K\(__VA_ARGS__, (\d+), (\d+), (\d+), (\d+),", (FOLDER / "entry.h").read_text())
    assert tuple(shapes.Shape(*map(int, row)) for row in rows) == shapes.SHAPES


@pytest.mark.parametrize("m", [0, 1, 2, 7, 16, 64, 257, 1024, 4096, 100000])
@pytest.mark.parametrize(
    "layer",
    [
        "top_k=8,e=128,h=2048,i=768",
        "top_k=2,e=8,h=4096,i=14336",
        "top_k=1,e=1,h=128,i=128",
        "top_k=8,e=384,h=7168,i=256",
    ],
)
def test_a_default_is_compiled_for_its_products(m: int, layer: str) -> None:
    problem = REGISTRY.op("moe").problem(f"m={m},{layer},w=int4_g128")
    config, (h, i) = MOE.config(problem, TARGET), problem.integers(*"hi")
    for number, k, silu_mul in ((1, h, True), (2, i, False)):
        shape = shapes.Shape(*(config[f"{name}{number}"] for name in shapes.Shape._fields))
        assert shape in shapes.shapes_for(k, silu_mul)
        assert config[f"grid{number}"] == 132 * shape.ctas


def test_tuning_tries_every_shape_once() -> None:
    op = REGISTRY.op("grouped_linear")
    problem = op.problem("m=64,e=8,n=512,k=1024,w=mxfp4")
    tried = list(GROUPED.space(problem, TARGET))
    assert len(tried) == len(shapes.SHAPES) and GROUPED.config(problem, TARGET) in tried
    gated = list(GROUPED.space(op.problem("m=64,e=8,n=512,k=128,w=mxfp4,epilogue=silu_mul"), TARGET))
    assert gated and all(config["c"] == 2 and config["slices"] == 1 for config in gated)


def _call(form: str = "int4_g128", **changed: int) -> int:
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
        "top_k": 1,
    }
    valid |= {"x_type": 2, "scale_type": 2, "mt": 8, "c": 2, "slices": 2, "ctas": 1, "grid": 132}
    return cuda_entry(f"gm_grouped_linear_{form}_sm90", ARGS)(ARGS.new(**(valid | changed)))


@needs_library
@pytest.mark.parametrize("form", shapes.FORMATS, ids=lambda form: form.name)
def test_every_instance_fits_a_multiprocessor(form: shapes.Format) -> None:
    for shape in shapes.SHAPES:
        for x_type in (1, 2):
            for scale_type in (1, 2):
                size = _call(form.name, experts=128, x_type=x_type, scale_type=scale_type, **shape._asdict())
                assert 0 < size <= CTA_BYTES // shape.ctas - RESERVED, shape
        most = _call(form.name, experts=shapes.MAX_EXPERTS, **shape._asdict())
        assert 0 < most <= CTA_BYTES, shape


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, None),
        ({"x_type": 0}, -1),
        ({"scale_type": 3}, -1),
        ({"mt": 24}, -5),
        ({"offsets": 0}, -5),
        ({"top_k": 0}, -5),
        ({"grid": 0}, -5),
        ({"experts": 1025}, -2),
        ({"experts": 0}, -2),
        ({"k": 1020}, -2),
        ({"ldx": 1020}, -2),
        ({"ldx": 512}, -2),
        ({"x": 8}, -2),
        ({"silu_mul": 1, "n": 240}, -5),
        ({"silu_mul": 1, "c": 1, "slices": 4}, -5),
        ({"k": 128}, -5),
        ({"permutation": 16, "x_rows": 2**31 - 1, "ldx": 1 << 20}, -2),
    ],
)
def test_library_refuses(changed: dict[str, int], code: int | None) -> None:
    answer = _call(**changed)
    assert answer > 0 if code is None else answer == code


def _tensors(n: int = 64, k: int = 256, experts: int = 3) -> tuple[list[torch.Tensor], torch.Tensor]:
    q = quantize(torch.randn(experts, n, k, generator=torch.Generator().manual_seed(0)), "int4_g128")
    return list(pack(q, "w4_frag16_v1").tensors), torch.tensor([0] * experts + [5], dtype=torch.int32)


def test_launcher_refuses_tensors_that_do_not_fit() -> None:
    form = shapes.format_of(QuantScheme.parse("int4_g128"))
    assert form is not None
    config = shapes.config_of(form, shapes.SHAPES[0], 132)
    tensors, offsets = _tensors()
    x, out = torch.zeros(5, 256, dtype=torch.bfloat16), torch.zeros(5, 64, dtype=torch.bfloat16)

    def call(
        x: torch.Tensor = x,
        tensors: list[torch.Tensor] = tensors,
        out: torch.Tensor = out,
        epilogue: tuple[object, ...] = SILU[1:],
    ) -> None:
        _launch.launch(
            config, make_call("grouped_linear", x, tensors, offsets, None, 1, False, 0, *epilogue, out)
        )

    call(out=out[:0])  # no rows, no launch
    with pytest.raises(ValueError, match=r"expected \d+ bytes of tiles for 3 experts"):
        call(tensors=[tensors[0][:2], *tensors[1:]])
    with pytest.raises(ValueError, match="act-order"):
        call(tensors=[*tensors[:2], torch.zeros(256, dtype=torch.int32)])
    with pytest.raises(ValueError, match="row multipliers"):
        call(tensors=[tensors[0], torch.zeros(7), tensors[2]])
    for epilogue in ((torch.zeros(3, 64), False, 1.702, 7.0), (None, True, 1.702, 7.0)):
        with pytest.raises(ValueError, match="no bias and no clamped activation"):
            call(epilogue=epilogue)
    wide = torch.zeros(5, 260, dtype=torch.bfloat16)
    for strided in (wide[:, :256], torch.zeros(256, 5, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            call(x=strided)


def test_workspace_is_that_of_the_chain_and_sorted_rows_need_no_more() -> None:
    problem = REGISTRY.op("moe").problem("m=64,top_k=8,e=128,h=2048,i=768,w=int4_g128")
    space = MOE.workspace(problem, MOE.config(problem, TARGET))
    assert space.bytes == REGISTRY.kernel("moe", "moe_chain_torch").workspace(problem, {}).bytes
    tensors, _ = _tensors()
    with pytest.raises(ValueError, match="pass inter="):
        moe_sm90.launch(
            {},
            make_call(
                "moe",
                torch.zeros(2, 64),
                torch.zeros(2, 1),
                torch.zeros(2, 1),
                tensors,
                tensors,
                0,
                None,
                *SILU,
                torch.zeros(2, 64),
            ),
        )
