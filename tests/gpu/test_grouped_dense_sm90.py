"""Experts of dense weights on Hopper: every instance number by number, routings, tails, memory that must not matter, faults, graphs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.moe import _chain
from gristmill.kernels.moe._clamped import clamped
from gristmill.kernels.moe.grouped_linear.dense_sm90 import _launch, shapes
from gristmill.kernels.moe.moe import dense_sm90 as moe_dense_sm90
from gristmill.kernels.moe.moe import op as moe_op
from tests.calls import make_call
from tests.gpu.test_moe_sm90 import DEFAULTS, DEVICE, HOPPER, ROUTINGS, offsets_of, routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
REGISTRY = default_registry()
DTYPES = (torch.bfloat16, torch.float16)
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of a number that is rounded once."""
SUMS = 2e-4
"""Allowed to sums in float32 and to the activation, in sizes of a sum of as many random terms."""
ALPHA, LIMIT = 1.702, 7.0
OVER_SHAPES = pytest.mark.parametrize("shape", shapes.SHAPES, ids=lambda shape: "x".join(map(str, shape[:5])))
COUNTS = [3, 0, 70, 1, 183, 128, 300, 8]


def choices(shape: shapes.Shape) -> list[shapes.Choice]:
    return [choice for choice in shapes.choices(4096, 128) if choice.shape == shape]


def configs(shape: shapes.Shape) -> list[dict[str, int]]:
    """Every choice, over all multiprocessors and by one and three clusters."""
    found = []
    for choice in choices(shape):
        config = shapes.config_of(choice, 132)
        found += [config, *({**config, "grid": clusters * shape.cluster} for clusters in (1, 3))]
    return found


def draw(*size: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*size, device=DEVICE, generator=generator) * scale).to(dtype)


