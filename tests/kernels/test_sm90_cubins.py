"""The machine code of the Hopper kernels: the promised instructions, registers, and no spills beyond the
recorded ones."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from gristmill.kernel_registry import Build, default_registry
from gristmill.kernel_registry.closure import installed_sources
from gristmill.kernels.linear.frag16_sm90.instances import schedule, table
from gristmill.kernels.linear.w8a8_sm90.shapes import OPERANDS, SHAPES
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import shapes
from gristmill.kernels.native import library_dir
from tests.kernels.machine_code import TOOLS, cubin_of, images, instructions, loops, opcodes, usage

LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
STACK_ON_RECORD = {
    "grouped_": 8,
    "experts_w8a8_fp8_block_": 16,
    "experts_quantize_token_fp16": 8,
    "linear_gemm_ws": 16,
    "paged_attention_codes_d128": 16,
    "paged_attention_codes_d128_any_cap": 112,
    "paged_attention_codes_d64_any_cap": 80,
    "paged_decode_codes_d256": 32,
    "paged_attention_bf16_d64_rows_cap": 8,
    **{f"paged_attention_{x}_d128_boxes": 8 for x in ("bf16", "fp16")},
    **{f"paged_attention_{x}_d128_boxes_cap": 80 for x in ("bf16", "fp16")},
    **{f"paged_attention_{x}_d256_boxes": 288 for x in ("bf16", "fp16")},
    **{f"paged_attention_{x}_d256_boxes_cap": 304 for x in ("bf16", "fp16")},
    **{f"paged_attention_{x}_d128_rows_cap": 16 for x in ("bf16", "fp16")},
    **{f"paged_prompts_{x}_d64": 80 for x in ("bf16", "fp16")},
    **{f"varlen_attention_{x}_d192_d128": 56 for x in ("bf16", "fp16")},
    **{f"paged_decode_{x}_d128_rows16": 24 for x in ("bf16", "fp16")},
    **{f"paged_decode_{x}_d{d}_rows16_cap": 8 for x in ("bf16", "fp16") for d in (80, 96)},
    "sample_again_": 64,
    "linear_decode_ws_int4_g128_bf16_bf16_2x8x2x4": 8,
    "linear_decode_ws_int4_g128_bf16_fp16_2x8x2x4": 8,
}
"""Bytes of stack allowed, by the start of a kernel's name, of which the longest one counts; 0 for all others."""
WEIGHT_ONLY = re.compile("linear_(decode|gemm)_")

pytestmark = pytest.mark.skipif(
    not LIBRARY.is_file() or TOOLS is None,
    reason="needs the CUDA library and triton's cuobjdump and nvdisasm",
)


QUICK = ("int4_g128", "mxfp4", "fp8")
"""Formats whose instructions `make test` reads: one of each decoder. Registers and stack are read for all
formats."""
WAITS, TRIGGERS = 0x82E, 0x82D
"""Opcodes of ACQBULK and PREEXIT: a kernel waits for its predecessor, and lets its successor start."""


@cache
def resources() -> dict[Path, tuple[tuple[str, int, int], ...]]:
    """Returns name, registers and stack bytes of the kernels in each image."""
    return {image: usage(image) for image in images(LIBRARY)}


def allowed(name: str) -> int:
    """Returns the bytes of stack that a kernel may use."""
    return STACK_ON_RECORD.get(max(filter(name.startswith, STACK_ON_RECORD), key=len, default=""), 0)


SOME = pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
"""Read every `step`-th kernel by name, in which types, shapes and variants alternate. Of all kernels, `test_registers_and_stack` and
its like see the spills."""


def bodies(names: Collection[str], step: int = 1) -> dict[str, str]:
    """Returns the instructions of every `step`-th of the kernels `names`, by name."""
    chosen = {*sorted(names)[::step]}
    texts = {}
    for image, kernels in resources().items():
        of_image = [name for name, _, _ in kernels if name in chosen]
        texts |= instructions(image, of_image) if of_image else {}
    assert texts.keys() == chosen
    return texts


