"""moe_fp4_sm120 and moe_mxfp8_sm120 on whatever GPU is here: every instance, tails, gathered and sorted rows, epilogues, graphs, whole calls.

On others than sm_120 and sm_121 the library is built with the block-scaled instruction replaced by dequantizing and mma.m16n8k16
(GM_BLOCK_SCALE_BY_BF16): that runs all but the instruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.place import place
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Config
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.block_scaled_sm120._launch import Places, quantize
from gristmill.kernels.linear.block_scaled_sm120.shapes import SHAPES
from gristmill.kernels.moe._clamped import clamped
from gristmill.kernels.moe.grouped_linear.op import OP as GROUPED
from gristmill.kernels.moe.moe._activated import activated
from gristmill.kernels.moe.moe.block_scaled_sm120 import shapes
from gristmill.kernels.moe.moe.block_scaled_sm120._launch import product
from gristmill.quant import QuantTensor, pack
from gristmill.quant import quantize as quantize_weight
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.gpu.test_linear_block_scaled import CAPABILITY, DEVICE, ROOT, library_for, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 9), reason="needs an NVIDIA GPU that converts e4m3, sm_89 and newer"),
]
OP = default_registry().op("moe")
KERNELS = {
    form: default_registry().kernel("moe", f"moe_{'mxfp8' if form == 'mxfp8' else 'fp4'}_sm120")
    for form in SHAPES
}
TARGET = Target.parse("sm_120")
COUNTS = [3, 0, 70, 1, 183]
CONFIGS: list[Config] = [
    {"format": format, "mt": shape.mt, "warps": shape.warps, "grid": grid}
    for format, known in SHAPES.items()
    for shape in known
    for grid in (100000, 3)
]
"""Every instance, with a CTA per tile and with three that walk over all tiles."""


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library itself on sm_120 and sm_121, elsewhere one in which other instructions multiply."""
    sources = sorted((ROOT / "kernels/moe/moe/block_scaled_sm120").glob("_*_sm120f.cu"))
    sources.append(ROOT / "kernels/linear/block_scaled_sm120/_quantize_blocks_sm120f.cu")
    yield from library_for(sources, tmp_path_factory.mktemp("build"))


def experts(format: str, count: int, n: int, k: int) -> QuantTensor:
    """Random weights [count, n, k] whose rows have different sizes."""
    return quantize_weight(rows_of(count * n, k, torch.float32, seed=2).view(count, n, k), format)


def room(format: str, rows: int, k: int) -> list[torch.Tensor]:
    """For codes, scales and factors of rows."""
    sizes = shapes.rows_bytes(format, rows, k)
    return [torch.full((size,), 77, dtype=torch.uint8, device=DEVICE) for size in sizes]


def wrong(
    config: Config,
    n: int,
    k: int,
    *,
    top_k: int = 0,
    epilogue: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    shift: int = 0,
) -> float:
    """The error of the worst column of a product, in roundings of the output, beside that of the experts `shift` further."""
    form, flags, rows = str(config["format"]), epilogue.split("+"), sum(COUNTS) + 9
    offsets = torch.tensor([0, *COUNTS], device=DEVICE).cumsum(0).to(torch.int32)
    generator = torch.Generator(DEVICE).manual_seed(n)
    places = torch.randperm(rows, device=DEVICE, generator=generator).to(torch.int32) if top_k else None
    x, q = rows_of(rows, k, dtype), experts(form, len(COUNTS), n, k)
    bias = rows_of(len(COUNTS), n, dtype, seed=4) if "bias" in flags else None
    silu, clamp = "silu_mul" in flags, "clamp" in flags
    columns = n // 2 if silu else n
    buffer = torch.full((rows + 2, columns), float("nan"), dtype=dtype, device=DEVICE)
    tensors = list(pack(q, "plain_v1").tensors)
    call = GROUPED.Call(
        x, tensors, offsets, places, top_k or 1, silu, n, bias, clamp, 1.702, 7.0, buffer[1:-1]
    )
    product(config, room(form, rows, k), call)
    assert buffer[0].isnan().all() and buffer[-1].isnan().all(), "written outside"
    out, last = buffer[1:-1], int(offsets[-1])
    assert out[last:].isnan().all(), "rows of no expert are not written"
    values = quantize_activation(x, form, by_row=True).dequantize().double()
    source = torch.arange(rows, device=DEVICE) if places is None else places.long() // top_k
    squares = torch.zeros(columns, dtype=torch.float64, device=DEVICE)
    of = list(q.experts())
    for e in range(len(COUNTS)):
        expert = of[(e + shift) % len(COUNTS)]
        part = slice(int(offsets[e]), int(offsets[e + 1]))
        w = expert.dequantize().double()
        y = values[source[part]] @ w.T
        size = values[source[part]].norm(dim=1, keepdim=True) * w.norm(dim=1) / k**0.5
        if bias is not None:
            y, size = y + bias[e].double(), size + bias[e].double().abs()
        if silu:
            # An error of gate or up times the other, at most.
            gate, up = y.chunk(2, -1)
            of_gate, of_up = size.chunk(2, -1)
            y = clamped(y, 1.702, 7.0) if clamp else activated(y, "silu", True)
            size = 1.15 * of_gate * (up.abs() + 1) + of_up * (gate.abs() + 1)
        squares += ((out[part].double() - y) / (size + y.abs())).square().sum(0)
    step = 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    return float((squares / last).max().sqrt()) / step


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
def test_every_instance(config: Config) -> None:
    """Sorted and gathered rows, tiles of W that are not whole, gate and up, both dtypes."""
    assert wrong(config, 200, 512) < 1
    assert wrong(config, 520, 1152, top_k=3, epilogue="bias", dtype=torch.float16) < 1
    assert wrong(config, 352, 384, top_k=2, epilogue="silu_mul") < 1
    assert wrong(config, 352, 384, epilogue="bias+silu_mul+clamp", dtype=torch.float16) < 1


