"""linear_w8a8_sm90 without a GPU: accepted problems, configurations that fit, the library's own arithmetic, refusals of
the launcher."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import PAIRED_SCHEMES, QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.w8a8_sm90 import _launch, shapes
from gristmill.kernels.linear.w8a8_sm90.args import ARGS
from gristmill.kernels.linear.w8a8_sm90.shapes import OPERANDS, SHAPES, Choice, Operands, Shape
from gristmill.kernels.native import cuda_entry, library_dir
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_w8a8_sm90")
TORCH = default_registry().kernel("linear", "linear_scaled_mm_torch")
TARGET = Target.parse("sm_90")
needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(),
    reason="the CUDA library is not built: needs nvcc",
)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=fp8_ch.fp8_token", None),
        ("m=0,n=7,k=16,w=fp8.fp8_token", None),
        ("m=100000,n=2112,k=2880,x=fp16,w=fp8_block.fp8_g128,epilogue=bias+residual+silu_mul", None),
        ("m=257,n=64,k=65536,w=int8_ch.int8_token", None),
        ("m=257,n=64,k=65552,w=int8_ch.int8_token", "at most 65536"),
        ("m=1,n=64,k=129,w=fp8_ch.fp8_token", "K a multiple of 16"),
        ("m=1,n=64,k=256,x=fp32,w=fp8_ch.fp8_token", "fp16 or bf16"),
        ("m=1,n=64,k=256,w=fp8_block.fp8_g128,act_order=true", "no act-order"),
        ("m=1,n=64,k=256,w=fp8_ch", "not fp8_ch"),
        ("m=1,n=64,k=256,w=fp8_block.fp8_token", "not fp8_block.fp8_token"),
        ("m=1,n=64,k=256,w=int8_g128.int8_g128", "not int8_g128.int8_g128"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=64,k=256,w=fp8_ch.fp8_token", None),
        ("m=0,n=16,k=16,w=fp8.fp8_token,epilogue=bias+silu_mul", None),
        ("m=1,n=72,k=256,w=fp8_ch.fp8_token", "multiples of 16"),
        ("m=1,n=64,k=256,x=fp16,w=fp8_ch.fp8_token", "writes bf16"),
        ("m=1,n=64,k=256,w=fp8_block.fp8_g128", "not fp8_block.fp8_g128"),
    ],
)
def test_the_wrapped_product_of_torch_accepts(problem: str, reason: str | None) -> None:
    refusal = TORCH.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal
    if refusal is None:
        room = TORCH.workspace(OP.problem(problem), {})
        assert room.bytes >= OP.problem(problem).integer("m") * (OP.problem(problem).integer("k") + 4)


def test_hardware_is_hopper_alone() -> None:
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert KERNEL.requires.check_hardware(Target.parse(name)), name
    assert not KERNEL.requires.check_hardware(TARGET)


def test_schemes_are_pairs_that_the_layout_holds() -> None:
    for scheme in shapes.SCHEMES:
        assert scheme in PAIRED_SCHEMES
        assert default_registry().layout("plain_v1").accepts(QuantScheme.parse(scheme)), scheme


@pytest.mark.parametrize("m", [0, 1, 17, 64, 65, 128, 257, 1000, 4096, 20000])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 272), (2112, 7168), (24576, 1536), (151936, 4096)])
@pytest.mark.parametrize("scheme", shapes.SCHEMES)
def test_the_default_is_the_first_to_try(scheme: str, m: int, n: int, k: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k},w={scheme}")
    config = KERNEL.config(problem, TARGET)
    tried = list(KERNEL.space(problem, TARGET))
    assert config == tried[0] and len(tried) == len({tuple(c.items()) for c in tried})
    estimate = KERNEL.estimate(problem, TARGET)
    assert estimate is not None and 0 < estimate < 1e6


def _tiles(m: int, n: int, k: int, scheme: str) -> list[tuple[int, int, int]]:
    """Rows, columns and kinds of the CTAs that are tried, the default first."""
    configs = KERNEL.space(OP.problem(f"m={m},n={n},k={k},w={scheme}"), TARGET)
    return [(int(c["rows"]), int(c["columns"]), int(c["plain"])) for c in configs]


@pytest.mark.parametrize("scheme", shapes.SCHEMES)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 6144, 4096), (200, 5120, 5120)])
def test_tiles_of_96_columns_are_chosen_by_times_alone(scheme: str, m: int, n: int, k: int) -> None:
    """Two rows of tiles that fill more multiprocessors than those of 128 columns: once 7 % less time, and once 18 % more."""
    tiles = _tiles(m, n, k, scheme)
    assert {(128, 96, 2), (128, 128, 2)} <= set(tiles)
    assert tiles[0][:2] == (128, 128)
    assert (128, 96) not in [_tiles(m, 6144, 4096, scheme)[0][:2] for m in (1, 64, 1024, 4096)]


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (24576, 1536)])
def test_64_rows_of_tokens_scales_have_tiles_of_64_columns(n: int, k: int) -> None:
    """They took 4.9 to 6.7 and 11.2 us on an H200, those of 32 columns 7 and 8 % more."""
    assert _tiles(64, n, k, "fp8_ch.fp8_token")[0] == (64, 64, 2)


@pytest.mark.parametrize("scheme", shapes.SCHEMES)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (24576, 1536), (4096, 7168)])
def test_many_rows_with_blocks_have_one_wait_a_tile(scheme: str, n: int, k: int) -> None:
    tiles = _tiles(4096, n, k, scheme)
    assert {(256, 128, 4), (256, 128, 6)} <= set(tiles)
    assert (tiles[0] == (256, 128, 6)) == ("block" in scheme)


def test_workspaces_hold_codes_scales_and_sums() -> None:
    for scheme, size in (
        ("fp8_ch.fp8_token", 7 * 272 + 8 * 4),
        ("fp8_block.fp8_g128", 7 * 272 + 8 * 4 * 3),
        ("int8_ch.int8_token", 7 * 272 + 8 * 4 * 2),
    ):
        problem = OP.problem(f"m=7,n=64,k=272,w={scheme}")
        room = KERNEL.workspace(problem, KERNEL.config(problem, TARGET))
        assert (room.bytes, room.zeroed) == (size, False)
        gated = OP.problem(f"m=7,n=64,k=272,w={scheme},epilogue=silu_mul")
        assert KERNEL.workspace(gated, KERNEL.config(gated, TARGET)).bytes == size + 2 * 7 * 64


def _call(operands: Operands, **changed: int) -> int:
    """Returns the library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    valid = {
        "m": 64,
        "n": 64,
        "k": 256,
        "ldx": 256,
        "y_type": 2,
        "w_type": 0,
        "x_pitch": 64,
        "pdl": 1,
        **shapes.config_of(operands, Choice(SHAPES[0]), 132),
        "device": -1,
    }
    return cuda_entry(f"gm_linear_w8a8_{operands.format}_sm90", ARGS)(ARGS.new(**(valid | changed)))