def instances(whole: bool = False) -> set[str]:
    """Returns the names of the kernels in the table, linear_<schedule>_<format>_<type of x>[_<type of
    scales>]_<shape>[_gated].

    whole: include the formats that this build left out.
    """
    names = set()
    for name, row in table()["schedules"].items():
        for form in schedule(name).formats:
            if not whole and f"linear_{form.name}_{name}_sm90" in Build.probe().left_out:
                continue
            for variant in table()["formats"][form.name][row["decoder"]]:
                x, scales = variant.split("/")
                label = x if scales == "any" else f"{x}_{scales}"
                for shape in schedule(name).shapes_of(form):
                    key = "x".join(str(shape[field]) for field in row["key"])
                    names.add(f"linear_{name}_{form.name}_{label}_{key}")
                    if name == "gemm_ws":
                        names.add(f"linear_{name}_{form.name}_{label}_{key}_gated")
    return names


def test_registers_and_stack() -> None:
    linear = [row for rows in resources().values() for row in rows if WEIGHT_ONLY.match(row[0])]
    assert {name for name, _, _ in linear} == instances()
    assert len(instances(whole=True)) == 1010 and "linear_gemm_ws_int8_fp16_bf16_128x4x1x1" in instances()
    for name, registers, stack in linear:
        assert registers <= 255
        assert stack <= allowed(name), (name, stack)


@SOME
def test_promised_instructions(step: int) -> None:
    formats = QUICK if step > 1 else table()["formats"]
    pattern = rf"_(?:decode|ws)_(?:{'|'.join(formats)})_(?:bf16|fp16)_"
    expected = [name for name in instances() if re.search(pattern, name)]
    assert len(expected) > 150
    for name, text in bodies(expected, step).items():
        assert "UBLKCP" in text, f"{name}: no bulk copy"
        assert ("HGMMA" if "gemm_ws" in name else "HMMA.16816") in text, f"{name}: no tensor-core product"
        if "_ws_" in name:
            assert "UTMALDG.2D" in text, f"{name}: no tensor copy"
            assert "USETMAXREG" in text, f"{name}: registers are not handed over"
        if "gemm_ws" in name:
            assert len(re.findall("HGMMA", text)) == 8, f"{name}: products taken apart"
            products = text[text.index("HGMMA") : text.rindex("HGMMA")]
            assert "R2UR" not in products and "LDL" not in products, (
                f"{name}: descriptors or spills between products"
            )
            assert "gsb0, 0x0" not in products, f"{name}: products wait for each other"
            # The only store sets a flag back.
            assert len(re.findall(r"STG\.E desc", text)) == 1, f"{name}: y in pieces of 4 bytes"
        if "gemm_ws" not in name and ("fp4" in name or "fp8" in name):
            multiply = "HMUL2.BF16" if "_bf16_" in name else "HMUL2"
            assert multiply in text, f"{name}: pairs are to be multiplied by their scales at once"


@SOME
def test_8_bit_products(step: int) -> None:
    """Every instance is present; sums of e4m3 are added while the next products run."""
    usage = [row for rows in resources().values() for row in rows if row[0].startswith("linear_w8a8_")]
    names = {
        f"linear_w8a8_{operands.format}_{shape.rows}x{shape.columns}x{shape.plain}"
        for operands in OPERANDS
        for shape in SHAPES
    }
    assert {name for name, _, _ in usage} == names
    for name, registers, stack in usage:
        assert registers <= 168 and stack == 0, (name, registers, stack)
    for name, text in bodies(names, step).items():
        integers = "int8" in name
        products = re.findall(r"(QGMMA|IGMMA)\S*", text)
        assert set(products) == {"IGMMA" if integers else "QGMMA"}, name
        assert "UTMALDG.2D" in text and "ACQBULK" in text, name
        assert ("USETMAXREG" in text) == ("x128x" in name or "x96x" in name), name
        # With two sets of sums, or integers that are never added, the next products run during a wait.
        large = "256x" in name
        assert (f"gsb0, 0x{1 + large}" in text) == (integers or not large), name
        inner = text[text.index("GMMA") : text.rindex("GMMA")]
        assert integers or len(re.findall("FFMA|FADD", inner)) >= int(name.split("x")[1]) // 2, name


EXPONENTIAL, CONVERSION = "MUFU.EX2", "F2FP"
QUARTER_STORE = re.compile(r"STG\.E desc\[\w+\]\[[^\]]*\+0xc\]")
"""The last of four stores of 4 bytes into which the compiler splits an assignment of 16 bytes under a condition."""