@pytest.mark.parametrize("format", list(SHAPES))
def test_the_quantizer_follows_the_rules_bit_for_bit(format: str) -> None:
    scheme = QuantScheme.parse(format)
    for m, k, dtype in ((1, 128, torch.bfloat16), (300, 2176, torch.float16)):
        x = rows_of(m, k + 8, dtype)[:, :k]
        parts = room(format, m, k)
        places = Places(*(part.data_ptr() if part.numel() else 0 for part in parts))
        quantize(x, format, m, places, by_row=True)
        expected = quantize_activation(x, format, by_row=True)
        assert torch.equal(parts[0].view(m, -1), expected.values.view(torch.uint8))
        assert torch.equal(parts[1].view(m, scheme.groups(k)), expected.scales.view(torch.uint8))
        if expected.global_scale is not None:
            assert torch.equal(parts[2].view(torch.float32).view(m, 1), expected.global_scale)


@pytest.mark.parametrize("format", list(SHAPES))
@pytest.mark.parametrize("m", [0, 1, 7, 65, 257])
def test_whole_calls_are_those_of_the_reference(format: str, m: int) -> None:
    kernel, text = KERNELS[format], f"w={format}.{format}"
    for axes in (
        "top_k=3,e=5,h=384,i=256",
        "top_k=2,e=3,h=256,i=128,x=fp16,epilogue=w13_bias+w2_bias+clamp",
        "top_k=8,e=64,h=128,i=128,epilogue=w13_bias",
    ):
        problem = OP.problem(f"m={m},{axes},{text}")
        for config in kernel.space(problem, TARGET):  # type: ignore[misc]
            outcome = verify(OP, kernel, config, problem, DEVICE)
            assert outcome.ok, (axes, config, outcome.reason)


@pytest.mark.parametrize("name", ["mx", "nvfp4"])
def test_the_kernels_in_triton(name: str) -> None:
    """Where tensor cores have no scales, Triton decodes both operands of MXFP8 and MXFP4 to bf16, exactly; those of NVFP4 it does not compile."""
    kernel, here = default_registry().kernel("moe", f"moe_{name}_triton"), place(None)
    if name == "nvfp4" and (reasons := kernel.requires.check_hardware(here.target, here.build)):
        pytest.skip("; ".join(reasons))
    schemes = ("nvfp4.nvfp4",) if name == "nvfp4" else ("mxfp8.mxfp8", "mxfp4.mxfp8", "mxfp4.mxfp4")
    further = [f"m=257,top_k=8,e=64,h=256,i=128,w={scheme}" for scheme in schemes]
    for text in (*kernel.examples, *further):
        problem = OP.problem(text)
        for target in ("sm_120", "sm_100"):  # tiles of 16 to 64 rows, and of 128
            outcome = verify(OP, kernel, kernel.config(problem, Target.parse(target)), problem, DEVICE)
            assert outcome.ok, (text, target, outcome.reason)


def call_of(format: str, m: int, seed: int) -> tuple[Any, Config]:
    """A call of the operation with a workspace, and a configuration."""
    problem = OP.problem(f"m={m},top_k=3,e=5,h=384,i=256,w={format}.{format}")
    kernel = KERNELS[format]
    config = kernel.config(problem, TARGET)
    arguments = OP.pack(kernel, OP.inputs(problem, seed, DEVICE))  # type: ignore[misc]
    size = kernel.workspace(problem, config).bytes
    arguments[6] = torch.full((size,), 0x7F, dtype=torch.uint8, device=DEVICE)
    return make_call("moe", *arguments, torch.empty_like(arguments[0])), config


@pytest.mark.parametrize("format", list(SHAPES))
def test_results_repeat_and_graphs_replay_them(format: str) -> None:
    launch = KERNELS[format].load()
    call, config = call_of(format, 70, 1)
    launch(config, call)
    first, graph = call.out.clone(), torch.cuda.CUDAGraph()
    assert first.isfinite().all()
    with capturing(graph):
        launch(config, call)
    for _ in range(5):
        call.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(call.out, first)


@pytest.mark.parametrize("format", list(SHAPES))
def test_a_token_does_not_depend_on_others(format: str) -> None:
    """NVFP4 has a factor for each row; sums are in the order of K in every shape."""
    launch = KERNELS[format].load()
    call, config = call_of(format, 70, 1)
    launch(config, call)
    for m in (1, 9):
        one = call.replace(
            x=call.x[:m],
            weights=call.weights[:m],
            ids=call.ids[:m],
            workspace=None,
            out=torch.empty_like(call.out[:m]),
        )
        problem = OP.problem(f"m={m},top_k=3,e=5,h=384,i=256,w={format}.{format}")
        for other in KERNELS[format].space(problem, TARGET):  # type: ignore[misc]
            launch(other, one)
            assert torch.equal(one.out, call.out[:m]), other


def test_the_weights_of_another_expert_are_seen() -> None:
    """A planted fault."""
    config: Config = {"format": "mxfp8", "mt": 16, "warps": 4, "grid": 100000}
    assert wrong(config, 64, 128) < 1 < wrong(config, 64, 128, shift=1)
