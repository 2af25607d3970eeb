"""moe_w8a8_sm90 without a GPU: accepted problems, shapes that fit, the library's own arithmetic, refusals of the launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import PAIRED_SCHEMES, QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm90.shapes import Operands
from gristmill.kernels.moe.moe.w8a8_sm90 import _launch, shapes
from gristmill.kernels.moe.moe.w8a8_sm90 import spec as moe_w8a8_sm90
from gristmill.kernels.moe.moe.w8a8_sm90.args import ARGS
from gristmill.kernels.native import cuda_entry, library_dir
from gristmill.quant import pack, quantize
from tests.calls import make_call

OP, TARGET = default_registry().op("moe"), Target.parse("sm_90")
KERNEL = default_registry().kernel("moe", "moe_w8a8_sm90")
FOLDER = Path(_launch.__file__).parent
SILU = (None, None, False, 1.702, 7.0)
needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(),
    reason="the CUDA library is not built: needs nvcc",
)
OVER_OPERANDS = pytest.mark.parametrize("operands", shapes.OPERANDS, ids=lambda operands: operands.format)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128", None),
        ("m=0,top_k=8,e=256,h=7168,i=256,x=fp16,w=fp8_block.fp8_g128", None),
        ("m=7,top_k=2,e=3,h=16,i=48,w=fp8.fp8_token", None),
        ("m=7,top_k=2,e=3,h=2880,i=144,w=fp8_ch.fp8_token", None),
        ("m=1,top_k=2,e=4,h=256,i=256,w=fp8_block", "not fp8_block"),
        ("m=1,top_k=2,e=4,h=256,i=256,w=int8_ch.int8_token", "not int8_ch.int8_token"),
        ("m=1,top_k=2,e=4,h=256,i=256,x=fp32,w=fp8_ch.fp8_token", "fp16 or bf16"),
        ("m=1,top_k=2,e=4,h=256,i=200,w=fp8_ch.fp8_token", "multiples of 16, got 200"),
        ("m=1,top_k=2,e=4,h=264,i=256,w=fp8_ch.fp8_token", "multiples of 16, got 264"),
        ("m=1,top_k=2,e=1025,h=256,i=256,w=fp8_ch.fp8_token", "1024 experts"),
        ("m=1,top_k=2,e=1024,h=2097152,i=1048576,w=fp8_ch.fp8_token", "in int32"),
        ("m=1,top_k=2,e=4,h=256,i=256,w=fp8_block.fp8_g128,act_order=true", "act-order"),
        (
            "m=1,top_k=2,e=4,h=256,i=256,w=fp8_block.fp8_g128,epilogue=w2_bias+clamp",
            "without w2_bias and clamp",
        ),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_activations_are_quantized_a_row_at_a_time() -> None:
    with pytest.raises(ValueError, match="a row at a time"):
        OP.problem("m=1,top_k=2,e=4,h=256,i=256,w=fp8.fp8")


def test_hardware_is_hopper_alone() -> None:
    assert not KERNEL.requires.check_hardware(TARGET)
    for name in ("sm_80", "sm_89", "sm_100", "gfx942", "cpu:avx2"):
        assert KERNEL.requires.check_hardware(Target.parse(name)), name


def test_schemes_and_shapes_are_those_of_the_sources() -> None:
    for scheme in shapes.SCHEMES:
        assert scheme in PAIRED_SCHEMES
        assert default_registry().layout("plain_v1").accepts(QuantScheme.parse(scheme)), scheme
    rows = re.findall(r"K\((\d+), (\d+), (\d), (\d), \d, (\d)\)", (FOLDER / "entry.h").read_text())
    assert tuple(shapes.Shape(*map(int, row)) for row in rows) == shapes.SHAPES


@pytest.mark.parametrize("m", [0, 1, 7, 16, 64, 257, 1024, 4096, 100000])
@pytest.mark.parametrize(
    "layer", ["top_k=8,e=128,h=2048,i=768", "top_k=8,e=32,h=7168,i=2048", "top_k=1,e=1,h=16,i=16"]
)
def test_the_default_is_tried_first_and_nothing_twice(m: int, layer: str) -> None:
    problem = OP.problem(f"m={m},{layer},w=fp8_block.fp8_g128")
    tried = list(KERNEL.space(problem, TARGET))
    assert tried[0] == KERNEL.config(problem, TARGET)
    assert (
        len(tried) == len({tuple(config.items()) for config in tried}) == 2 * len(list(shapes.choices())) - 1
    )


def _call(operands: Operands, **changed: int) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    valid = {"device": -1, "rows": 64, "experts": 8, "n": 64, "k": 256, "y_type": 2}
    valid |= shapes.config_of(operands, shapes.Choice(shapes.SHAPES[0], 1), 8, 132)
    return cuda_entry(f"gm_grouped_w8a8_{operands.format}_sm90", ARGS)(ARGS.new(**(valid | changed)))


@needs_library
@OVER_OPERANDS
def test_every_choice_fits_a_multiprocessor(operands: Operands) -> None:
    for choice in shapes.choices():
        for experts in (1, 128, shapes.MAX_EXPERTS):
            config = shapes.config_of(operands, choice, experts, 132)
            size = _call(operands, experts=experts, **config)
            assert size > 0 and (size + 1024) * choice.ctas <= 228 * 1024, (choice, size)
            more = _call(operands, experts=experts, **config | {"slots": config["slots"] + 1})
            assert more == -5 or config["slots"] == shapes.MOST_SLOTS, choice


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"y_type": 0}, -1),
        ({"w_type": 3}, -1),
        ({"rows": -1}, -2),
        ({"n": 0}, -2),
        ({"k": 264}, -2),
        ({"experts": 0}, -2),
        ({"experts": 1025}, -2),
        ({"experts": 1024, "n": 1 << 21}, -2),
        ({"tile_a": 96}, -5),
        ({"plain": 1}, -5),
        ({"slots": 1}, -5),
        ({"slots": 33}, -5),
        ({"ctas": 0}, -5),
        ({"ctas": 2}, -5),  # with the slots of one
        ({"grid": 0}, -5),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert _call(shapes.OPERANDS[0], **changed) == code


def test_scales_of_experts_do_not_overlap_and_start_at_16_bytes() -> None:
    """The places of experts.h: any counts fit the pitch."""
    operands = next(operands for operands in shapes.OPERANDS if operands.blocks)
    for counts in ([0, 0, 0], [1], [3, 0, 5, 4], [7, 9, 0, 1, 0], [128, 1, 127]):
        start, last = 0, 0
        for expert, count in enumerate(counts):
            column = -(-start // 4) * 4 + 4 * expert
            assert column % 4 == 0 and column >= last
            start, last = start + count, column + count
        assert last <= shapes.scale_pitch(operands, start, len(counts))


def _launch_on_cpu(scheme: str, tokens: int = 0, **changed: torch.Tensor) -> None:
    """Launches with tensors of a CPU, which is reached only by calls that are refused or have no rows."""
    weights = QuantScheme.parse(scheme).without_activation
    first, second = (
        pack(quantize(torch.randn(3, n, k), weights), "plain_v1") for n, k in ((96, 64), (64, 48))
    )
    problem = OP.problem(f"m={tokens},top_k=2,e=3,h=64,i=48,w={scheme}")
    x = changed.pop("x", torch.zeros(tokens, 64, dtype=torch.bfloat16))
    moe_w8a8_sm90.launch(
        KERNEL.config(problem, TARGET),
        make_call(
            "moe",
            x,
            torch.zeros(tokens, 2),
            torch.zeros(tokens, 2, dtype=torch.int32),
            list({**first.slots, **changed}.values()),
            list(second.slots.values()),
            48,
            None,
            *SILU,
            torch.empty(tokens, 64, dtype=torch.bfloat16),
        ),
    )


@pytest.mark.parametrize("scheme", shapes.SCHEMES)
def test_no_tokens_launch_nothing(scheme: str) -> None:
    _launch_on_cpu(scheme)


@pytest.mark.parametrize(
    ("scheme", "changed", "message"),
    [
        ("fp8_ch.fp8_token", {"codes": torch.zeros(3, 96, 48, dtype=torch.uint8)}, "expected codes"),
        ("fp8_ch.fp8_token", {"perm": torch.arange(64, dtype=torch.int32)}, "and a permutation"),
        ("fp8_ch.fp8_token", {"scales": torch.ones(3, 95, 1)}, "one for each of 3 times 96 rows"),
        ("fp8_block.fp8_g128", {"scales": torch.ones(3, 1, 2)}, "block rows, 1"),
        ("fp8_block.fp8_g128", {"row_block": torch.zeros(7, dtype=torch.int32)}, "7 block rows"),
        (
            "fp8_block.fp8_g128",
            {"x": torch.zeros(2, 128, dtype=torch.bfloat16)[:, ::2]},
            "multiples of 16 bytes",
        ),
    ],
)
def test_tensors_of_another_shape_are_refused(
    scheme: str, changed: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _launch_on_cpu(scheme, tokens=2, **changed)


def test_workspace_is_what_the_launcher_carves() -> None:
    for scheme in shapes.SCHEMES:
        problem = OP.problem(f"m=7,top_k=3,e=5,h=272,i=208,w={scheme}")
        size = KERNEL.workspace(problem, KERNEL.config(problem, TARGET)).bytes
        operands, x = moe_w8a8_sm90.operands_named(scheme), torch.zeros(7, 272, dtype=torch.bfloat16)
        space = torch.zeros(size, dtype=torch.uint8)
        views = moe_w8a8_sm90.views(operands, space, x, 21, 5, 208)
        assert views.rows.shape == views.tokens.shape == (21, 272) and views.gate_up.shape == (21, 416)
        # Only rows share memory, with what is not needed any more.
        for number, view in enumerate(views[:-1]):
            view.fill_(number + 1)
        for number, view in enumerate(views[:-1]):
            assert bool((view == number + 1).all()), views._fields[number]
        with pytest.raises(ValueError, match="contiguous bytes"):
            moe_w8a8_sm90.views(operands, space[:-1], x, 21, 5, 208)


def test_other_epilogues_are_refused() -> None:
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    for epilogue in ((x, None, False, 0.0, 0.0), (None, None, True, 1.0, 1.0)):
        with pytest.raises(ValueError, match="no biases and no clamped activation"):
            moe_w8a8_sm90.launch({}, make_call("moe", x, x, x, [], [], 48, None, *epilogue, x))