def pair_steps(name: str, text: str, scores: int, values: int) -> list[list[str]]:
    """Returns what the two steps of a kernel's loop over pairs of tiles do while products run: the instructions from the last product of
    a step's values to the first one of the next step's scores.

    scores, values: products of a tile.
    """
    pairs = []
    for loop in loops(text):
        kinds = "".join("sv"["tnspB" in line] for line in loop if "HGMMA" in line)
        if kinds == 2 * (scores * "s" + values * "v"):
            pairs.append(2 * loop)  # the second step's end is in front of the first one
    assert len(pairs) == 1, f"{name}: {len(pairs)} loops over pairs of tiles"
    products = [at for at, line in enumerate(pairs[0]) if "HGMMA" in line]
    spans = [
        pairs[0][last:first]
        for last, first in pairwise(products)
        if "tnspB" in pairs[0][last] and "tnspB" not in pairs[0][first]
    ]
    return spans[:2]


def places(lines: list[str], word: str) -> list[int]:
    """Returns the indices of the lines that have `word`."""
    return [at for at, line in enumerate(lines) if word in line]


def check_pairs(name: str, text: str, scores: int, values: int, behind: int = 16, late: int = 0) -> None:
    """Both steps of the loop over pairs compute the exponentials of a tile of 128 keys during the products, and spill nothing. The
    products of the values are waited for behind part of the exponentials; the others hide what rescales, and weights are converted
    before the next turn.

    behind: exponentials after the wait, at least.
    late: steps of which ptxas has put rescaling, and part of the conversion, behind the wait for the next turn.
    """
    found = 0
    for step in pair_steps(name, text, scores, values):
        assert not re.search("LDL|STL", "\n".join(step)), f"{name}: spills in pairs"
        exponentials = places(step, EXPONENTIAL)
        assert len(exponentials) >= 64, f"{name}: {len(exponentials)} exponentials in a step"
        (wait,) = places(step, "gsb0, 0x0")
        assert exponentials[15] < wait < exponentials[-behind], (
            f"{name}: the wait is not among the exponentials"
        )
        (turn,) = places(step, "BAR.SYNC")
        conversions = places(step, CONVERSION)
        assert len(conversions) == 128 // 4, f"{name}: {len(conversions)} conversions in a step"
        rescales = [at for at in places(step, "FMUL") if wait < at < exponentials[-1]]
        # A thread rescales half as many sums as a value has elements: at least half of them during exponentials.
        found += conversions[-1] > turn or len(rescales) < wide(name) // 4
    assert found == late, f"{name}: {found} steps rescale or convert late"


def wide(name: str) -> int:
    """Returns the elements of a value."""
    return int(re.findall(r"_d(\d+)", name)[-1])


def waits_for_scores(text: str) -> list[int]:
    """Returns the exponentials from each wait for scores alone to the next one for all products, in the order of the code: of a loop
    over pairs, if there is one, and last of the general one."""
    parts = text.split("gsb0, 0x1")[1:]
    return [part[: part.index("gsb0, 0x0")].count(EXPONENTIAL) for part in parts]


@SOME
def test_attention(step: int) -> None:
    """Every instance is present and without spills; products wait neither for each other nor for the
    exponentials of the previous tile. All kernels but those over codes take tiles without masks in pairs."""
    usage = [
        row
        for rows in resources().values()
        for row in rows
        if row[0].startswith("paged_attention_") and "_d256" not in row[0]
    ]
    names = {
        f"paged_attention_{x}_d{d}_{by}"
        for x in ("bf16", "fp16")
        for d in (64, 128)
        for by in ("boxes", "rows")
    } | {f"paged_attention_codes_d{d}_any" for d in (64, 128)}
    names |= {f"{name}_cap" for name in names}
    assert {name for name, _, _ in usage} == names
    assert all(registers == 168 and stack <= allowed(name) for name, registers, stack in usage), usage
    for name, text in bodies(names, step).items():
        keys = 128 // 16  # steps per tile of values; scores take one per 16 elements of a head
        scores = wide(name) // 16
        codes, capped = "codes" in name, name.endswith("_cap")
        # Scores and values, each for the first or last tile, in the general loop, and twice in the one over pairs.
        assert len(re.findall("HGMMA", text)) == (2 if codes else 4) * (scores + keys), name
        assert ("UTMALDG.4D" in text) == ("boxes" in name), f"{name}: pages as boxes"
        assert ("LDGSTS" in text) == ("boxes" not in name), f"{name}: pages by rows"
        assert ("F2FP.F16.E4M3" in text) == codes, f"{name}: codes become fp16"
        assert "USETMAXREG" in text and (allowed(name) or not re.search("LDL|STL", text)), name
        spans = waits_for_scores(text)
        assert len(spans) == (1 if codes else 3), name
        least = 16 if not codes else 128 if capped else 64  # over codes the wait is behind all of them
        assert min(spans) >= least, f"{name}: exponentials wait for the values"
        if capped and not codes:
            spans = [len(places(part, EXPONENTIAL)) for part in pair_steps(name, text, scores, keys)]
            assert min(spans) >= 128, f"{name}: exponentials outside of products"
        elif not codes:
            check_pairs(name, text, scores, keys)