def weights(experts: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes; products of two of their sums are numbers of fp16."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = torch.randn(experts, n, 1, device=DEVICE, generator=generator).exp().clamp(max=20) / k**0.5
    return (torch.randn(experts, n, k, device=DEVICE, generator=generator) * rows).to(dtype)


def reference(
    x: torch.Tensor,
    w: torch.Tensor,
    counts: Sequence[int],
    silu_mul: bool,
    bias: torch.Tensor | None = None,
    clamp: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64, and how far a change of a sum by the size of one moves it."""
    start, outs, sizes = 0, [], []
    for e, count in enumerate(counts):
        rows, of_expert = x[start : start + count].double(), w[e].double()
        start += count
        z, size = (
            rows @ of_expert.T,
            rows.norm(dim=1, keepdim=True) * of_expert.norm(dim=1) / w.shape[2] ** 0.5,
        )
        if bias is not None:
            z, size = z + bias[e].double(), size + bias[e].double().abs()
        if silu_mul:
            (gate, up), (gate_size, up_size) = z.chunk(2, 1), size.chunk(2, 1)
            act = torch.nn.functional.silu(gate)
            y = clamped(z, ALPHA, LIMIT) if clamp else act * up
            size = gate_size * (up.abs() + 1) * 1.2 + up_size * (act.abs() + gate.abs() * clamp)
        else:
            y = z
        outs.append(y)
        sizes.append(size)
    return torch.cat(outs), torch.cat(sizes)


def excess(y: torch.Tensor, ref: torch.Tensor, size: torch.Tensor) -> float:
    """The error of the worst number, in what is allowed to it; infinity if one is NaN."""
    if not y.numel():
        return 0.0
    allowed = STEP[y.dtype] * ref.abs() + SUMS * size + 1e-7
    return float(((y.double() - ref).abs() / allowed).nan_to_num(nan=float("inf")).max())


def run(
    config: dict[str, int],
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    rows: int,
    silu_mul: bool,
    bias: torch.Tensor | None = None,
    clamp: bool = False,
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that what surrounds the result is untouched."""
    columns = w.shape[1] // 2 if silu_mul else w.shape[1]
    buffer = torch.full((rows + 2, columns), float("nan"), dtype=x.dtype, device=DEVICE)
    rest = (None, 1, silu_mul, 0, bias, clamp, ALPHA, LIMIT, buffer[1:-1])
    _launch.launch(config, make_call("grouped_linear", x, [w], offsets, *rest))
    assert bool(buffer[0].isnan().all()) and bool(buffer[-1].isnan().all())
    return buffer[1:-1]


@OVER_SHAPES
def test_first_of_all_one_tile(shape: shapes.Shape) -> None:
    """The smallest launch, so that what hangs or is wrong everywhere is seen by itself."""
    k = 64 * shape.slices
    x, w = draw(5, k), weights(1, 64, k, torch.bfloat16)
    ref, size = reference(x, w, [5], False)
    y = run(shapes.config_of(shapes.Choice(shape), 132), x, w, offsets_of([5]), 5, False)
    assert excess(y, ref, size) <= 1


@OVER_SHAPES
def test_one_hot_rows_read_every_weight_back(shape: shapes.Shape) -> None:
    """Bit by bit: row p of an expert is column p of its W. N and K are no multiples of a tile and a slot."""
    n, k = 328, 328
    w = draw(3, n, k, seed=3)
    x = torch.eye(k, device=DEVICE).bfloat16().repeat(3, 1)
    expected = w.transpose(1, 2).reshape(3 * k, n)
    for config in configs(shape):
        y = run(config, x, w, offsets_of([k] * 3), 3 * k, False)
        assert torch.equal(y, expected), (config, (y != expected).nonzero()[:8].tolist())


@OVER_SHAPES
@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize("epilogue", ["none", "bias", "silu_mul", "bias+silu_mul", "bias+clamp+silu_mul"])
def test_every_choice(shape: shapes.Shape, dtype: torch.dtype, epilogue: str) -> None:
    """Tiles that are not whole in any dimension; a CTA with many tiles; rows of no expert, which are zero."""
    flags = epilogue.split("+")
    silu_mul, clamp, rows = "silu_mul" in flags, "clamp" in flags, sum(COUNTS)
    for n, k in ((512, 640), (432, 1096), (80, 264)):
        w = weights(len(COUNTS), n, k, dtype, seed=n)
        x = draw(rows + 9, k, seed=k, dtype=dtype, scale=2.0)
        bias = draw(len(COUNTS), n, seed=7, dtype=dtype) if "bias" in flags else None
        ref, size = reference(x, w, COUNTS, silu_mul, bias, clamp)
        for config in configs(shape):
            y = run(config, x, w, offsets_of(COUNTS), rows + 9, silu_mul, bias, clamp)
            error = excess(y[:rows], ref, size)
            assert error <= 1, (n, k, config, error)
            assert not y[rows:].any(), "rows of no expert are 0"


@pytest.mark.parametrize(
    "counts",
    [
        [0, 0, 257],
        [257, 0, 0],
        [1, 0, 1],
        [7, 8, 9],
        [0, 0, 0],
        [64, 128, 65],
        [272, 240, 256],
        [0, 1025, 0],
        [1],
    ],
)
@pytest.mark.parametrize("silu_mul", [False, True])
def test_rows_per_expert(counts: list[int], silu_mul: bool) -> None:
    n, k, rows = 272, 520, sum(counts)
    w, x = weights(len(counts), n, k, torch.bfloat16), draw(rows + 3, k, seed=rows)
    if rows:
        ref, size = reference(x, w, counts, silu_mul)
    for shape in shapes.SHAPES:
        for choice in choices(shape):
            config = shapes.config_of(choice, 132)
            y = run(config, x, w, offsets_of(counts), rows + 3, silu_mul)
            assert not rows or excess(y[:rows], ref, size) <= 1, (counts, config)
            assert not y[rows:].any()


def test_every_width_of_a_tile() -> None:
    """An expert for each number of rows from 1 to a tile's."""
    for shape in shapes.SHAPES:
        counts = list(range(1, shape.mt + 1))
        n, k, rows = 80, 264, sum(counts)
        w, x = weights(len(counts), n, k, torch.bfloat16), draw(rows, k, seed=rows)
        for silu_mul in (False, True):
            ref, size = reference(x, w, counts, silu_mul)
            config = shapes.config_of(shapes.Choice(shape), 132)
            y = run(config, x, w, offsets_of(counts), rows, silu_mul)
            assert excess(y, ref, size) <= 1, shape


@OVER_SHAPES
def test_what_belongs_to_others_does_not_matter(shape: shapes.Shape) -> None:
    """NaN in other experts' rows of x, in rows of none, between rows of x that lie apart, and in weights of experts without rows."""
    counts, k = [5, 0, 12, 130, 9], 520
    rows, w = sum(counts), weights(5, 264, k, torch.bfloat16)
    wide = draw(rows + 23, k + 24, seed=5)
    wide[:, k:] = float("nan")
    x = wide[:, :k]
    for config in configs(shape)[:1]:
        plain = run(config, x.contiguous(), w, offsets_of(counts), rows, False)
        assert torch.equal(run(config, x, w, offsets_of(counts), rows, False), plain), "rows that lie apart"
        poisoned, others = wide.clone()[:, :k], w.clone()
        poisoned[rows:] = float("nan")
        others[1] = float("nan")
        poisoned[17 : 17 + 130] = float("nan")  # the expert with 130 rows
        y = run(config, poisoned, others, offsets_of(counts), rows, False)
        assert bool(y[17 : 17 + 130].isnan().all())
        assert torch.equal(y[:17], plain[:17]) and torch.equal(y[17 + 130 :], plain[17 + 130 :])
        others = w.clone()
        others[3] = float(
            "nan"
        )  # the next expert after the one with 12 rows, behind a W whose N is no multiple
        y = run(config, x, others, offsets_of(counts), rows, False)
        assert torch.equal(y[:17], plain[:17]) and torch.equal(y[17 + 130 :], plain[17 + 130 :])


def test_weights_past_4_gib() -> None:
    """The last expert lies at an offset that 32 bits do not hold."""
    experts, n, k = 160, 4096, 4096
    assert experts * n * k * 2 > 2**32
    w = torch.zeros(experts, n, k, dtype=torch.bfloat16, device=DEVICE)
    w[-1] = weights(1, n, k, torch.bfloat16)[0]
    x, offsets = draw(40, k), offsets_of([0] * (experts - 1) + [40])
    for silu_mul in (False, True):
        ref, size = reference(x, w[-1:], [40], silu_mul)
        for shape in shapes.SHAPES:
            config = shapes.config_of(shapes.Choice(shape), 132)
            if shapes.room(shape, experts) is None:
                assert excess(run(config, x, w, offsets, 40, silu_mul), ref, size) <= 1, shape


def test_results_past_4_gib() -> None:
    """The last rows of y and x, too."""
    experts, n, k, rows = 2, 4096, 64, (2**32 // (4096 * 2)) + 300
    w, x = weights(experts, n, k, torch.bfloat16), draw(rows, k)
    last = 200
    config = shapes.config_of(shapes.Choice(shapes.SHAPES[-1]), 132)
    y = run(config, x, w, offsets_of([rows - last, last]), rows, False)
    ref, size = reference(x[-last:], w[1:], [last], False)
    assert excess(y[-last:], ref, size) <= 1
    ref, size = reference(x[:last], w[:1], [last], False)
    assert excess(y[:last], ref, size) <= 1


def test_1024_experts() -> None:
    counts = [e % 3 for e in range(1024)]
    rows, n, k = sum(counts), 64, 264
    w, x = weights(1024, n, k, torch.bfloat16), draw(rows, k)
    ref, size = reference(x, w, counts, False)
    tried = [shape for shape in shapes.SHAPES if shapes.room(shape, 1024) is None]
    assert tried
    for shape in tried:
        y = run(shapes.config_of(shapes.Choice(shape), 132), x, w, offsets_of(counts), rows, False)
        assert excess(y, ref, size) <= 1, shape


FAULTS = (
    "one weight",
    "experts swapped",
    "gate and up swapped",
    "rows of x swapped",
    "bias of another expert",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    """The bound of the tests above would notice each of these."""
    counts, n, k = [40, 30, 60], 256, 640
    rows, silu_mul = sum(counts), fault == "gate and up swapped"
    w, x, bias = weights(3, n, k, torch.bfloat16), draw(rows, k), draw(3, n, seed=2)
    ref, size = reference(x, w, counts, silu_mul, bias)
    if fault == "one weight":
        w[2, 100, 600] *= -4
    elif fault == "experts swapped":
        w[[0, 1]] = w[[1, 0]]
    elif fault == "gate and up swapped":
        w = w.roll(n // 2, dims=1).contiguous()
    elif fault == "rows of x swapped":
        x[[68, 69]] = x[[69, 68]]
    else:
        bias[2] = bias[1]
    for shape in shapes.SHAPES:
        y = run(shapes.config_of(shapes.Choice(shape), 132), x, w, offsets_of(counts), rows, silu_mul, bias)
        assert excess(y, ref, size) > 1, shape


@OVER_SHAPES
def test_a_hundred_launches_give_the_same_bits(shape: shapes.Shape) -> None:
    rows, w = sum(COUNTS), weights(len(COUNTS), 432, 1096, torch.bfloat16)
    x, offsets = draw(rows, 1096), offsets_of(COUNTS)
    for choice in choices(shape):
        for silu_mul in (False, True):
            config = shapes.config_of(choice, 132)
            expected = run(config, x, w, offsets, rows, silu_mul)
            for _ in range(100):
                assert torch.equal(run(config, x, w, offsets, rows, silu_mul), expected), config


@OVER_SHAPES
def test_launches_that_overlap(shape: shapes.Shape) -> None:
    """Each product multiplies what the one before it stored, in a stream of launches that begin early."""
    k, counts = 512, [70, 0, 129, 1]
    rows, w = sum(counts), weights(4, k, k, torch.bfloat16).contiguous()
    offsets = offsets_of(counts)
    config = shapes.config_of(shapes.Choice(shape), 132)
    memory = [draw(rows, k)] + [torch.empty(rows, k, dtype=torch.bfloat16, device=DEVICE) for _ in range(20)]

    def launch(index: int) -> None:
        rest = (None, 1, False, 0, None, False, ALPHA, LIMIT, memory[index + 1])
        _launch.launch(config, make_call("grouped_linear", memory[index], [w], offsets, *rest))

    for index in range(20):
        launch(index)
        torch.cuda.synchronize()
    expected = [one.clone() for one in memory]
    assert bool(expected[-1].isfinite().all())
    for _ in range(20):
        for one in memory[1:]:
            one.fill_(float("nan"))
        for index in range(20):
            launch(index)
        assert all(torch.equal(one, other) for one, other in zip(memory, expected, strict=True))


# Whole layers


def layer(
    experts: int = 6, hidden: int = 256, inner: int = 208, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    first = draw(experts, 2 * inner, hidden, seed=1, dtype=dtype, scale=hidden**-0.5)
    return first, draw(experts, hidden, inner, seed=2, dtype=dtype, scale=inner**-0.5)


def moe(
    arguments: Sequence[object],
    problem: Problem,
    workspace: torch.Tensor | None = None,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """arguments: x, weights, ids, w13, w2, biases, clamp."""
    x, scores, ids, first, second, *epilogue = arguments
    config = config or dict(moe_dense_sm90.config(problem, device_target(DEVICE, Policy())))
    out = torch.full_like(x, float("nan"))
    rest = ([first], [second], problem.integer("i"), workspace, *epilogue, ALPHA, LIMIT, out)
    moe_dense_sm90.launch(config, make_call("moe", x, scores, ids, *rest))
    return out


def error_of(arguments: Sequence[object], problem: Problem, out: torch.Tensor) -> float:
    """In tolerances of the operation."""
    x, scores, ids, first, second, *epilogue = arguments
    every = [x, scores, ids, first, second, problem.integer("i"), None, *epilogue, ALPHA, LIMIT, *DEFAULTS]
    ref = moe_op.reference(*every)
    return moe_op.error(problem, every, [out], [ref]) / moe_op.tolerance(problem).limit


@pytest.mark.parametrize("tokens", [1, 7, 16, 257, 1100])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
def test_moe_against_the_reference(kind: str, tokens: int, dtype: torch.dtype) -> None:
    first, second = layer(dtype=dtype)
    x, scores = draw(tokens, 256, dtype=dtype), torch.rand(tokens, 3, device=DEVICE) + 0.1
    ids, form = routing(kind, tokens, 3, 6), "bf16" if dtype == torch.bfloat16 else "fp16"
    biases = [draw(6, 416, seed=3, dtype=dtype), draw(6, 256, seed=4, dtype=dtype)]
    for flags, epilogue in (("none", [None, None, False]), ("w13_bias+w2_bias+clamp", [*biases, True])):
        problem = moe_op.OP.problem(f"m={tokens},top_k=3,e=6,h=256,i=208,x={form},w={form},epilogue={flags}")
        arguments = [x, scores, ids, first, second, *epilogue]
        for config in list(moe_dense_sm90.space(problem, device_target(DEVICE, Policy())))[::4]:
            out = moe(arguments, problem, config=dict(config))
            assert error_of(arguments, problem, out) <= 1, (kind, config)


@pytest.mark.parametrize("fault", ["experts swapped", "gate and up swapped", "a weight of another token"])
def test_faults_of_layers_are_seen(fault: str) -> None:
    first, second = layer()
    x, scores, ids = draw(64, 256), torch.rand(64, 3, device=DEVICE) + 0.1, routing("skewed", 64, 3, 6)
    problem = moe_op.OP.problem("m=64,top_k=3,e=6,h=256,i=208")
    right, wrong, given = [x, scores, ids, first, second, None, None, False], first.clone(), scores.clone()
    if fault == "experts swapped":
        wrong[[0, 1]] = first[[1, 0]]
    elif fault == "gate and up swapped":
        wrong = first.roll(208, dims=1).contiguous()
    else:
        given[0], given[1] = scores[1], scores[0]
    out = moe([x, given, ids, wrong, second, None, None, False], problem)
    assert error_of(right, problem, out) > 1


@pytest.mark.parametrize("tokens", [2, 50, 600])
def test_a_graph_takes_other_ids(tokens: int) -> None:
    """Nothing of the routing is in a captured launch: a hundred replays over changing routings have the bits of calls."""
    first, second = layer()
    problem = moe_op.OP.problem(f"m={tokens},top_k=3,e=6,h=256,i=208")
    x, scores = draw(tokens, 256), torch.rand(tokens, 3, device=DEVICE)
    ids, out = routing("all to one", tokens, 3, 6), torch.empty_like(x)
    config = moe_dense_sm90.config(problem, device_target(DEVICE, Policy()))
    space = torch.empty(_chain.workspace(problem, config).bytes, dtype=torch.uint8, device=DEVICE)
    rest = ([first], [second], 208, space, None, None, False, ALPHA, LIMIT, out)

    def launch() -> None:
        moe_dense_sm90.launch(config, make_call("moe", x, scores, ids, *rest))

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch()
    for index in range(100):
        routed = routing(ROUTINGS[index % len(ROUTINGS)], tokens, 3, 6)
        ids.copy_(routed[torch.randperm(tokens, device=DEVICE)])
        space.fill_(0xFF)  # NaN
        graph.replay()
        eager = moe([x, scores, ids, first, second, None, None, False], problem)
        assert torch.equal(out, eager), index


EXAMPLES = [
    (REGISTRY.kernel(op, name), example)
    for op, name in (("grouped_linear", "grouped_linear_dense_sm90"), ("moe", "moe_dense_sm90"))
    for example in REGISTRY.kernel(op, name).examples
]


@pytest.mark.parametrize(("kernel", "example"), EXAMPLES, ids=lambda one: getattr(one, "name", one))
def test_every_configuration_of_the_examples(kernel: Kernel, example: str) -> None:
    op, target = REGISTRY.op(kernel.op), device_target(DEVICE, Policy())
    problem = op.problem(example)
    for config in kernel.space(problem, target):
        result = verify(op, kernel, config, problem, DEVICE)
        assert result.ok, f"{config}: {result.reason}"
