"""linear_block_scaled_cutedsl_sm100 without CuTe DSL: accepted problems, tiles that fit, x quantized into tiles of scales bit for bit.
tests/integrations/cutedsl/test_block_scaled.py has the rest."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from gristmill.kernel_registry import Target, default_registry
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.kernels.cutedsl.devices import SHARED_BYTES, TENSOR_COLUMNS
from gristmill.kernels.interpreter import install
from gristmill.kernels.linear.block_scaled_cutedsl import spec
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import (
    FORMS,
    PART,
    TILES,
    awaited,
    part_of,
    room,
    room_of,
    tensor_memory,
)
from gristmill.kernels.linear.block_scaled_triton.quantize import OPERANDS
from gristmill.quant.activations import quantize_activation
from gristmill.quant.layouts._scales128x4 import untiled

pytest.importorskip("triton", reason="triton is not installed")
OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_block_scaled_cutedsl_sm100")
B200 = Target.parse("sm_100")


@pytest.fixture(autouse=True)
def repaired() -> None:
    install()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=0,n=8,k=32,w=nvfp4.nvfp4", None),
        ("m=4096,n=28672,k=4096,x=fp16,w=nvfp4.nvfp4,epilogue=bias+residual+silu_mul", None),
        ("m=7,n=264,k=96,w=mxfp4.mxfp4", None),
        ("m=7,n=264,k=96,w=mxfp8.mxfp8,epilogue=bias", None),
        ("m=7,n=264,k=128,w=mxfp4.mxfp8", None),
        ("m=1,n=64,k=48,w=nvfp4.nvfp4", "K a multiple of 32 and N of 8, got N=64, K=48"),
        ("m=1,n=64,k=96,w=mxfp4.mxfp8", "K a multiple of 128"),
        ("m=1,n=60,k=64,w=mxfp8.mxfp8", "N of 8, got N=60"),
        ("m=1,n=24,k=64,w=mxfp8.mxfp8,epilogue=silu_mul", "N / 2 a multiple of 8, got N=24"),
        ("m=1,n=64,k=64,w=mxfp4", "multiplies nvfp4.nvfp4, mxfp4.mxfp4, mxfp8.mxfp8, mxfp4.mxfp8, not mxfp4"),
        ("m=1,n=64,k=64,x=fp32,w=nvfp4.nvfp4", "fp16 or bf16 activations, not fp32"),
        ("m=1,n=64,k=64,w=mxfp4.mxfp4,act_order=true", "not act-order"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("name", "reason"),
    [("sm_100", None), ("sm_103", None), ("sm_110", "family"), ("sm_120", "tcgen05"), ("sm_90", "tcgen05")],
)
def test_runs_on_the_family_of_sm_100(name: str, reason: str | None) -> None:
    reasons = KERNEL.requires.check_hardware(Target.parse(name))
    assert not reasons if reason is None else reason in reasons[0]


@pytest.mark.parametrize("scheme", FORMS)
def test_slots_fit_into_shared_memory(scheme: str) -> None:
    """At least three, so that two are on their way while one is multiplied; another one would not fit."""
    form = FORMS[scheme]
    for bn in TILES:
        used = form.slots(bn) * form.slot_bytes(bn)
        assert form.slots(bn) >= 3 and used + 4096 <= SHARED_BYTES < used + 4096 + form.slot_bytes(bn)
    of_x, of_w = (4 if codes == "e2m1" else 8 for codes in (form.x, form.w))
    assert form.columns * max(of_x, of_w) == 8 * 128 and form.columns * (128 + 256) % form.group == 0


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("m=1,n=4096,k=4096", [(64, "none"), (128, "none"), (256, "none")]),
        ("m=4096,n=4096,k=4096,epilogue=bias+residual", [(bn, "bias+residual") for bn in (256, 64, 128)]),
        (
            "m=64,n=28672,k=4096,epilogue=bias+residual+silu_mul",
            [(256, "bias+residual+silu_mul"), (128, "bias"), (64, "bias"), (256, "bias")],
        ),
        ("m=64,n=96,k=4096,epilogue=residual+silu_mul", [(bn, "none") for bn in (64, 128, 256)]),
    ],
)
def test_tiles_and_what_follows_them(problem: str, expected: list[tuple[int, str]]) -> None:
    """Gating needs halves of whole tiles of scales; else it follows, and so does what is added after it."""
    made = list(KERNEL.space(OP.problem(problem + ",w=nvfp4.nvfp4"), B200))
    assert [(config["bn"], config["epilogue"]) for config in made] == expected
    assert made[0] == KERNEL.config(OP.problem(problem + ",w=nvfp4.nvfp4"), B200)
    assert all(config["scheme"] == "nvfp4.nvfp4" and config["arch"] == "sm_100a" for config in made)


@pytest.mark.parametrize("scheme", FORMS)
@pytest.mark.parametrize(("m", "k"), [(3, 32), (5, 1056), (131, 96)])
def test_x_is_quantized_into_tiles(scheme: str, m: int, k: int) -> None:
    """Bit for bit as the reference does it, for strided rows; scales past K are numbers, and nothing is written past the rows."""
    form = str(QuantScheme.parse(scheme).activation)
    of_x = OPERANDS[form]
    generator = torch.Generator().manual_seed(m * k)
    x = (torch.randn(m, k + 8, generator=generator) * 4).bfloat16()[:, :k]
    x[0] = 0
    space = torch.full((room_of(scheme, m, k).size,), 0xFF, dtype=torch.uint8)
    codes, scales, factor = spec._quantized(scheme, x, space, m, k)
    expected, groups = quantize_activation(x.contiguous(), form), k // of_x.group
    assert codes.shape == (m, k // of_x.packed) and scales.shape == (cdiv(m, 128), cdiv(groups, 4), 512)
    assert torch.equal(codes, expected.values.view(torch.uint8))
    assert torch.equal(untiled(scales, m, groups), expected.scales.view(torch.uint8))
    whole = untiled(scales, scales.shape[0] * 128, scales.shape[1] * 4)
    past = whole[:m, groups:]
    assert not bool(((past if of_x.emax else past & 0x7F) == (0xFF if of_x.emax else 0x7F)).any())
    assert bool((whole[m:] == 0xFF).all()), "written past the rows of x"
    if expected.global_scale is not None:
        assert torch.equal(factor, expected.global_scale)


def test_the_workspace_has_room_for_all_parts() -> None:
    problem = OP.problem("m=300,n=64,k=160,w=nvfp4.nvfp4")
    room = room_of("nvfp4.nvfp4", 300, 160)
    assert KERNEL.workspace(problem, KERNEL.config(problem, B200)).bytes == room.size
    assert room.scales >= 300 * 80 and room.factor - room.scales >= 3 * 3 * 512
    assert room.size - room.factor >= 4 * 257 and not any(part % 256 for part in room)


@pytest.mark.parametrize("bn", TILES)
def test_sums_and_scales_fit_into_tensor_memory(bn: int) -> None:
    """Every instruction of a slot has 4 columns of scales for 128 rows of x and of W, after the sums of two tiles."""
    memory = tensor_memory(bn)
    assert memory.of_w - memory.of_x == 4 * 4 and TENSOR_COLUMNS - memory.of_w == 4 * 4 * cdiv(bn, 128)
    assert memory.apart + bn <= memory.of_x and memory.apart + memory.shared == bn
    assert memory.shared == {64: 0, 128: 0, 256: 48}[bn]


def columns_of(bn: int, gated: bool, part: int) -> set[int]:
    """Columns of a tile that one part of y is made of."""
    halves = (0, bn // 2) if gated else (0,)
    return {half + part * PART + column for half in halves for column in range(PART)}


def run(bn: int, gated: bool, seed: int, wait: Callable[[int, int, int], tuple[int, int]] = room) -> bool:
    """Whether nine tiles pass through tensor memory whole, when the warps that multiply and finish take turns at random."""
    memory, parts = tensor_memory(bn), (bn // 2 if gated else bn) // PART
    holds: list[int | None] = [None] * TENSOR_COLUMNS
    full, empty = [0, 0], [0, 0]  # completed phases of the barriers
    right = True

    def multiplies() -> Iterator[bool]:
        for tile in range(9):
            stage, turn = tile % 2, tile // 2 % 2
            barrier, parity = wait(stage, turn, memory.shared)
            while empty[barrier] % 2 == parity:
                yield False
            for column in range(bn):
                holds[stage * memory.apart + column] = tile
            yield True
            full[stage] += 1
            yield True

    def finishes() -> Iterator[bool]:
        nonlocal right
        for tile in range(9):
            stage, turn = tile % 2, tile // 2 % 2
            while full[stage] % 2 == turn:
                yield False
            for index in range(parts):
                part = part_of(index, stage, parts, memory.shared)
                right &= all(
                    holds[stage * memory.apart + column] == tile for column in columns_of(bn, gated, part)
                )
                if index + 1 == awaited(parts, memory.shared):
                    empty[stage] += 1
                yield True

    chance, warps = random.Random(seed), [multiplies(), finishes()]
    while warps:
        warp = chance.choice(warps)
        if next(warp, None) is None:
            warps.remove(warp)
    return right


@pytest.mark.parametrize(("bn", "gated"), [(64, False), (128, False), (256, False), (256, True)])
def test_no_sum_is_overwritten_before_it_is_read(bn: int, gated: bool) -> None:
    parts, memory = (bn // 2 if gated else bn) // PART, tensor_memory(bn)
    for stage in range(2):
        order = [part_of(index, stage, parts, memory.shared) for index in range(parts)]
        assert sorted(order) == list(range(parts))
    assert all(run(bn, gated, seed) for seed in range(50))


def test_a_tile_that_waits_for_its_own_columns_only_is_seen() -> None:
    assert not all(run(256, False, seed, lambda stage, turn, _: (stage, turn ^ 1)) for seed in range(50))