@SOME
def test_attention_stores_16_bytes_at_a_time(step: int) -> None:
    kernels = re.compile("(paged_attention|paged_prompts|mla_attention|varlen)_")
    names = {row[0] for rows in resources().values() for row in rows if kernels.match(row[0])}
    for name, text in bodies(names, step).items():
        assert "STG.E.128" in text and not QUARTER_STORE.search(text), name


def test_attention_of_prompts() -> None:
    """Three warpgroups that multiply leave 128 registers per thread; nothing is spilled in the loop over pairs of tiles."""
    usage = [row for rows in resources().values() for row in rows if row[0].startswith("paged_prompts_")]
    names = {f"paged_prompts_{x}_d64" for x in ("bf16", "fp16")}
    assert {name for name, _, _ in usage} == names
    assert all(registers == 128 and stack <= allowed(name) for name, registers, stack in usage), usage
    for name, text in bodies(names).items():
        scores, keys = 64 // 16, 128 // 16
        assert len(re.findall("HGMMA", text)) == 4 * (scores + keys), name
        assert "UTMALDG.4D" in text and "USETMAXREG" in text and "LDGSTS" not in text, name
        spans = waits_for_scores(text)
        assert len(spans) == 3 and min(spans) >= 16, f"{name}: exponentials wait for the values"
        check_pairs(name, text, scores, keys)


def test_latent_attention() -> None:
    """Every instance is present and without spills; the second warpgroup computes exponentials while its
    values are multiplied."""
    usage = [row for rows in resources().values() for row in rows if row[0].startswith("mla_attention_")]
    names = {f"mla_attention_{x}_{by}" for x in ("bf16", "fp16") for by in ("boxes", "rows")}
    assert {name for name, _, _ in usage} == names
    assert all(registers == 168 and stack == 0 for _, registers, stack in usage), usage
    for name, text in bodies(names).items():
        # Scores take 576 / 16 steps, values of 64 keys take 4: for the own weights, for those of the other
        # warpgroup, and once more for a last tile that only the first warpgroup has.
        assert len(re.findall("HGMMA", text)) == 2 * 576 // 16 + 5 * 64 // 16, name
        assert ("UTMALDG.5D" in text) == name.endswith("boxes"), f"{name}: pages as boxes"
        assert ("LDGSTS" in text) == name.endswith("rows"), f"{name}: pages by rows"
        assert "USETMAXREG" in text and "LDL" not in text and "STL" not in text, name
        shared = [
            part for part in re.split(r"(?<=gsb0, 0x0)", text) if "tnspB" in part and "MUFU.EX2" in part
        ]
        spans = [len(re.findall("MUFU.EX2", part[part.rindex("tnspB") :])) for part in shared]
        assert max(spans) >= 32, f"{name}: exponentials wait for the values"


