"""Experts of dense weights on Hopper without a GPU: accepted problems, shapes that fit, where numbers go, what library and launchers refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_linear.dense_sm90 import _launch, shapes
from gristmill.kernels.moe.grouped_linear.dense_sm90.args import ARGS
from gristmill.kernels.moe.moe import dense_sm90 as moe_dense_sm90
from gristmill.kernels.native import cuda_entry, library_dir
from tests.calls import make_call
from tests.kernels.machine_code import TOOLS, images, instructions, usage

REGISTRY, TARGET = default_registry(), Target.parse("sm_90")
MOE = REGISTRY.kernel("moe", "moe_dense_sm90")
GROUPED = REGISTRY.kernel("grouped_linear", "grouped_linear_dense_sm90")
FOLDER = Path(_launch.__file__).parent
LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
SILU = (None, None, False, 1.702, 7.0)
REGISTERS = 65536
needs_library = pytest.mark.skipif(not LIBRARY.is_file(), reason="the CUDA library is not built: needs nvcc")
needs_tools = pytest.mark.skipif(
    not LIBRARY.is_file() or TOOLS is None,
    reason="needs the CUDA library and triton's cuobjdump and nvdisasm",
)
OVER_SHAPES = pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: "x".join(map(str, shape[:5])))


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MOE, "m=1,top_k=8,e=128,h=2048,i=768", None),
        (MOE, "m=0,top_k=4,e=32,h=2880,i=2880,x=fp16,w=fp16,epilogue=w13_bias+w2_bias+clamp", None),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,w=int4_g128", "not int4_g128 by bf16"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,x=fp32,w=fp32", "not fp32 by fp32"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=256,x=fp16", "not bf16 by fp16"),
        (MOE, "m=1,top_k=2,e=4,h=252,i=256", "multiples of 8, got 252 and 256"),
        (MOE, "m=1,top_k=2,e=4,h=256,i=252", "multiples of 8, got 256 and 252"),
        (MOE, "m=1,top_k=2,e=1025,h=256,i=256", "1024 experts"),
        (GROUPED, "m=5,e=3,n=96,k=256,epilogue=bias+silu_mul+clamp", None),
        (GROUPED, "m=5,e=3,n=24,k=8", None),
        (GROUPED, "m=5,e=3,n=96,k=256,gather=2", "gathers none"),
        (GROUPED, "m=5,e=3,n=24,k=256,epilogue=silu_mul", "got 256 and 12"),
        (GROUPED, "m=5,e=3,n=20,k=256", "got 256 and 20"),
        (GROUPED, "m=5,e=3,n=24,k=130", "got 130 and 24"),
    ],
)
def test_accepts(kernel: Kernel, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(REGISTRY.op(kernel.op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_hardware_is_hopper_alone() -> None:
    for kernel in (MOE, GROUPED):
        assert not kernel.requires.check_hardware(TARGET)
        for other in ("sm_80", "sm_100", "gfx942"):
            assert kernel.requires.check_hardware(Target.parse(other)), (kernel.name, other)


def test_it_is_preferred_where_nothing_is_measured() -> None:
    """To kernels of other languages, whose times beside it are in bench/results/h200/peers.json."""
    for kernel in (MOE, GROUPED):
        others = [
            one
            for one in REGISTRY.all_kernels()
            if one.op == kernel.op
            and one.language in ("triton", "cutedsl")
            and not one.requires.check_hardware(Target.parse("sm_90"))
        ]
        assert others and all(one.priority < kernel.priority for one in others)


def test_shapes_are_those_of_the_library() -> None:
    text = (FOLDER / "entry.h").read_text()
    rows = re.findall(r"\bK\(((?:\d+, )+\d+)\)", text)
    numbers = [tuple(map(int, row.split(", "))) for row in rows]
    assert tuple(shapes.Shape(*row[:8], row[8:]) for row in numbers) == shapes.SHAPES


@OVER_SHAPES
def test_registers_fit_those_that_a_cta_is_launched_with(shape: shapes.Shape) -> None:
    """setmaxnreg waits for ever where a CTA asks for more. Warps get registers by eights, and a CTA's share is that of launch bounds."""
    launched = min(255, REGISTERS // (shape.threads * shape.ctas)) // 8 * 8
    multiply, copy = shape.registers
    asked = 128 * (shape.groups * shape.slices * multiply + copy)
    assert asked <= launched * shape.threads
    assert multiply % 8 == copy % 8 == 0 and copy <= launched <= multiply
    text = (FOLDER / "params.h").read_text()
    assert "kWarpgroups == 4 ? 112 : CTAS == 2 ? 104 : 232" in " ".join(text.split())
    assert "kWarpgroups == 4 || CTAS == 2 ? 32 : 40" in " ".join(text.split())


@OVER_SHAPES
def test_a_tile_of_any_rows_has_a_width(shape: shapes.Shape) -> None:
    assert shape.widths == tuple(sorted(shape.widths)) and shape.widths[-1] == shape.mt
    for rows in range(1, shape.mt + 1):
        width = shape.width_of(rows)
        boxes = cdiv(rows, shape.box)
        assert rows <= width and boxes * shape.box <= shape.mt, "boxes stay in their slot"


@OVER_SHAPES
@pytest.mark.parametrize("experts", [1, 32, 128, 1024])
def test_choices_fit_a_multiprocessor(shape: shapes.Shape, experts: int) -> None:
    chosen = [choice for choice in shapes.choices(2048, experts) if choice.shape == shape]
    size = shape.shared(experts)
    assert bool(chosen) == ((size + shapes.RESERVED) * shape.ctas <= shapes.PROCESSOR_BYTES)
    assert experts > 128 or chosen, "every shape serves the models that there are"


@pytest.mark.parametrize("m", [0, 1, 2, 7, 16, 64, 257, 1024, 4096, 100000])
@pytest.mark.parametrize(
    "layer",
    [
        "top_k=8,e=128,h=2048,i=768",
        "top_k=2,e=8,h=4096,i=14336",
        "top_k=1,e=1,h=8,i=8",
        "top_k=8,e=1024,h=7168,i=256",
    ],
)
def test_the_default_is_tried_first_and_nothing_twice(m: int, layer: str) -> None:
    op = REGISTRY.op("moe")
    problem = op.problem(f"m={m},{layer}")
    tried = list(MOE.space(problem, TARGET))
    assert tried[0] == MOE.config(problem, TARGET)
    assert len(tried) == len({tuple(sorted(config.items())) for config in tried})
    assert all(MOE.misfit(problem, config) is None for config in tried)
    e, h, i = problem.integers(*"ehi")
    for n, k in ((2 * i, h), (h, i)):
        grouped = REGISTRY.op("grouped_linear").problem(f"m={m},e={e},n={n},k={k}")
        every = list(GROUPED.space(grouped, TARGET))
        assert len(every) == len(list(shapes.choices(k, e))) and every[0] == GROUPED.config(grouped, TARGET)


def test_the_model_prefers_what_reads_once() -> None:
    """Few tokens: tiles for all multiprocessors. Many: tiles that hold an expert's rows, wide ones."""

    def first(m: int, e: int, n: int, k: int) -> shapes.Choice:
        return shapes.ranked(m, e, n, k, 132)[0]

    one = first(1, 32, 4096, 7168)
    assert one.shape.slices > 1 and cdiv(4096, one.w_rows * one.shape.w_blocks) > 66
    assert first(8192, 128, 1536, 2048).shape.mt >= 64
    many = first(32768, 128, 1536, 2048)
    assert many.shape.mt >= 128 and many.w_rows == shapes.BLOCK_ROWS
    times = [
        shapes.microseconds(shapes.ranked(m, 128, 1536, 2048, 132)[0], m, 128, 1536, 2048, 132)
        for m in (0, 1, 8, 512, 8192, 32768, 262144)
    ]
    assert times == sorted(times)


def test_a_token_has_different_experts() -> None:
    """One token of two experts, 134 tiles each, is one tile too many for 264 CTAs twice; tiles of 128 rows fit, and take 86 us and not 99."""
    problem = REGISTRY.op("moe").problem("m=1,top_k=2,e=16,h=4096,i=6400")
    chosen = MOE.config(problem, Target.parse("h200"))
    assert (chosen["mt1"], chosen["w_rows1"], chosen["grid1"]) == (16, 64, 264)
    assert shapes._shares(2, 16, 2)[0] == pytest.approx(2.0) and shapes._shares(2, 16, 1)[0] < 1.95
    assert shapes._shares(48, 16, 2)[0] == pytest.approx(16 * (1 - (14 / 16) ** 24))
    assert shapes._shares(6, 4, 6)[0] == 4


# Where numbers go. What follows repeats the arithmetic of product.cuh, and then asks what every number of y is.

CASES = [
    (shape, w_rows, gated)
    for shape in shapes.SHAPES
    for w_rows in ((64, 48, 32, 16) if shape.mt <= 16 else (64,))
    for gated in (False, True)
]


def copied_rows(shape: shapes.Shape, w_rows: int, gated: bool, block: int, out_n: int) -> dict[int, int]:
    """Row of a slot's W -> row of the expert's W, by the boxes of `produce` and the tensor maps of `weight_map`; rows of zeros are left out."""
    columns = w_rows // 2 if gated else w_rows
    found = {}
    for b in range(shape.w_blocks):
        n = block * shape.w_blocks * columns + b * columns
        if gated:
            for group in range(w_rows // 16):
                for half in range(2):
                    for row in range(8):
                        if (n >> 3) + group < out_n // 8:
                            source = row + half * out_n + 8 * ((n >> 3) + group)
                            found[b * 64 + group * 16 + half * 8 + row] = source
        else:
            found |= {b * 64 + row: n + row for row in range(w_rows) if n + row < out_n}
    return found


def stored(
    shape: shapes.Shape, w_rows: int, gated: bool, block: int, out_n: int, width: int, rows: int
) -> Iterator[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """(row of y in the tile, column of y, the sums that it is made of, each a row of the slot's W and a row of x) of every number that is stored."""
    columns = w_rows // 2 if gated else w_rows
    most, fragments = shape.staged // 8, width // 8
    chunk = 4 if most >= 4 and fragments % 4 == 0 else 2 if fragments % 2 == 0 else 1
    for group in range(shape.groups):
        n0 = (block * shape.groups + group) * shape.blocks * columns

        def sums(warp: int, lane: int, b: int, i: int, group: int = group) -> tuple[int, int]:
            """Row of W and row of x of sum i of a thread, in the layout of wgmma."""
            row = warp * 16 + lane // 4 + 8 * (i >> 1 & 1)
            return (group * shape.blocks + b) * 64 + row, i // 4 * 8 + lane % 4 * 2 + (i & 1)

        for b in range(1 if gated else shape.blocks):
            for first in range(0, fragments, chunk):
                buffer: dict[int, tuple[tuple[int, int], ...]] = {}  # by address, in 2 bytes
                for warp in range(4):
                    for address, matrix in matrices(shape, gated, warp, chunk, first, b):
                        for lane in range(32):
                            for j in range(2):  # the transposed matrix: row 2 (lane % 4) + j, column lane / 4
                                low = lane % 4 * 2 + j
                                at = address(low) // 2 + lane // 4
                                assert at not in buffer, "written twice"
                                buffer[at] = tuple(sums(warp, lane, *one) for one in matrix(j))
                for thread in range(128):
                    piece, row = thread & 7, thread >> 3
                    if gated:
                        n = n0 + (piece >> 2) * columns + (piece & 3) * 8
                        there = piece < shape.blocks * 4 and (piece & 3) * 16 < w_rows and n < out_n
                    else:
                        n = n0 + b * w_rows + piece * 8
                        there = piece * 8 < w_rows and n < out_n
                    for read in range(cdiv(chunk * 8, 16)):
                        m = first * 8 + row + read * 16
                        if there and row + read * 16 < chunk * 8 and m < rows:
                            at = (row * 128 + ((piece ^ (row & 7)) << 4) + read * 2048) // 2
                            for column in range(8):
                                yield m, n + column, buffer[at + column]


def matrices(shape: shapes.Shape, gated: bool, warp: int, chunk: int, first: int, b: int) -> Iterator[tuple]:
    """(address of a row of the matrix, sums of element j of a thread) of each matrix that a warp stages, as `store` has them."""

    def place(fragment: int, piece: int):
        return lambda low: fragment * 1024 + low * 128 + ((piece ^ low) << 4)

    for f in range(chunk):
        i = (first + f) * 4
        if gated:
            for block in range(shape.blocks):
                yield (
                    place(f, block * 4 + warp),
                    lambda j, i=i, block=block: ((block, i + j), (block, i + j + 2)),
                )
        else:
            for half in range(2):
                yield place(f, warp * 2 + half), lambda j, i=i, half=half: ((b, i + half * 2 + j),)


@pytest.mark.parametrize(("shape", "w_rows", "gated"), CASES)
def test_every_number_of_y_is_of_its_rows(shape: shapes.Shape, w_rows: int, gated: bool) -> None:
    """All tiles along N of one expert, of a y whose columns are no multiple of a tile: each number once, from its rows of W and x."""
    columns = w_rows // 2 if gated else w_rows
    out_n = shape.w_blocks * columns + 8 * (columns // 8 // 2) + 8
    width = shape.widths[min(1, len(shape.widths) - 1)]
    rows = width - 3
    seen = set()
    for block in range(cdiv(out_n, shape.w_blocks * columns)):
        of_slot = copied_rows(shape, w_rows, gated, block, out_n)
        for m, n, sums in stored(shape, w_rows, gated, block, out_n, width, rows):
            assert (m, n) not in seen
            seen.add((m, n))
            wanted = (n, n + out_n) if gated else (n,)
            assert tuple(of_slot[row] for row, _ in sums) == wanted, (m, n)
            assert {token for _, token in sums} == {m}, (m, n)
    assert seen == {(m, n) for m in range(rows) for n in range(out_n)}


@OVER_SHAPES
@pytest.mark.parametrize("steps", [4, 5, 11, 12, 32, 112])
def test_slices_and_the_copies_meet_in_the_same_slots(shape: shapes.Shape, steps: int) -> None:
    """Places as `Place::advance` moves them: slot k of tile t is the one that was filled for it, in the parity of its round."""

    def advance(place: tuple[int, int], slots: int, rounds: int = 0) -> tuple[int, int]:
        index, parity = place[0] + slots, place[1] ^ rounds
        return (index - shape.slots, parity ^ 1) if index >= shape.slots else (index, parity)

    filled, firsts = (0, 0), [(0, 0)] * shape.slices
    for _tile in range(2 * shape.slots + 1):
        of_tile = []
        for _ in range(steps):
            of_tile.append(filled)
            filled = advance(filled, 1)
        for slice_, first in enumerate(firsts):
            place = advance(first, slice_) if shape.slices > 1 else first
            for k in range(slice_, steps, shape.slices):
                assert place == of_tile[k]
                place = advance(place, shape.slices)
            jumped = advance(first, steps % shape.slots, steps // shape.slots & 1)
            firsts[slice_] = jumped if shape.slices > 1 else place
            assert firsts[slice_] == filled


def _call(form: str = "bf16", **changed: int) -> int:
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
    valid |= shapes.config_of(shapes.Choice(shapes.SHAPES[0]), 132)
    return cuda_entry(f"gm_grouped_dense_{form}_sm90", ARGS)(ARGS.new(**(valid | changed)))


@needs_library
@pytest.mark.parametrize("form", shapes.TYPES)
def test_every_instance_is_there_and_takes_the_memory_that_python_says(form: str) -> None:
    for shape in shapes.SHAPES:
        for experts in (1, 128, shapes.MAX_EXPERTS):
            config = shapes.config_of(shapes.Choice(shape), 132)
            size = shape.shared(experts)
            assert _call(form, experts=experts, **config) == (size if size <= shapes.MOST_SHARED else -5)


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, None),
        ({"mt": 24}, -5),
        ({"offsets": 0}, -5),
        ({"grid": 0}, -5),
        ({"mt": 256, "blocks": 1, "groups": 2, "slices": 1, "cluster": 2, "grid": 1}, -5),
        ({"experts": 1025}, -2),
        ({"experts": 0}, -2),
        ({"k": 1020}, -2),
        ({"k": 128}, -5),
        ({"ldx": 1020}, -2),
        ({"ldx": 512}, -2),
        ({"n": 252}, -2),
        ({"n": 248, "silu_mul": 1}, -2),
        ({"x": 8}, -2),
        ({"w": 8}, -2),
        ({"y": 8}, -2),
        ({"w_rows": 0}, -5),
        ({"w_rows": 40}, -5),
        ({"w_rows": 80}, -5),
        ({"lag": -1}, -5),
        ({"lag": 16}, -5),
    ],
)
def test_library_refuses(changed: dict[str, int], code: int | None) -> None:
    answer = _call(**changed)
    assert answer > 0 if code is None else answer == code


def test_launchers_refuse_tensors_that_do_not_fit() -> None:
    config = shapes.config_of(shapes.Choice(shapes.SHAPES[2]), 132)
    offsets = torch.tensor([0, 0, 0, 5], dtype=torch.int32)
    x, w = torch.zeros(5, 256).bfloat16(), torch.zeros(3, 64, 256).bfloat16()
    out = torch.zeros(5, 64).bfloat16()

    def call(
        x: torch.Tensor = x,
        w: torch.Tensor = w,
        out: torch.Tensor = out,
        bias: torch.Tensor | None = None,
        permutation: torch.Tensor | None = None,
    ) -> None:
        rest = (permutation, 1, False, 0, bias, False, 1.702, 7.0, out)
        _launch.launch(config, make_call("grouped_linear", x, [w], offsets, *rest))

    call(out=out[:0])  # no rows, no launch
    with pytest.raises(ValueError, match="without a permutation"):
        call(permutation=torch.zeros(5, dtype=torch.int32))
    for wrong in (
        w[:2],
        w.half(),
        w[:, :, :128].contiguous(),
        w.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        with pytest.raises(ValueError, match="expected a contiguous"):
            call(w=wrong)
    for wrong in (torch.zeros(3, 32).bfloat16(), torch.zeros(3, 64)):
        with pytest.raises(ValueError, match="bias"):
            call(bias=wrong)
    wide = torch.zeros(5, 260).bfloat16()
    for strided in (wide[:, :256], torch.zeros(256, 5).bfloat16().T):
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            call(x=strided)
    layer = (torch.zeros(2, 1), torch.zeros(2, 1), [w], [w], 32, None, *SILU)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        moe_dense_sm90.launch({}, make_call("moe", wide[:2, 1:65], *layer, torch.zeros(2, 64)))


def test_workspace_is_that_of_the_chain() -> None:
    problem = REGISTRY.op("moe").problem("m=64,top_k=8,e=128,h=2048,i=768")
    space = MOE.workspace(problem, MOE.config(problem, TARGET))
    assert space.bytes == REGISTRY.kernel("moe", "moe_chain_torch").workspace(problem, {}).bytes


@needs_tools
def test_machine_code() -> None:
    """Every instance is present and without a stack; four products for each block and width, which do not wait for each other."""
    names = {
        f"experts_{form}_{'x'.join(map(str, shape[:5]))}": shape
        for form in shapes.TYPES
        for shape in shapes.SHAPES
    }
    found = {}
    for image in images(LIBRARY):
        for name, registers, stack in usage(image):
            if name in names:
                found[name] = (image, registers, stack)
    assert set(found) == set(names)
    for name, shape in names.items():
        image, registers, stack = found[name]
        launched = min(255, REGISTERS // (shape.threads * shape.ctas)) // 8 * 8
        assert stack == 0 and registers <= launched, (name, registers, stack)
    image = found[next(iter(names))][0]
    for name, text in instructions(image, [name for name in names if found[name][0] == image]).items():
        shape = names[name]
        assert "UTMALDG.3D" in text and "UTMALDG.5D" in text and "UTMALDG.2D" in text, name
        assert "USETMAXREG" in text and "LDL" not in text and "STL" not in text, name
        assert len(re.findall("HGMMA", text)) == 4 * shape.blocks * len(shape.widths), name
        for width in shape.widths:
            products = re.findall(rf"HGMMA\.64x{width}x16\b[^\n]*", text)
            assert len(products) == 4 * shape.blocks and "gsb0" in products[-1], (name, width)
            assert sum("gsb0" in product for product in products) == 1, f"{name}: products taken apart"
            first, last = text.index(products[0]), text.index(products[-1])
            assert "R2UR" not in text[first:last], name