@needs_library
@pytest.mark.parametrize("operands", OPERANDS, ids=lambda operands: operands.format)
def test_every_shape_fits_a_multiprocessor(operands: Operands) -> None:
    for shape in SHAPES:
        for ctas in range(1, shape.ctas + 1):
            config = shapes.config_of(operands, Choice(shape, ctas=ctas), 132)
            size = _call(operands, **config)
            assert size > 0 and (size + 1024) * ctas <= 228 * 1024, (shape, ctas, size)
            one_more = _call(operands, **config | {"slots": config["slots"] + 1})
            assert one_more == -5, (shape, ctas)


@needs_library
@pytest.mark.parametrize("operands", OPERANDS, ids=lambda operands: operands.format)
def test_the_library_takes_every_candidate(operands: Operands) -> None:
    for m in (1, 16, 33, 64, 100, 128, 256, 1000, 4096):
        for n, k in ((64, 128), (7168, 2048), (4096, 4096), (200, 640), (24576, 1536), (576, 7168)):
            for _, config in shapes.ranked(operands, m, n, k, 132):
                assert _call(operands, m=m, n=n, k=k, ldx=k, x_pitch=m + 3, **config) > 0, (m, n, k, config)


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"columns": 48}, -5),
        ({"rows": 96}, -5),
        ({"plain": 1}, -5),
        ({"slots": 1}, -5),
        ({"slots": 33}, -5),
        ({"split": 3}, -5),
        ({"split": 4}, -5),  # two blocks of k
        ({"ctas": 5}, -5),
        ({"ctas": 2}, -5),  # with the slots of one CTA
        ({"band": 0}, -5),
        ({"grid": 0}, -5),
        ({"m": -1}, -2),
        ({"n": 0}, -2),
        ({"k": 0}, -2),
        ({"k": 264}, -2),
        ({"ldx": 240}, -2),
        ({"ldx": 264}, -2),
        ({"y_type": 0}, -1),
        ({"w_type": 3}, -1),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert _call(OPERANDS[0], **changed) == code


