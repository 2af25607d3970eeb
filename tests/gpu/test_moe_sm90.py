"""Experts over frag16 tiles on Hopper: every format and shape of a CTA, routings, tails, streams of launches, faults."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe import steps_sm90 as moe_steps_sm90
from gristmill.kernels.moe.combine import op as combine
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import _launch, shapes
from gristmill.kernels.moe.moe import op as moe_op
from gristmill.kernels.moe.moe import sm90 as moe_sm90
from gristmill.kernels.moe.permute import op as permute
from gristmill.quant import QuantTensor, pack, quantize
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
LIMIT = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Of the worst column with enough rows, RMS: rounding alone is 1.7e-3 and 2e-4."""
SILU = (None, None, False, 1.702, 7.0)
"""The last arguments of `moe`, and without the first those of `grouped_linear`: no biases, no clamped activation."""
SCHEMES = tuple(scheme for form in shapes.FORMATS for scheme in form.schemes)


def weights(scheme: str, experts: int, n: int, k: int, seed: int = 0) -> QuantTensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = torch.randn(experts, n, 1, device=DEVICE, generator=generator).exp()
    return quantize(torch.randn(experts, n, k, device=DEVICE, generator=generator) * rows, scheme)


def packed(q: QuantTensor) -> list[torch.Tensor]:
    registry = default_registry()
    names = ("w4_frag16_v1", "f4_frag16_v1")
    return list(pack(q, next(name for name in names if registry.layout(name).accepts(str(q.scheme)))).tensors)


def config_of(scheme: str, shape: shapes.Shape, processors: int = 132) -> dict[str, int | str]:
    form = shapes.format_of(QuantScheme.parse(scheme))
    assert form is not None
    return dict(shapes.config_of(form, shape, processors))


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0).to(torch.int32)


