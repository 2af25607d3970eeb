"""route on Hopper: numbers of tokens, shapes, ranks, logits that are no numbers, poisoned and guarded outputs, graphs, many launches in a row,
and products of experts behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.autotune.verify import kernel_arguments
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from gristmill.kernels.moe._chain import ORDER
from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from gristmill.kernels.moe.permute import op as permute
from gristmill.kernels.moe.route import chain_sm90, sm90
from gristmill.kernels.moe.route import op as route
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.gpu.test_grouped_topk_cuda import DTYPES, KINDS, bias_of, check_choice, logits_of

DEVICE = "cuda:0"
HOPPER = HAS_GPU and torch.version.cuda is not None and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
every_kernel = pytest.mark.parametrize(
    "kernel", [sm90.KERNEL, chain_sm90.KERNEL], ids=lambda kernel: kernel.name
)
POISON = -99
DEFAULTS = (None, 1, 1, "softmax")  # of the bias, the groups, those that are kept, and the scores
SHAPES = [
    # experts, top_k, n_group, topk_group, local, first
    (256, 8, 8, 4, 256, 0),
    (256, 8, 8, 4, 32, 224),
    (128, 8, 1, 1, 128, 0),
    (8, 2, 1, 1, 8, 0),
    (32, 4, 1, 1, 32, 0),
    (160, 6, 8, 3, 159, 1),
    (384, 8, 1, 1, 48, 100),
    (1024, 32, 32, 5, 1024, 0),
    (1024, 3, 1, 1, 257, 600),
    (257, 7, 1, 1, 256, 0),
    (12, 12, 1, 1, 5, 3),
    (1, 1, 1, 1, 1, 0),
]


class Outputs:
    """The five outputs, each in the middle of poisoned memory."""

    def __init__(self, rows: int, top_k: int, local: int) -> None:
        entries = rows * top_k
        sizes = (entries, entries, local + 1, entries, entries)
        self._memory = [
            torch.full((size + 2,), POISON, device=DEVICE, dtype=torch.int32 if i else torch.float32)
            for i, size in enumerate(sizes)
        ]
        inside = [memory[1:-1] for memory in self._memory]
        self.tensors = [*(tensor.view(rows, top_k) for tensor in inside[:2]), *inside[2:]]

    def poison(self) -> None:
        for memory in self._memory:
            memory.fill_(POISON)

    def compare(self, arguments: list[Any], kind: str = "") -> None:
        """With the reference; the order with that of the ids that are there."""
        assert all((memory[edge] == POISON).all() for memory in self._memory for edge in (0, -1)), (
            "written past the end"
        )
        for name, found, expected in zip(
            route.OP.outputs[2:],
            self.tensors[2:],
            permute.reference(self.tensors[1], arguments[2]),
            strict=True,
        ):
            assert torch.equal(found, expected), name
        logits, top_k, _, _, *rest = arguments
        weights, ids = self.tensors[:2]
        near = grouped_topk.near_ties(logits, top_k, *[*rest, *DEFAULTS[len(rest) :]][:4])
        check_choice((weights, ids), route.reference(*arguments)[:2], near, kind)


def launch(kernel: Kernel, arguments: list[Any], outputs: Outputs) -> None:
    call = make_call("route", *arguments, **dict(zip(route.OP.outputs, outputs.tensors, strict=True)))
    problem = route.OP.describe(*arguments)
    assert kernel.accepts(problem) is None
    config = {"warps": 1} if kernel is chain_sm90.KERNEL else {}
    load(kernel)(config, call)


def agree(
    kernel: Kernel, logits: torch.Tensor, top_k: int, local: int, first: int, *rest: Any, kind: str = ""
) -> None:
    arguments = [logits, top_k, local, first, *rest]
    outputs = Outputs(len(logits), top_k, local)
    launch(kernel, arguments, outputs)
    outputs.compare(arguments, kind)


def deepseek(rows: int, seed: int = 0, local: int = 256, first: int = 0) -> list[Any]:
    return [logits_of(rows, 256, seed), 8, local, first, bias_of(256), 8, 4, "sigmoid", True, 2.5]


@every_kernel
def test_any_number_of_tokens(kernel: Kernel) -> None:
    for rows in range(65):
        for local, first in ((256, 0), (32, 224)):
            agree(kernel, *deepseek(rows, rows, local, first))


def test_more_tokens_by_the_chain() -> None:
    for rows in (65, 257, 4099):
        agree(chain_sm90.KERNEL, *deepseek(rows, rows, 32, 32))


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group", "local", "first"), SHAPES)
def test_every_shape(
    kernel: Kernel,
    experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    local: int,
    first: int,
    dtype: torch.dtype,
) -> None:
    """All kinds of logits in turn, both scores, with and without a bias. Weights of denormal scores: test_grouped_topk_cuda.py."""
    counts = (1, 7, 64, 63, 33, 2, 16, 5, 9)
    for i, kind in enumerate(kind for kind in KINDS if kind != "tiny"):
        logits = logits_of(counts[i], experts, i, dtype, kind)
        for j, scoring in enumerate(("sigmoid", "softmax")):
            bias = bias_of(experts, i) if (i + j) % 2 else None
            choice = bias, n_group, topk_group, scoring, i % 3 > 0, 2.5
            agree(kernel, logits, top_k, local, first, *choice, kind=kind)


@every_kernel
def test_one_expert_has_all_tokens_or_none(kernel: Kernel) -> None:
    logits = torch.zeros(64, 40, device=DEVICE)
    logits[:, 17] = 5
    for local, first in ((1, 17), (1, 18), (40, 0), (17, 0), (22, 18)):
        agree(kernel, logits, 1, local, first)


def test_launches_in_a_row_give_the_same_bits() -> None:
    """Many at a time, each of which may begin while the one before ends; a race shows in one of them."""
    for rows in (1, 8, 64):
        arguments = deepseek(rows, rows)
        outputs = [Outputs(rows, 8, 256) for _ in range(200)]
        for one in outputs:
            launch(sm90.KERNEL, arguments, one)
        outputs[0].compare(arguments)
        for one in outputs[1:]:
            for found, expected in zip(one.tensors, outputs[0].tensors, strict=True):
                assert torch.equal(found, expected)


@every_kernel
def test_in_a_graph_behind_the_kernel_that_writes_its_logits(kernel: Kernel) -> None:
    """Replays read the logits of their time, also where this kernel may start before they are written; a product reads what it wrote."""
    source, arguments = logits_of(64, 256, 13), deepseek(64)
    logits, outputs = torch.zeros_like(source), Outputs(64, 8, 256)
    arguments[0] = logits
    copies = [torch.empty_like(tensor) for tensor in outputs.tensors]
    launch(kernel, arguments, outputs)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(4):
            torch.mul(source, 1.0, out=logits)
            launch(kernel, arguments, outputs)
            for copy, tensor in zip(copies, outputs.tensors, strict=True):
                copy.copy_(tensor)
            source.neg_()
    for seed in range(20):
        source.copy_(logits_of(64, 256, seed))
        outputs.poison()
        graph.replay()
        outputs.compare(arguments)
        for copy, tensor in zip(copies, outputs.tensors, strict=True):
            assert torch.equal(copy, tensor)


def test_a_fault_is_seen() -> None:
    """One id, one place, one offset."""
    arguments, outputs = deepseek(33), Outputs(33, 8, 256)
    launch(sm90.KERNEL, arguments, outputs)
    outputs.compare(arguments)
    for index in (1, 2, 3, 4):
        flat = outputs.tensors[index].view(-1)
        before = flat[3].item()
        flat[3] += 1
        with pytest.raises(AssertionError):
            outputs.compare(arguments)
        flat[3] = before
    outputs.compare(arguments)


def here() -> list[Kernel]:
    """The kernels of experts that read the order, and that this device and this installation run."""
    kernels = [
        kernel for kernel in default_registry().kernels_of("moe") if kernel.reads and kernel.capturable
    ]
    if not HOPPER:
        return kernels
    target, build = device_target(DEVICE, Policy()), Build.probe()
    fit = [k for k in kernels if not k.requires.check_hardware(target, build)]
    return [k for k in fit if not k.requires.check_build(target, build)]


@pytest.mark.parametrize("experts", here(), ids=lambda kernel: kernel.name)
@every_kernel
def test_experts_behind_it(kernel: Kernel, experts: Kernel) -> None:
    """In a graph, where each kernel may begin while the one before ends: the bits that the experts give when they sort the rows."""
    op = default_registry().op("moe")
    problem = next(
        problem
        for problem in map(op.problem, (*experts.examples, *op.examples))
        if problem.integer("m") >= 5 and experts.accepts(problem) is None
    )
    m, top_k, e = min(problem.integer("m"), 64), *problem.integers("top_k", "e")
    problem = problem.with_values(m=m)
    target = device_target(DEVICE, Policy())
    config = experts.config(problem, target)
    x, _, _, *rest = kernel_arguments(op, experts, op.inputs(problem, 1, DEVICE))
    rest = rest[: -len(ORDER)]
    source = logits_of(m, e, 1)
    logits, outputs = torch.zeros_like(source), Outputs(m, top_k, e)
    arguments = [logits, top_k, e, 0]
    weights, ids, *order = outputs.tensors
    sorting, given = torch.empty_like(x), torch.empty_like(x)
    run = load(experts)

    def step() -> None:
        torch.mul(source, 1.0, out=logits)
        launch(kernel, arguments, outputs)
        run(
            config,
            make_call("moe", x, weights, ids, *rest, **dict(zip(ORDER, order, strict=True)), out=given),
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(3):
            step()
    for seed in range(10):
        source.copy_(logits_of(m, e, seed))
        outputs.poison()
        given.fill_(float("nan"))
        graph.replay()
        run(config, make_call("moe", x, weights, ids, *rest, out=sorting))
        assert torch.equal(given, sorting), seed