def _launch_on_cpu(scheme: str, n: int, k: int, m: int = 0, **changed: torch.Tensor) -> None:
    """Launches with tensors of a CPU, which is reached only by calls that are refused or have no rows."""
    packed = pack(quantize(torch.randn(n, k), QuantScheme.parse(scheme).without_activation), "plain_v1")
    slots = {**packed.slots, **changed}
    x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n).bfloat16()
    config = KERNEL.config(OP.problem(f"m={m},n={n},k={k},w={scheme}"), TARGET)
    _launch.launch(config, make_call("linear", x, list(slots.values()), None, None, False, n, None, out))


@pytest.mark.parametrize("scheme", shapes.SCHEMES)
def test_no_rows_launch_nothing(scheme: str) -> None:
    _launch_on_cpu(scheme, 200, 272)


@pytest.mark.parametrize(
    ("scheme", "changed", "message"),
    [
        ("fp8_ch.fp8_token", {"codes": torch.zeros(200, 256, dtype=torch.uint8)}, "expected codes"),
        ("fp8_ch.fp8_token", {"perm": torch.arange(272, dtype=torch.int32)}, "and a permutation"),
        ("fp8_ch.fp8_token", {"scales": torch.ones(199, 1)}, "one for each of 200 rows"),
        ("fp8_block.fp8_g128", {"scales": torch.ones(2, 2)}, "block rows, 3"),
        ("fp8_block.fp8_g128", {"row_block": torch.zeros(7, dtype=torch.int32)}, "7 block rows"),
    ],
)
def test_weights_of_another_shape_are_refused(
    scheme: str, changed: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _launch_on_cpu(scheme, 200, 272, **changed)


def test_codes_of_int8_are_128_too_large() -> None:
    """The product multiplies stored codes and subtracts 128 times the sum of x's: the same as integers."""
    weight = quantize(torch.randn(9, 64), "int8_ch")
    codes = weight.codes.int()
    x = quantize_activation(torch.randn(5, 64), "int8_token").values.int()
    exact = x @ (codes - 128).T
    assert torch.equal(x @ codes.T - 128 * x.sum(1, keepdim=True), exact)
    assert weight.scheme.implicit_zero == 128


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(str(v) for v in shape[:3]))
def test_owners_of_fragments_cover_a_tile(shape: Shape) -> None:
    """Each fragment of eight rows of x has one owner among the CTAs that share a tile, and its place there."""
    fragments = shape.columns // 8
    for split in (1,) if shape.plain else (1, 2, 4, 8):  # only tiles with W as operand A are shared
        share = max(1, fragments // split)
        owners = [f // share for f in range(fragments)]
        assert max(owners) < split and all(owners.count(owner) == share for owner in set(owners))