def reference(
    rows: torch.Tensor, q: QuantTensor, counts: list[int], silu_mul: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and the expected size of an error of one part in one per number."""
    start, outs, sizes = 0, [], []
    for expert, count in zip(q.experts(), counts, strict=True):
        x, w = rows[start : start + count].double(), expert.dequantize().double()
        start += count
        y, size = x @ w.T, x.norm(dim=1, keepdim=True) * w.norm(dim=1) / w.shape[1] ** 0.5
        if silu_mul:
            (gate, up), (gate_size, up_size) = y.chunk(2, 1), size.chunk(2, 1)
            act = torch.nn.functional.silu(gate)
            y = act * up
            size = ((gate_size * up) ** 2 + (up_size * act) ** 2 + y**2).sqrt()
        outs.append(y)
        sizes.append(size)
    return torch.cat(outs), torch.cat(sizes)


def worst(y: torch.Tensor, ref: torch.Tensor, size: torch.Tensor) -> float:
    """RMS of the worst column; NaN if any number is."""
    if not y.numel():
        return 0.0
    return float(((y.double() - ref) / size).square().mean(0).max() ** 0.5)


def run(
    config: dict[str, int | str],
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    offsets: torch.Tensor,
    permutation: torch.Tensor | None,
    top_k: int,
    silu_mul: bool,
    rows: int,
    columns: int,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that what surrounds the result is untouched."""
    buffer = torch.full((rows + 2, columns), float("nan"), dtype=x.dtype, device=DEVICE)
    _launch.launch(
        config,
        make_call(
            "grouped_linear", x, tensors, offsets, permutation, top_k, silu_mul, 0, *SILU[1:], buffer[1:-1]
        ),
    )
    assert bool(buffer[0].isnan().all()) and bool(buffer[-1].isnan().all())
    return buffer[1:-1]


COUNTS = [3, 0, 70, 1, 183]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_shape(scheme: str, dtype: torch.dtype) -> None:
    """Rows by tensor copies and gathered; blocks of 64 rows that are not whole; K that is not whole groups; CTAs with many tiles."""
    for n, k in ((512, 640), (416, 1152), (96, 512)) if scheme != "int4_ch" else ((288, 648),):
        q = weights(scheme, len(COUNTS), n, k)
        tensors, offsets, rows = packed(q), offsets_of(COUNTS), sum(COUNTS)
        scale = 1.0 if dtype == torch.bfloat16 else 0.2 * k**-0.5
        x = (torch.randn(rows, k, device=DEVICE) * scale).to(dtype)
        tokens = (torch.randn(-(-(rows + 9) // 3), k, device=DEVICE) * scale).to(dtype)
        permutation = torch.randperm(tokens.shape[0] * 3, device=DEVICE)[: rows + 9].to(torch.int32)
        for silu_mul in (False, True):
            columns = n // 2 if silu_mul else n
            for source, order, top_k in ((x, None, 1), (tokens, permutation, 3)):
                gathered = source if order is None else source[order.long() // top_k]
                ref, size = reference(gathered, q, COUNTS, silu_mul)
                places = rows if order is None else rows + 9
                for shape in shapes.shapes_for(k, silu_mul):
                    for processors in (132, 1):
                        config = config_of(scheme, shape, processors)
                        y = run(config, source, tensors, offsets, order, top_k, silu_mul, places, columns)
                        assert worst(y[:rows], ref, size) < LIMIT[dtype], (
                            n,
                            k,
                            silu_mul,
                            order is None,
                            config,
                        )
                        assert not y[rows:].any(), "rows of no expert are 0"


@pytest.mark.parametrize("counts", [[0, 0, 257], [257, 0, 0], [1, 0, 1], [7, 8, 9], [0, 0, 0], [64, 128, 65]])
def test_rows_per_expert(counts: list[int]) -> None:
    n, k, rows = 256, 512, sum(counts)
    for scheme in ("int4_g128", "mxfp4"):
        q = weights(scheme, len(counts), n, k, seed=rows)
        generator = torch.Generator(DEVICE).manual_seed(rows)
        tensors, x = packed(q), torch.randn(rows + 3, k, device=DEVICE, generator=generator).bfloat16()
        ref, size = reference(x, q, counts, True)
        for shape in shapes.shapes_for(k, True):
            config = config_of(scheme, shape)
            y = run(config, x, tensors, offsets_of(counts), None, 1, True, rows + 3, n // 2)
            # Over all numbers, of which two rows have enough: a column of theirs would be two numbers.
            error = (y[:rows].double() - ref) / size
            assert not rows or float(error.square().mean() ** 0.5) < LIMIT[torch.bfloat16], (counts, config)
            assert not y[rows:].any()


def test_rows_that_no_expert_has_are_not_read() -> None:
    """NaN in x behind the last expert's rows, and in weights of an expert without rows, reaches nothing."""
    counts, k, n = [5, 0, 12], 512, 256
    q = weights("int4_g128", 3, n, k)
    tensors, x = packed(q), torch.randn(40, k, device=DEVICE).bfloat16()
    plain = [
        run(config_of("int4_g128", s), x, tensors, offsets_of(counts), None, 1, False, 17, n)
        for s in shapes.SHAPES
    ]
    x[17:] = float("nan")
    tensors[0][1] = 0xFF
    for shape, expected in zip(shapes.SHAPES, plain, strict=True):
        y = run(config_of("int4_g128", shape), x, tensors, offsets_of(counts), None, 1, False, 17, n)
        assert torch.equal(y, expected), shape


def test_weights_past_4_gib() -> None:
    """The last expert lies at an offset that 32 bits do not hold."""
    experts, n, k = 300, 4096, 7168
    one = packed(weights("int4_g128", 1, n, k))[0]
    assert experts * one.shape[1] > 2**32
    tiles = torch.zeros(experts, one.shape[1], dtype=torch.uint8, device=DEVICE)
    tiles[-1] = one[0]
    x, scale_type = (
        torch.randn(4, k, device=DEVICE).bfloat16(),
        torch.empty(0, dtype=torch.bfloat16, device=DEVICE),
    )
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    alone = run(
        config_of("int4_g128", shapes.SHAPES[2]),
        x,
        [one, scale_type, empty],
        offsets_of([4]),
        None,
        1,
        False,
        4,
        n,
    )
    offsets = offsets_of([0] * (experts - 1) + [4])
    y = run(
        config_of("int4_g128", shapes.SHAPES[2]), x, [tiles, scale_type, empty], offsets, None, 1, False, 4, n
    )
    assert torch.equal(y, alone) and bool(y.any())


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [
        (0, 2, 4),
        (1, 1, 1),
        (1, 8, 128),
        (7, 3, 5),
        (257, 2, 7),
        (513, 4, 1024),
        (1000, 8, 384),
        (4096, 8, 128),
    ],
)
def test_permute_and_combine(tokens: int, top_k: int, experts: int) -> None:
    ids = torch.randint(-1, experts + 2, (tokens, top_k), device=DEVICE, dtype=torch.int32)
    outs = [torch.full(s, -9, dtype=d, device=DEVICE) for s, d in permute.OP.like(ids, experts)]
    moe_steps_sm90.permute({}, make_call("permute", ids, experts, *outs))
    for out, expected in zip(outs, permute.reference(ids, experts), strict=True):
        assert torch.equal(out, expected)
    for dtype, limit in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        for width in (1, 257, 2048):
            y = torch.randn(tokens * top_k, width, device=DEVICE).to(dtype)
            y[outs[0][-1] :] = float("nan")  # rows of no expert
            scores = torch.rand(tokens, top_k, device=DEVICE)
            out = torch.full((tokens, width), float("nan"), dtype=dtype, device=DEVICE)
            moe_steps_sm90.combine({}, make_call("combine", y, outs[2], scores, out))
            expected = combine.reference(y.nan_to_num(), outs[2], scores)
            torch.testing.assert_close(out, expected, rtol=limit, atol=limit)


DEFAULTS = (None, None, "silu", True)  # of codes, scales, activation, gated
ROUTINGS = ("skewed", "all to one", "foreign", "repeated")


def routing(kind: str, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    uniform = torch.rand(tokens, top_k, device=DEVICE, generator=generator)
    ids = (experts * uniform**2).int().clamp(max=experts - 1)
    if kind == "all to one":
        ids[:] = experts - 1
    if kind == "foreign":
        ids[:, 0], ids[:, -1] = -1, experts
    if kind == "repeated":
        ids[:] = ids[:, :1]
    return ids.to(torch.int32)


def layer(
    scheme: str, experts: int = 6, hidden: int = 256, inner: int = 208
) -> tuple[QuantTensor, QuantTensor]:
    # Rows of one size, so that activations do not overflow.
    first = quantize(torch.randn(experts, 2 * inner, hidden, device=DEVICE) * hidden**-0.5, scheme)
    return first, quantize(torch.randn(experts, hidden, inner, device=DEVICE) * inner**-0.5, scheme)


@pytest.mark.parametrize("tokens", [1, 7, 16, 257])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_moe_against_the_reference(kind: str, tokens: int) -> None:
    for scheme, inner in (("int4_g128", 256), ("int4_ch", 208), ("mxfp4", 288)):
        first, second = layer(scheme, inner=inner)
        x, scores = (
            torch.randn(tokens, 256, device=DEVICE).bfloat16(),
            torch.rand(tokens, 3, device=DEVICE) + 0.1,
        )
        ids = routing(kind, tokens, 3, 6)
        problem = moe_op.OP.problem(f"m={tokens},top_k=3,e=6,h=256,i={inner},w={scheme}")
        arguments = [x, scores, ids, first, second, inner, None, *SILU]
        out = moe(arguments, problem, None)
        ref = moe_op.reference(x, scores, ids, first, second)
        assert (
            moe_op.error(problem, [*arguments, *DEFAULTS], [out], [ref]) <= moe_op.tolerance(problem).limit
        ), (
            scheme,
            kind,
        )
        if kind == "foreign":
            assert bool((out[ids[:, 1] < 0] == 0).all())


def moe(arguments: list, problem, workspace: torch.Tensor | None) -> torch.Tensor:
    from gristmill.autotune.device import device_target
    from gristmill.kernel_registry.policy import Policy

    x, scores, ids, first, second, inner, *_ = arguments
    config = moe_sm90.config(problem, device_target(DEVICE, Policy()))
    out = torch.full_like(x, float("nan"))
    moe_sm90.launch(
        config, make_call("moe", x, scores, ids, packed(first), packed(second), inner, workspace, *SILU, out)
    )
    return out


FAULTS = (
    "scales of two experts swapped",
    "a scale doubled",
    "gate and up swapped",
    "a weight of another token",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """The bound of the test above would notice each of these in the weights or the routing."""
    first, second = layer("int4_g128", inner=256)
    x, scores = torch.randn(64, 256, device=DEVICE).bfloat16(), torch.rand(64, 3, device=DEVICE) + 0.1
    ids = routing("skewed", 64, 3, 6)
    problem = moe_op.OP.problem("m=64,top_k=3,e=6,h=256,i=256,w=int4_g128")
    ref = moe_op.reference(x, scores, ids, first, second)
    assert first.scales is not None
    scales, given = first.scales.clone(), scores.clone()
    if fault == "scales of two experts swapped":
        scales[[0, 1]] = scales[[1, 0]]
    elif fault == "a scale doubled":
        scales[0, 5, 1] *= 2
    elif fault == "gate and up swapped":
        scales = scales.roll(256, dims=1)
    else:
        given[0], given[1] = scores[1], scores[0]
    wrong = QuantTensor(first.codes, scales, first.shape, first.scheme)
    out = moe([x, given, ids, wrong, second, 256, None], problem, None)
    error = moe_op.error(problem, [x, scores, ids, first, second, 256, None, *SILU, *DEFAULTS], [out], [ref])
    assert error > moe_op.tolerance(problem).limit


def test_a_hundred_launches_give_the_same_bits() -> None:
    first, second = layer("int4_g128", inner=256)
    for tokens in (2, 40, 600):
        x, scores = torch.randn(tokens, 256, device=DEVICE).bfloat16(), torch.rand(tokens, 3, device=DEVICE)
        ids = routing("skewed", tokens, 3, 6)
        problem = moe_op.OP.problem(f"m={tokens},top_k=3,e=6,h=256,i=256,w=int4_g128")
        arguments = [x, scores, ids, first, second, 256, None]
        space = torch.empty(_chain.workspace(problem, {}).bytes, dtype=torch.uint8, device=DEVICE)
        expected = moe(arguments, problem, space)
        for _ in range(100):
            assert torch.equal(moe(arguments, problem, space), expected)


def test_a_graph_takes_other_ids() -> None:
    """Nothing about the routing is in a captured launch."""
    from gristmill.autotune.device import device_target
    from gristmill.kernel_registry.policy import Policy

    first, second = layer("mxfp4", inner=256)
    problem = moe_op.OP.problem("m=50,top_k=3,e=6,h=256,i=256,w=mxfp4")
    x, scores = torch.randn(50, 256, device=DEVICE).bfloat16(), torch.rand(50, 3, device=DEVICE)
    ids, out = routing("all to one", 50, 3, 6), torch.empty_like(x)
    config = moe_sm90.config(problem, device_target(DEVICE, Policy()))
    space = torch.empty(_chain.workspace(problem, config).bytes, dtype=torch.uint8, device=DEVICE)
    w13, w2 = packed(first), packed(second)
    moe_sm90.launch(config, make_call("moe", x, scores, ids, w13, w2, 256, space, *SILU, out))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        moe_sm90.launch(config, make_call("moe", x, scores, ids, w13, w2, 256, space, *SILU, out))
    for kind in ROUTINGS:
        ids.copy_(routing(kind, 50, 3, 6))
        graph.replay()
        eager = moe([x, scores, ids, first, second, 256, None], problem, None)
        assert torch.equal(out, eager), kind
