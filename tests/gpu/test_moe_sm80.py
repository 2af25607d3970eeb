"""Experts over frag16 tiles for sm_80 and newer, on any such GPU: every format and shape of a CTA, tails, epilogues, routings, faults."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.moe.grouped_linear.frag16_sm80 import _launch, shapes
from gristmill.kernels.moe.moe import sm80
from gristmill.quant import QuantTensor, pack
from tests.calls import make_call
from tests.gpu.test_linear_sm80 import NEWER, SCALES, doubled, form_of, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NEWER, reason="needs an NVIDIA GPU from sm_80 on")]
DEVICE, TARGET = "cuda:0", Target.parse("sm_90")
REGISTRY = default_registry()
OP, MOE = REGISTRY.op("grouped_linear"), REGISTRY.op("moe")
GROUPED, CHAIN = REGISTRY.kernel("grouped_linear", "grouped_linear_sm80"), REGISTRY.kernel("moe", "moe_sm80")
COUNTS = [3, 0, 70, 1, 183]
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Of the worst column, RMS over the rows of all experts: rounding of weights and of results is 2.5e-3 and 3e-4."""


def experts(scheme: str, count: int, n: int, k: int, scales: torch.dtype) -> QuantTensor:
    """Random weights [count, n, k]."""
    every = [weights(scheme, n, k, seed=one, scales=scales) for one in range(count)]
    fields = {
        field.name: torch.stack([getattr(one, field.name) for one in every])
        for field in dataclasses.fields(every[0])
        if isinstance(getattr(every[0], field.name), torch.Tensor)
    }
    return dataclasses.replace(every[0], shape=(count, n, k), **fields)


def packed(q: QuantTensor) -> list[torch.Tensor]:
    """The tensors of the layout that the kernels read."""
    return list(pack(q, form_of(q.scheme.name).layout).tensors)


def configs(scheme: str) -> list[dict[str, object]]:
    """Every shape, with a CTA per tile and with three that walk over all tiles."""
    form = form_of(scheme)
    return [
        dict(shapes.config_of(form, shape, 132)) | {"grid": grid}
        for shape in shapes.shapes_of(form)
        for grid in (100000, 3)
    ]


