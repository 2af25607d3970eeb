"""grouped_topk in CUDA C++: sizes, groups, ties, logits that are no numbers, strides, poisoned and guarded outputs, graphs, streams of launches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.device import device_target
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernels.load import load
from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from gristmill.kernels.moe.grouped_topk import sm75, sm80, sm90
from tests.calls import make_call
from tests.conftest import HAS_GPU

DEVICE = "cuda:0"
KERNELS = (sm90.KERNEL, sm80.KERNEL, sm75.KERNEL)
NVIDIA = HAS_GPU and torch.version.cuda is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NVIDIA, reason="needs a GPU of NVIDIA")]
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    # experts, top_k, n_group, topk_group
    (256, 8, 8, 4),
    (128, 8, 1, 1),
    (128, 2, 8, 2),
    (160, 6, 8, 3),
    (384, 8, 1, 1),
    (512, 22, 1, 1),
    (1024, 8, 32, 3),
    (257, 40, 1, 1),
    (96, 8, 3, 2),
    (16, 2, 8, 2),
    (12, 3, 12, 5),
    (8, 2, 1, 1),
    (1, 1, 1, 1),
]


def here() -> list[Kernel]:
    """Those that this device and this installation run."""
    if not NVIDIA:
        return list(KERNELS)
    target, build = device_target(DEVICE, Policy()), Build.probe()
    fit = [k for k in KERNELS if not k.requires.check_hardware(target, build)]
    return [k for k in fit if not k.requires.check_build(target, build)]


every_kernel = pytest.mark.parametrize("kernel", here(), ids=lambda kernel: kernel.name)


def logits_of(
    rows: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.float32, kind: str = "random"
) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise = 1.5 * torch.randn(rows, experts, device=DEVICE, generator=generator)
    odds = torch.rand(rows, experts, device=DEVICE, generator=generator)
    logits = {
        "random": noise,
        "ties": (noise * 2).round() / 2,
        "zeros": torch.where(odds < 0.5, -0.0, 0.0),
        "nan": torch.where(odds < 0.3, NAN, noise),
        "all nan": torch.full_like(noise, NAN),
        "infinities": torch.where(odds < 0.2, INF, torch.where(odds < 0.6, -INF, noise.round())),
        "all -inf": torch.full_like(noise, -INF),
        "saturated": 40 * noise.sign() + noise,
        "close": noise.round() + odds.mul(4).floor() * 2**-18,  # too close for the tags of experts
        "tiny": -88 + noise.round() / 4,
    }[kind]
    return logits.to(dtype)


KINDS = ("random", "ties", "close", "zeros", "nan", "all nan", "infinities", "all -inf", "saturated", "tiny")


def bias_of(experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    bias = 0.1 * torch.randint(-3, 4, (experts,), device=DEVICE, generator=generator).float()
    never = torch.rand(experts, device=DEVICE, generator=generator) < 0.05
    return torch.where(never, -INF, bias)


Choice = tuple[torch.Tensor, torch.Tensor]


def check_choice(found: Choice, expected: Choice, near: torch.Tensor, kind: str = "") -> None:
    """Weights and ids of rows of logits of a kind. The ids of a row may differ where float32 does not resolve the decision (`near`), in few rows
    but where logits are close; the weights of all others are compared."""
    (weights, ids), (expected_weights, expected_ids) = found, expected
    same = (ids == expected_ids).all(-1)
    wrong = (~same & ~near).nonzero().flatten().tolist()
    assert not wrong, [(row, ids[row].tolist(), expected_ids[row].tolist()) for row in wrong[:3]]
    assert int((~same).sum()) <= 1 + (ids.numel() // 128 if kind == "close" else len(same) // 100)
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=4e-6, atol=1e-37, equal_nan=True)


class Outputs:
    """Weights and ids in the middle of poisoned memory."""

    def __init__(self, rows: int, top_k: int) -> None:
        self._memory = (
            torch.full((rows + 2, top_k), -99.0, device=DEVICE),
            torch.full((rows + 2, top_k), -99, device=DEVICE, dtype=torch.int32),
        )
        self.weights, self.ids = (tensor[1:-1] for tensor in self._memory)

    def poison(self) -> None:
        for tensor in self._memory:
            tensor.fill_(-99)

    def compare(self, arguments: list[Any], kind: str = "") -> None:
        """With the reference, by `check_choice`."""
        assert all((tensor[edge] == -99).all() for tensor in self._memory for edge in (0, -1)), (
            "written past the rows"
        )
        expected = grouped_topk.reference(*arguments)
        check_choice((self.weights, self.ids), expected, grouped_topk.near_ties(*arguments[:6]), kind)


def launch(kernel: Kernel, arguments: list[Any], outputs: Outputs, warps: int = 1) -> None:
    call = make_call("grouped_topk", *arguments, weights=outputs.weights, ids=outputs.ids)
    problem = grouped_topk.OP.describe(*arguments)
    assert kernel.accepts(problem) is None
    load(kernel)({"warps": warps}, call)


def agree(
    kernel: Kernel,
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    warps: int = 1,
    kind: str = "",
) -> None:
    arguments = [logits, top_k, bias, n_group, topk_group, scoring, renormalize, 2.5]
    outputs = Outputs(len(logits), top_k)
    launch(kernel, arguments, outputs, warps)
    outputs.compare(arguments, kind)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group"), SHAPES)
def test_every_shape(
    kernel: Kernel, experts: int, top_k: int, n_group: int, topk_group: int, dtype: torch.dtype
) -> None:
    """All kinds of logits in turn, both scores, with and without a bias, blocks of every size, any number of rows."""
    counts, warps = (1, 7, 65, 257, 33, 64, 2, 300, 5, 129), (1, 2, 4, 3)
    for i, kind in enumerate(KINDS):
        logits = logits_of(counts[i], experts, i, dtype, kind)
        for j, scoring in enumerate(("sigmoid", "softmax")):
            bias = bias_of(experts, i) if (i + j) % 2 else None
            renormalize, block = i % 3 > 0, warps[(i + j) % 4]
            agree(kernel, logits, top_k, bias, n_group, topk_group, scoring, renormalize, block, kind)


@every_kernel
def test_many_rows(kernel: Kernel) -> None:
    for rows in (4096, 16385):
        for warps in (1, 4):
            agree(kernel, logits_of(rows, 256, rows), 8, bias_of(256), 8, 4, warps=warps)


@every_kernel
def test_no_rows(kernel: Kernel) -> None:
    outputs = Outputs(0, 8)
    launch(kernel, [logits_of(0, 256), 8, None, 8, 4, "sigmoid", True, 2.5], outputs)
    assert outputs.ids.shape == (0, 8)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_stride_and_alignment(kernel: Kernel, dtype: torch.dtype) -> None:
    for experts, first, stride in ((256, 0, 264), (256, 1, 300), (256, 4, 260), (250, 0, 250), (255, 3, 259)):
        wide = torch.full((19, stride + first), NAN, device=DEVICE, dtype=dtype)
        logits = wide[:, first : first + experts]
        logits.copy_(logits_of(19, experts, experts, dtype))
        for scoring in ("sigmoid", "softmax"):
            agree(kernel, logits, 8, scoring=scoring, warps=2)
    bias = torch.zeros(260, device=DEVICE)[1:257]
    bias[100] = 2.0
    agree(kernel, logits_of(3, 256, 1, dtype), 8, bias, 8, 4)


@every_kernel
def test_rows_beyond_two_to_the_31_elements(kernel: Kernel) -> None:
    stride = (1 << 31) + 8
    logits = torch.empty(stride + 256, device=DEVICE, dtype=torch.bfloat16).as_strided((2, 256), (stride, 1))
    logits.copy_(logits_of(2, 256, 11, torch.bfloat16))
    agree(kernel, logits, 8, bias_of(256), 8, 4)


@every_kernel
def test_every_logit_and_every_bias_counts(kernel: Kernel) -> None:
    """Each expert is the first of one row, by its logit or by its bias; then it is the one of a row that is never chosen."""
    for experts in (256, 257, 160, 1024):
        logits = torch.zeros(experts, experts, device=DEVICE).fill_diagonal_(1)
        outputs = Outputs(experts, 1)
        launch(kernel, [logits, 1, None, 1, 1, "sigmoid", True, 1.0], outputs, 4)
        assert torch.equal(outputs.ids.flatten().long(), torch.arange(experts, device=DEVICE))
        bias = torch.zeros(experts, device=DEVICE)
        for expert in (0, 1, experts // 2, experts - 1):
            bias.zero_()[expert] = 0.5
            launch(kernel, [logits * 0, 1, bias, 1, 1, "sigmoid", True, 1.0], outputs, 4)
            assert (outputs.ids == expert).all()


@every_kernel
def test_a_row_does_not_depend_on_its_batch_and_repeats(kernel: Kernel) -> None:
    logits, bias = logits_of(515, 256, 12), bias_of(256)
    together, again = Outputs(515, 8), Outputs(515, 8)
    launch(kernel, [logits, 8, bias, 8, 4, "sigmoid", True, 2.5], together, 4)
    for warps in (4, 1, 2):
        again.poison()
        launch(kernel, [logits, 8, bias, 8, 4, "sigmoid", True, 2.5], again, warps)
        assert torch.equal(again.ids, together.ids) and torch.equal(again.weights, together.weights)
    for row in range(0, 515, 37):
        alone = Outputs(1, 8)
        launch(kernel, [logits[row : row + 1], 8, bias, 8, 4, "sigmoid", True, 2.5], alone)
        assert torch.equal(alone.ids[0], together.ids[row])
        assert torch.equal(alone.weights[0], together.weights[row])


@every_kernel
def test_in_a_graph_behind_the_kernel_that_writes_its_logits(kernel: Kernel) -> None:
    """Replays read the logits of their time, also where this kernel may start before they are written."""
    source, logits, bias = logits_of(64, 256, 13), torch.zeros(64, 256, device=DEVICE), bias_of(256)
    outputs, arguments = Outputs(64, 8), [logits, 8, bias, 8, 4, "sigmoid", True, 2.5]
    launch(kernel, arguments, outputs)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(4):
            torch.mul(source, 1.0, out=logits)
            launch(kernel, arguments, outputs)
            source.neg_()
    for seed in range(20):
        source.copy_(logits_of(64, 256, seed))
        outputs.poison()
        graph.replay()
        outputs.compare(arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        outputs.poison()
        launch(kernel, arguments, outputs)
    stream.synchronize()
    outputs.compare(arguments)


@every_kernel
def test_a_fault_is_seen(kernel: Kernel) -> None:
    """One id or one weight of many rows."""
    arguments = [logits_of(300, 256, 14), 8, bias_of(256), 8, 4, "sigmoid", True, 2.5]
    outputs = Outputs(300, 8)
    launch(kernel, arguments, outputs, 4)
    outputs.compare(arguments)
    weight = outputs.weights[123, 5].item()
    outputs.weights[123, 5] = weight * (1 + 1e-5)
    with pytest.raises(AssertionError):
        outputs.compare(arguments)
    outputs.weights[123, 5] = weight
    first, second = outputs.ids[7, 0].item(), outputs.ids[7, 1].item()
    outputs.ids[7, 0], outputs.ids[7, 1] = second, first
    with pytest.raises(AssertionError):
        outputs.compare(arguments)
