"""moe_fp4_sm120 and moe_mxfp8_sm120 without a GPU: accepted problems, where they run, configurations, the library's own arithmetic, refusals of
the launcher, machine code, grades. tests/native/test_moe_block_scaled_fibers.py executes their sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry import grades
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.cuda_ptx import ptx_entry
from gristmill.kernels.linear.block_scaled_sm120._launch import ARCH
from gristmill.kernels.linear.block_scaled_sm120.args import QUANTIZE
from gristmill.kernels.linear.block_scaled_sm120.shapes import SHAPES
from gristmill.kernels.linear.frag16_sm80.gemm import MOST_SHARED
from gristmill.kernels.moe.moe.block_scaled_sm120 import shapes, spec
from gristmill.kernels.moe.moe.block_scaled_sm120.args import ARGS
from gristmill.quant import QuantTensor, pack, quantize
from tests.calls import make_call
from tests.kernels.machine_code import listing
from tests.kernels.test_linear_block_scaled import (
    FORMATS_AND_TARGETS,
    check_tiles,
    cubin_of,
    needs_library,
    needs_tools,
)
from tests.quant.oracle import round_trip
from tests.quant.test_activations import expected, tokens

OP = default_registry().op("moe")
FP4, MXFP8 = (default_registry().kernel("moe", f"moe_{name}_sm120") for name in ("fp4", "mxfp8"))
KERNELS = {"nvfp4": FP4, "mxfp4": FP4, "mxfp8": MXFP8}
TARGET = Target.parse("sm_120")
BUILD = Build.of({"torch": "2.13.0", "triton": "3.9.0"}, cuda_archs=("compute_120f", "compute_80", "sm_90a"))
GM_OK, GM_E_DTYPE, GM_E_SHAPE, GM_E_ARG = 0, -1, -2, -5
SOURCES = Path(shapes.__file__).parent


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        ("nvfp4", "m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4", None),
        (
            "mxfp4",
            "m=0,top_k=4,e=32,h=2944,i=2944,x=fp16,w=mxfp4.mxfp4,epilogue=w13_bias+w2_bias+clamp",
            None,
        ),
        ("mxfp8", "m=4096,top_k=8,e=256,h=7168,i=256,w=mxfp8.mxfp8", None),
        ("nvfp4", "m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4", "not nvfp4"),
        ("nvfp4", "m=1,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8", "not mxfp8.mxfp8"),
        ("mxfp8", "m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8", "not mxfp4.mxfp8"),
        ("mxfp8", "m=1,top_k=2,e=4,h=256,i=192,w=mxfp8.mxfp8", "got H=256, I=192"),
        ("nvfp4", "m=1,top_k=2,e=4,h=2880,i=256,w=nvfp4.nvfp4", "got H=2880, I=256"),
        ("mxfp4", "m=1,top_k=2,e=4,h=256,i=256,x=fp32,w=mxfp4.mxfp4", "fp16 or bf16"),
        ("mxfp4", "m=1,top_k=2,e=1025,h=256,i=256,w=mxfp4.mxfp4", "1024 experts"),
        ("mxfp4", "m=1,top_k=2,e=1024,h=256,i=1048576,w=mxfp4.mxfp4", "in int32"),
        ("mxfp4", "m=1,top_k=2,e=4,h=256,i=256,w=mxfp4.mxfp4,act_order=true", "not act-order"),
    ],
)
def test_accepts(kernel: str, problem: str, reason: str | None) -> None:
    refusal = KERNELS[kernel].accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_other_activations_are_refused() -> None:
    for axes in ("activation=gelu", "gated=false"):
        assert FP4.why_not(OP.problem(f"m=1,top_k=2,e=4,h=256,i=256,w=nvfp4.nvfp4,{axes}"), TARGET, BUILD)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_where_it_runs(format: str) -> None:
    problem = OP.problem(f"m=64,top_k=8,e=128,h=2048,i=768,w={format}.{format}")
    for name in ("sm_120", "sm_121"):
        assert not KERNELS[format].why_not(problem, Target.parse(name), BUILD), name
    for name in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "gfx950", "cpu:avx2"):
        assert KERNELS[format].why_not(problem, Target.parse(name), BUILD), name
    without = Build.of({"torch": "2.13.0", "triton": "3.9.0"}, cuda_archs=("compute_80",))
    assert KERNELS[format].why_not(problem, TARGET, without)


@pytest.mark.parametrize("scheme", ["nvfp4.nvfp4", "mxfp4.mxfp4", "mxfp4.mxfp8", "mxfp8.mxfp8"])
def test_the_reference_is_that_of_the_quantizers_oracles(scheme: str) -> None:
    """A token and expert at a time, each row quantized alone."""
    weights, _, form = scheme.partition(".")
    x, generator = tokens(6, 96), torch.Generator().manual_seed(3)
    x[3] = x[0] / 3
    dense = [torch.randn(2, n, k, generator=generator) / k**0.5 for n, k in ((128, 96), (96, 64))]
    w13, w2 = (replace(quantize(w, weights), scheme=QuantScheme.parse(scheme)) for w in dense)
    first, second = ([round_trip(expert.numpy(), weights) for expert in w] for w in dense)
    ids = torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0], [2, 0], [1, -1]], dtype=torch.int32)
    scores = torch.rand(6, 2, generator=generator)
    out = OP.reference(x, scores, ids, w13, w2)
    for t in range(6):
        total = torch.zeros(96)
        for k in range(2):
            if (e := int(ids[t, k])) in (0, 1):
                z = torch.from_numpy(expected(x[t : t + 1].numpy(), form) @ first[e].T)[0]
                h = torch.nn.functional.silu(z[:64]) * z[64:]
                y = torch.from_numpy(expected(h[None].numpy(), form) @ second[e].T)[0]
                total += scores[t, k] * y
        assert torch.allclose(out[t], total, rtol=0, atol=2e-5 * float(total.abs().max() + 1)), t


@pytest.mark.parametrize("target", ["sm_120", "sm_121"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_its_source_is_executed_on_a_cpu_and_compiled_for_the_target(format: str, target: str) -> None:
    """No GPU here runs it, and the grade says so."""
    proof, *others = grades.proofs(KERNELS[format], Target.parse(target))
    assert (proof.grade, proof.record) == ("interpreted", "tests/native/test_moe_block_scaled_fibers.py")
    assert [other.grade for other in others] == ["compiled"] and not proof.spills


@pytest.mark.parametrize("m", [0, 1, 7, 64, 257, 4096])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_the_default_is_tried_first_and_its_tiles_hold_an_experts_rows(format: str, m: int) -> None:
    problem = OP.problem(f"m={m},top_k=8,e=64,h=2048,i=768,w={format}.{format}")
    tried = list(KERNELS[format].space(problem, TARGET))  # type: ignore[misc]
    assert tried[0] == KERNELS[format].config(problem, TARGET)
    assert len(tried) == len({str(one) for one in tried}) == len(SHAPES[format])
    share = m * 8 / 64
    assert tried[0]["mt1"] == next((s.mt for s in SHAPES[format] if s.mt >= share), SHAPES[format][-1].mt)


def ask_library(format: str, **changed: int) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    good = {"device": -1, "rows": 64, "experts": 8, "n": 64, "k": 256, "top_k": 1, "y_type": 2}
    good |= {"mt": 16, "warps": 4, "grid": 1, "offsets": 64}
    return ptx_entry(f"gm_grouped_{format}_sm120f", ARGS, ARCH)(ARGS.new(**(good | changed)))


@needs_library
def test_the_library_has_every_shape_and_all_fit_into_shared_memory() -> None:
    for format, known in SHAPES.items():
        for shape in known:
            for experts in (1, 128, shapes.MAX_EXPERTS):
                size = ask_library(format, mt=shape.mt, warps=shape.warps, experts=experts)
                assert size == shapes.shared_bytes(shape, format, experts)
                assert size <= MOST_SHARED - 1024
            # 1 KiB is the system's.
            assert shape.ctas * (shapes.shared_bytes(shape, format, 256) + 1024) <= 100 << 10


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"y_type": 0}, GM_E_DTYPE),
        ({"rows": -1}, GM_E_SHAPE),
        ({"n": 0}, GM_E_SHAPE),
        ({"n": 68}, GM_E_SHAPE),
        ({"n": 80, "silu_mul": 1}, GM_E_SHAPE),
        ({"k": 192}, GM_E_SHAPE),
        ({"experts": 0}, GM_E_SHAPE),
        ({"experts": 1025}, GM_E_SHAPE),
        ({"experts": 1024, "n": 1 << 21}, GM_E_SHAPE),
        ({"warps": 5}, GM_E_ARG),
        ({"mt": 48}, GM_E_ARG),
        ({"grid": 0}, GM_E_ARG),
        ({"top_k": 0}, GM_E_ARG),
        ({"clamp": 1}, GM_E_ARG),  # without silu_mul
        ({"device": 0, "rows": 0}, GM_OK),
        ({"device": 0, "x": 8}, GM_E_ARG),
        ({"device": 0, "w": 8}, GM_E_ARG),
        ({"device": 0, "y": 4}, GM_E_ARG),
        ({"device": 0, "x_scale": 4}, GM_E_ARG),
        ({"device": 0, "w_scale": 4}, GM_E_ARG),
        ({"device": 0, "offsets": 0}, GM_E_ARG),
        ({"device": 0, "rows": 1 << 30, "n": 1 << 20, "experts": 1}, GM_E_SHAPE),
    ],
)
def test_the_library_refuses(changed: dict[str, int], code: int) -> None:
    assert ask_library("nvfp4", **changed) == code


@needs_library
@pytest.mark.parametrize(
    ("changed", "code"), [({"format": 1}, GM_E_ARG), ({"factor": 0}, GM_E_ARG), ({"m": 0}, GM_OK)]
)
def test_the_quantizer_of_rows_refuses(changed: dict[str, int], code: int) -> None:
    good = {"device": 0, "m": 1, "k": 256, "ldx": 256, "x_type": 2, "x": 64, "by_row": 1, "factor": 64}
    entry = ptx_entry("gm_quantize_blocks_sm120f", QUANTIZE, ARCH)
    assert entry(QUANTIZE.new(**(good | changed))) == code


def experts(format: str, n: int, k: int) -> QuantTensor:
    return quantize(torch.randn(3, n, k), format)


def launch(format: str, tokens: int = 2, **changed: torch.Tensor) -> None:
    """Launches with tensors of a CPU, which is reached only by calls that are refused or have no rows."""
    first, second = (pack(experts(format, n, k), "plain_v1") for n, k in ((256, 256), (256, 128)))
    problem = OP.problem(f"m={tokens},top_k=2,e=3,h=256,i=128,w={format}.{format}")
    names = ("codes", "scales", "zeros", "row_scale", "row_block", "perm")
    w2 = [changed.get(name, slot) for name, slot in zip(names, second.slots.values(), strict=True)]
    x = torch.zeros(tokens, 256, dtype=torch.bfloat16)
    ids, scores = torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2)
    silu = (None, None, False, 1.702, 7.0)
    call = make_call("moe", x, scores, ids, list(first.slots.values()), w2, 128, None, *silu, x.clone())
    spec.launch(KERNELS[format].config(problem, TARGET), call)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_no_tokens_launch_nothing(format: str) -> None:
    launch(format, 0)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_tensors_of_another_shape_are_refused(format: str) -> None:
    from gristmill.kernels.moe.grouped_linear.op import OP as GROUPED
    from gristmill.kernels.moe.moe.block_scaled_sm120._launch import product

    slots = [*pack(experts(format, 256, 128), "plain_v1").tensors]
    x, out = torch.zeros(5, 128, dtype=torch.bfloat16), torch.zeros(5, 256, dtype=torch.bfloat16)

    def run(**changed: torch.Tensor) -> None:
        names = ("codes", "scales", "zeros", "row_scale", "row_block", "perm")
        weight = [changed.get(name, slot) for name, slot in zip(names, slots, strict=True)]
        offsets = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
        call = GROUPED.Call(x, weight, offsets, None, 1, False, 256, None, False, 0.0, 0.0, out)
        config = {"format": format, "mt": 16, "warps": 4, "grid": 1}
        product(config, [torch.empty(0, dtype=torch.uint8)] * 3, call)

    with pytest.raises(ValueError, match=r"expected codes \[3, 256, "):
        run(codes=slots[0][1:])
    with pytest.raises(ValueError, match=r"and scales \[3, 256, "):
        run(scales=slots[1][:, :-1])
    with pytest.raises(ValueError, match="a permutation"):
        run(perm=torch.arange(128, dtype=torch.int32))
    with pytest.raises(ValueError, match="multipliers of rows"):
        run(row_scale=torch.ones(3))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_workspace_is_what_the_launcher_takes(format: str) -> None:
    problem = OP.problem(f"m=7,top_k=3,e=3,h=256,i=128,w={format}.{format}")
    size = KERNELS[format].workspace(problem, KERNELS[format].config(problem, TARGET)).bytes
    w13, w2 = (pack(experts(format, n, k), "plain_v1").tensors for n, k in ((256, 256), (256, 128)))
    x, ids = torch.zeros(7, 256, dtype=torch.bfloat16), torch.zeros(7, 3, dtype=torch.int32)

    def parts_of(memory: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        scores, silu = torch.zeros(7, 3), (None, None, False, 1.702, 7.0)
        call = make_call("moe", x, scores, ids, list(w13), list(w2), 128, memory, *silu, x.clone())
        flat, rooms = spec.parts(format, call)
        return flat, [part for room in rooms for part in room]

    memory = torch.zeros(size, dtype=torch.uint8)
    flat, rooms = parts_of(memory)
    assert flat is memory and parts_of(None)[0].numel() == size
    scheme = QuantScheme.parse(format)
    for part, (rows, k) in zip((rooms[:3], rooms[3:]), ((7, 256), (21, 128)), strict=True):
        needed = rows * scheme.code_bytes(k), rows * scheme.groups(k), 4 * rows * scheme.has_global
        assert all(one.numel() >= least for one, least in zip(part, needed, strict=True))
        starts = [one.data_ptr() - memory.data_ptr() for one in part if one.numel()]
        assert not any(start % 256 for start in starts) and starts == sorted(starts)
        assert starts[-1] + part[-1].numel() <= size or not part[-1].numel()
    with pytest.raises(ValueError, match="contiguous bytes"):
        parts_of(memory[:-1])


@needs_tools
@pytest.mark.parametrize(("format", "arch"), FORMATS_AND_TARGETS)
def test_machine_code(format: str, arch: str) -> None:
    """The tiles are those of linear."""
    cubin = cubin_of(f"_grouped_{format}_sm120f", f"-arch={arch}", folder=SOURCES)
    check_tiles(format, cubin, "grouped_block")


@needs_tools
@pytest.mark.slow  # dequantizing is much code
@pytest.mark.parametrize(("format", "arch"), [("mxfp8", "sm_90"), ("nvfp4", "sm_89")])
def test_the_same_source_compiles_with_other_instructions_for_other_gpus(format: str, arch: str) -> None:
    """What surrounds the one instruction can then be run there (tests/gpu/test_moe_block_scaled.py)."""
    flags = (f"-arch={arch}", "-DGM_BLOCK_SCALE_BY_BF16")
    cubin = cubin_of(f"_grouped_{format}_sm120f", *flags, folder=SOURCES)
    text = listing("nvdisasm", "-c", "-ndf", of=cubin)
    assert "HMMA.16816.F32.BF16" in text and "MMA.SF" not in text