def run(config: dict[str, object], arguments: list[object], rows: int, columns: int) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that what surrounds the result is untouched."""
    x = arguments[0]
    assert isinstance(x, torch.Tensor)
    buffer = torch.full((rows + 2, columns), float("nan"), dtype=x.dtype, device=DEVICE)
    _launch.launch(config, make_call("grouped_linear", *arguments, buffer[1:-1]))  # type: ignore[arg-type]
    assert bool(buffer[0].isnan().all()) and bool(buffer[-1].isnan().all())
    return buffer[1:-1]


def error(
    out: torch.Tensor,
    x: torch.Tensor,
    q: QuantTensor,
    counts: list[int],
    places: torch.Tensor | None,
    top_k: int,
) -> float:
    """Error of the worst column over all rows: |Δyₙ| / (‖x‖·‖wₙ‖/√K), RMS."""
    source = x if places is None else x[places.long() // top_k]
    squares, start = torch.zeros(q.n, dtype=torch.float64, device=DEVICE), 0
    for expert, count in zip(q.experts(), counts, strict=True):
        rows, w = source[start : start + count].double(), expert.dequantize().double()
        size = rows.norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
        squares += ((out[start : start + count].double() - rows @ w.T) / size).square().sum(0)
        start += count
    return float((squares / max(1, start)).max() ** 0.5)


def offsets_of(counts: list[int]) -> torch.Tensor:
    """int32 [experts + 1]."""
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scheme", "scales"), SCALES)
def test_every_shape(scheme: str, dtype: torch.dtype, scales: torch.dtype) -> None:
    """Sorted rows and gathered ones; blocks of 64 rows that are not whole; K that is not whole groups; rows of no expert."""
    for n, k in ((416, 1152), (17, 384)):
        q = experts(scheme, len(COUNTS), n, k, scales)
        tensors, offsets, rows = packed(q), offsets_of(COUNTS), sum(COUNTS)
        generator = torch.Generator(DEVICE).manual_seed(n)
        places = torch.randperm(rows + 9, device=DEVICE, generator=generator).to(torch.int32)
        x = torch.randn(rows + 9, k, device=DEVICE, generator=generator).to(dtype)
        for order, top_k in ((None, 1), (places, 3)):
            for config in configs(scheme):
                arguments = [x, tensors, offsets, order, top_k, False, n, None, False, 1.702, 7.0]
                y = run(config, arguments, rows + 9, n)
                assert error(y, x, q, COUNTS, order, top_k) < LIMIT[dtype], (n, k, top_k, config)
                assert not y[rows:].any(), "rows of no expert are 0"


@pytest.mark.parametrize("scheme", ["int4_g128", "mxfp4", "fp8_block", "int8_g32", "int4_g32_min"])
@pytest.mark.parametrize(
    "flags", ["bias", "silu_mul", "bias+silu_mul", "silu_mul+clamp", "bias+silu_mul+clamp"]
)
def test_every_epilogue(scheme: str, flags: str) -> None:
    for m in (1, 33, 257):
        problem = OP.problem(f"m={m},e=4,n=160,k=256,w={scheme},epilogue={flags},gather=2")
        for config in configs(scheme):
            result = verify(OP, GROUPED, config, problem, DEVICE)  # type: ignore[arg-type]
            assert result.ok, (config, result)


@pytest.mark.parametrize("kernel", [GROUPED, CHAIN], ids=lambda kernel: kernel.name)
def test_every_example(kernel: Kernel) -> None:
    op = REGISTRY.op(kernel.op)
    problems = [op.problem(text) for text in (*kernel.examples, *map(str, op.examples))]
    accepted = [problem for problem in problems if kernel.accepts(problem) is None]
    assert len(accepted) >= len(kernel.examples)
    for problem in accepted:
        for config in kernel.space(problem, TARGET):  # type: ignore[misc]
            result = verify(op, kernel, config, problem, DEVICE)
            assert result.ok, (str(problem), config, result)


@pytest.mark.parametrize("scheme", ["int4_g64", "mxfp4", "nvfp4", "int8_g128", "fp8_block", "int6_g16"])
def test_a_doubled_scale_of_one_expert_shows(scheme: str) -> None:
    n, k, counts = 160, 512, [64, 64, 64]
    q = experts(scheme, 3, n, k, torch.bfloat16)
    x = torch.randn(192, k, device=DEVICE).bfloat16()
    one = doubled(list(q.experts())[1], 1 if scheme == "fp8_block" else n - 1, 2)
    assert q.scales is not None and one.scales is not None
    scales = q.scales.clone()
    scales[1] = one.scales
    tensors = packed(dataclasses.replace(q, scales=scales))
    for config in configs(scheme):
        arguments = [x, tensors, offsets_of(counts), None, 1, False, n, None, False, 1.702, 7.0]
        y = run(config, arguments, 192, n)
        assert error(y, x, q, counts, None, 1) > 4 * LIMIT[torch.bfloat16], config


def test_what_no_expert_has_is_not_read() -> None:
    """NaN in x behind the last expert's rows, and in weights of an expert without rows, reaches nothing."""
    counts, k, n = [5, 0, 12], 512, 256
    q = experts("int4_g128", 3, n, k, torch.bfloat16)
    tensors, x = packed(q), torch.randn(40, k, device=DEVICE).bfloat16()
    arguments = [x, tensors, offsets_of(counts), None, 1, False, n, None, False, 1.702, 7.0]
    plain = [run(config, arguments, 17, n) for config in configs("int4_g128")]
    x[17:] = float("nan")
    tensors[0][1] = 0xFF
    for config, expected in zip(configs("int4_g128"), plain, strict=True):
        assert torch.equal(run(config, arguments, 17, n), expected), config


def test_weights_past_4_gib() -> None:
    """The last expert lies at an offset that 32 bits do not hold."""
    count, n, k = 300, 4096, 7168
    one = packed(experts("int4_g128", 1, n, k, torch.bfloat16))
    assert count * one[0].shape[1] > 2**32
    tiles = torch.zeros(count, one[0].shape[1], dtype=torch.uint8, device=DEVICE)
    tiles[-1] = one[0][0]
    x = torch.randn(4, k, device=DEVICE).bfloat16()
    for config in configs("int4_g128"):
        rest = [None, 1, False, n, None, False, 1.702, 7.0]
        alone = run(config, [x, one, offsets_of([4]), *rest], 4, n)
        y = run(config, [x, [tiles, *one[1:]], offsets_of([0] * (count - 1) + [4]), *rest], 4, n)
        assert torch.equal(y, alone) and bool(y.any())


def test_a_graph_takes_other_ids() -> None:
    """Nothing about the routing is in a captured launch, and the same routing gives the same bits."""
    problem = MOE.problem("m=50,top_k=3,e=6,h=256,i=256,w=int4_g128")
    arguments = MOE.inputs(problem, 1, DEVICE)
    arguments[3:5] = [packed(w) for w in arguments[3:5]]
    config = CHAIN.config(problem, TARGET)
    arguments[6] = torch.empty(CHAIN.workspace(problem, config).bytes, dtype=torch.uint8, device=DEVICE)
    out, ids = torch.empty_like(arguments[0]), arguments[2]
    sm80.launch(config, make_call("moe", *arguments, out))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        sm80.launch(config, make_call("moe", *arguments, out))
    for seed in range(4):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        ids.copy_(torch.randint(-1, 7, ids.shape, device=DEVICE, generator=generator))
        eager = torch.empty_like(out)
        sm80.launch(config, make_call("moe", *arguments, eager))
        for _ in range(5):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, eager)