@SOME
def test_decode_attention(step: int) -> None:
    """Every instance is present and without spills in its loop; products take 16 keys, of codes 32 at a time, and copies run ahead."""
    usage = [row for rows in resources().values() for row in rows if row[0].startswith("paged_decode_")]
    names = {f"paged_decode_{x}_d{d}" for x in ("bf16", "fp16", "codes") for d in (64, 80, 96, 128, 192, 256)}
    names |= {f"paged_decode_{x}_d{d}_rows16" for x in ("bf16", "fp16") for d in (64, 80, 96, 128)}
    wide = {
        f"paged_decode_{x}_d{d}{n}_wide" for x in ("bf16", "fp16") for d in (64, 128) for n in ("", "_rows16")
    }
    names |= {f"{name}_cap" for name in names} | wide
    assert {name for name, _, _ in usage} == names
    assert all(registers <= 255 and stack <= allowed(name) for name, registers, stack in usage), usage
    for name, text in bodies(names, step).items():
        head_dim = int(name.split("_")[3][1:])
        codes = "codes" in name
        twice = "rows16" in name or (codes and head_dim <= 128)
        products = (4 if twice else 2) * (head_dim // 16)
        assert len(re.findall("HMMA.16816", text)) == products, name
        assert len(re.findall("LDGSTS", text)) > 3 * (head_dim // 16), f"{name}: copies ahead"
        assert ("F2FP.F16.E4M3" in text) == codes, f"{name}: codes become fp16"
        loop = text[text.index("HMMA.16816") : text.rindex("HMMA.16816")]
        assert not re.search("LDL|STL", loop), name


def test_wide_attention() -> None:
    """Every instance is present; seven words at most are spilled between products, which do not wait for the exponentials of the previous tile,
    and more only with a soft cap, of which the loop over pairs has eight in a step."""
    usage = [
        row for rows in resources().values() for row in rows if re.match("paged_attention_.*_d256", row[0])
    ]
    names = {f"paged_attention_{x}_d256_boxes{cap}" for x in ("bf16", "fp16") for cap in ("", "_cap")}
    assert {name for name, _, _ in usage} == names
    assert all(registers == 168 and stack <= allowed(name) for name, registers, stack in usage), usage
    for name, text in bodies(names).items():
        # Scores of 256 elements and values of 64 keys, each for the first or last tile, in the general loop, and twice in the one over
        # pairs.
        scores, values = 256 // 16, 64 // 16
        assert len(re.findall("HGMMA", text)) == 4 * (scores + values), name
        assert "UTMALDG.4D" in text and "USETMAXREG" in text, name
        capped = name.endswith("_cap")
        spilled = len(re.findall("STL", text[text.index("HGMMA") : text.rindex("HGMMA")]))
        assert spilled <= (56 if capped else 7), (name, spilled)
        # With a cap fp16 has two per score in front of the wait, bf16 some of those of the cap alone.
        exponentials = 64 if capped and "fp16" in name else 32
        spans = waits_for_scores(text)
        assert len(spans) == 3 and min(spans) >= exponentials, f"{name}: exponentials wait for the values"
        for step in pair_steps(name, text, scores, values):
            turns = places(step, "BAR.SYNC")
            assert len(turns) == capped, f"{name}: turns with a cap alone"
            end = turns[0] if capped else len(step)
            assert len(places(step[:end], CONVERSION)) == 64 // 4, f"{name}: weights are converted late"
            assert len(re.findall("STL", "\n".join(step))) <= (8 if capped else 0), f"{name}: spills in pairs"


def test_varlen_attention() -> None:
    """Every instance is present, and without a stack but for heads of 192 without a window; products do not wait for the exponentials of
    the previous tile."""
    usage = [row for rows in resources().values() for row in rows if row[0].startswith("varlen_")]
    heads, types = ((192, 128), (128, 128), (64, 64)), ("bf16", "fp16")
    names = {f"varlen_attention_{x}_d{dim}_d{wide}" for x in types for dim, wide in heads[:2]}
    names |= {f"varlen_window_{x}_d{dim}_d{wide}" for x in types for dim, wide in heads}
    assert {name for name, _, _ in usage} == names
    assert all(registers == 168 and stack <= allowed(name) for name, registers, stack in usage), usage
    for name, text in bodies(names).items():
        dim = int(name.split("_")[3][1:])
        # Scores and values of 128 keys, each for the first or last tile, in the general loop, and twice in the one over pairs.
        scores, keys = dim // 16, 128 // 16
        assert len(re.findall("HGMMA", text)) == 4 * (scores + keys), name
        assert "UTMALDG.3D" in text and "USETMAXREG" in text, name
        spans = waits_for_scores(text)
        assert len(spans) == 3 and min(spans) >= 16, f"{name}: exponentials wait for the values"
        check_pairs(name, text, scores, keys, behind=12)


def test_dense_decode() -> None:
    """Weights go to registers by 16-byte loads, a ring of them before the kernel waits for its predecessor; nothing is spilled."""
    usage = [row for rows in resources().values() for row in rows if re.match("dense_[bf]", row[0])]
    assert {name for name, _, _ in usage} == {
        f"dense_{x}_{columns}_{tiles}" for x in ("fp16", "bf16") for columns in (8, 16) for tiles in (1, 2)
    }
    assert all(registers <= 152 and stack == 0 for _, registers, stack in usage), usage
    for name, text in bodies([name for name, _, _ in usage]).items():
        before, after = text.split("ACQBULK", 1)
        loads = re.findall(r"LDG\.E\.\S*128\S*", before)
        assert len(loads) >= 16 and len(loads) == len(re.findall(r"LDG\.", before)), (
            f"{name}: loads before the wait"
        )
        assert all("CONSTANT" in load for load in loads), f"{name}: only weights are read before the wait"
        assert "HMMA.16816" not in before and len(re.findall("HMMA.16816", after)) >= 16, name
        assert "LDL" not in text and "STL" not in text, name


@SOME
def test_experts(step: int) -> None:
    """Every instance is present; nothing is spilled between products, which do not wait for each other."""
    usage = [row for rows in resources().values() for row in rows if row[0].startswith("grouped_")]
    types = {"int4_g128": ("bf16_bf16", "bf16_fp16", "fp16"), "mxfp4": ("bf16", "fp16")}
    names = {
        f"grouped_{form.name}_{label}_{'x'.join(map(str, shape))}"
        for form in shapes.FORMATS
        for label in types[form.name]
        for shape in shapes.SHAPES
    }
    assert {name for name, _, _ in usage} == names
    assert all(stack <= STACK_ON_RECORD["grouped_"] for _, _, stack in usage), usage
    for name, text in bodies(names, step).items():
        assert "UBLKCP" in text and "UTMALDG.2D" in text and "LDGSTS" in text and "USETMAXREG" in text, name
        assert len(re.findall("HGMMA", text)) == 8, f"{name}: products taken apart"
        products = text[text.index("HGMMA") : text.rindex("HGMMA")]
        assert "R2UR" not in products and "LDL" not in products and "gsb0, 0x0" not in products, name


def functions() -> dict[str, tuple[str, ...]]:
    """Maps each source in the library to the names of its kernels. Those of generated sources begin with schedule and format; the
    images of all others lie in the order of linking, which is that of their names."""
    images = [tuple(name for name, _, _ in kernels) for kernels in resources().values()]
    found = {}
    written = []
    for source in (s.name for s in installed_sources().built() if s.name.endswith(".cu")):
        if not source.endswith("_sm90.cu"):
            continue  # in the libraries of PTX
        generated = re.fullmatch(r"\w+/linear_(\w+?)_(decode_ws|decode|gemm_ws)_sm90\.cu", source)
        if generated is None:
            written.append(source)
            continue
        name = re.compile(rf"linear_{generated[2]}_{generated[1]}_(bf16|fp16)_")
        (found[source],) = [names for names in images if name.match(names[0])]
    others = [names for names in images if names not in found.values()]
    return found | dict(zip(sorted(written), others, strict=True))


def test_opcodes_are_those_of_the_disassembler() -> None:
    """In the shortest kernel of each combination."""
    images_of = {row[0]: image for image, rows in resources().items() for row in rows}
    codes = {name: cubin_of(image).codes[name] for name, image in images_of.items()}
    shortest = {}
    for name in sorted(codes, key=lambda name: -len(codes[name])):
        found = opcodes(images_of[name], name)
        shortest[WAITS in found, TRIGGERS in found] = name
    assert {waits for waits, _ in shortest} == {triggers for _, triggers in shortest} == {True, False}
    texts = bodies(shortest.values())
    for (waits, triggers), name in shortest.items():
        assert (waits, triggers) == ("ACQBULK" in texts[name], "PREEXIT" in texts[name]), name


def test_programmatic_dependent_launch_is_declared() -> None:
    """A kernel waits for its predecessor, and lets its successor start early, exactly where its spec says so. The sources that a
    kernel runs are those of its closure, so that a new kernel is tested as it is."""
    compiled = [
        kernel
        for kernel in default_registry().all_kernels()
        if kernel.requires.code == "cuda:sm_90a" and kernel.provider == "gristmill"
        if kernel.aot is None  # with kernels of Triton's between its own, it takes no part
    ]
    of_source, closures = functions(), installed_sources()
    found = {row[0]: opcodes(image, row[0]) for image, rows in resources().items() for row in rows}
    assert len(compiled) > 20
    for kernel in compiled:
        reach = closures.reach(kernel.module, kernel.target.partition(":")[0])
        sources = [source.name for source in closures.natives(reach, {}, closures.built())]
        names = [name for source in sources for name in of_source.get(source, ())]
        assert {WAITS in found[name] for name in names} <= {kernel.waits}, kernel.name
        assert {TRIGGERS in found[name] for name in names} <= {kernel.triggers}, kernel.name
    tested = {kernel.waits for kernel in compiled} | {kernel.triggers for kernel in compiled}
    assert tested == {True, False}
