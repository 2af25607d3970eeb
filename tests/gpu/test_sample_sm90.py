"""sample in one launch on Hopper: every pair of filters, ties, rows without an answer, vocabularies of models, strided and unaligned rows,
all configurations, poisoned and guarded outputs, graphs."""

from __future__ import annotations

import math

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.sampling import sample
from gristmill.kernels.sampling.sample_sm90 import KERNEL, LARGEST, MOST_OF_SLICE, MOST_RANKS, launch
from tests.calls import make_call
from tests.conftest import HAS_GPU

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
DEVICE = "cuda:0"
OP = default_registry().op("sample")
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
SETTINGS = {
    "temperature": (0.0, 0.7, 1.0, 1.5),
    "top_k": (0, 1, 5, 40, 1000, 50000),
    "top_p": (1.0, 0.9, 0.5, 0.9999, 0.0),
    "min_p": (0.0, 0.05, 0.3, 1.5),
}
ROWS = [
    (t, k, p, m)
    for t in SETTINGS["temperature"]
    for k in SETTINGS["top_k"]
    for p in SETTINGS["top_p"]
    for m in SETTINGS["min_p"]
    if t > 0 or (k, p) in ((0, 1.0), (40, 0.5))
]
"""Every combination of filters for each temperature above 0."""


def parameters(rows: list[tuple[float, int, float, float]], seed: int = 0) -> list[torch.Tensor]:
    t, k, p, m = zip(*rows, strict=True)
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.tensor(t),
        torch.tensor(k, dtype=torch.int32),
        torch.tensor(p),
        torch.tensor(m),
        torch.randint(-(2**62), 2**62, (len(rows),), generator=generator),
        torch.randint(0, 2**40, (len(rows),), generator=generator),
    ]
    return [tensor.to(DEVICE) for tensor in given]


def normal(rows: int, v: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (2 * torch.randn(rows, v, device=DEVICE, generator=generator)).to(dtype)


def run(
    logits: torch.Tensor, given: list[torch.Tensor], config: dict[str, int] | None = None
) -> torch.Tensor:
    """Calls the kernel once, into the middle of a poisoned buffer, and checks that what is around stays untouched."""
    rows, v = logits.shape
    config = config or KERNEL.config(OP.problem(f"m={rows},v={v},x={SHORT[logits.dtype]}"), h200())
    buffer = torch.full((rows + 2,), -99, device=DEVICE)
    launch(config, make_call("sample", logits, *given, None, buffer[1 : rows + 1]))
    assert buffer[0] == -99 and buffer[rows + 1] == -99
    return buffer[1 : rows + 1]


def h200() -> Target:
    return Target.parse("h200")


def agree(logits: torch.Tensor, given: list[torch.Tensor], config: dict[str, int] | None = None) -> None:
    ids = run(logits, given, config)
    for start in range(0, logits.shape[0], 64):  # the reference takes 100 bytes per token
        part = slice(start, start + 64)
        expected = sample.reference(logits[part], *(tensor[part] for tensor in given))
        wrong = (ids[part] != expected).nonzero().flatten().tolist()
        assert not wrong, [
            (start + i, int(ids[start + i]), int(expected[i]), [x[start + i].item() for x in given])
            for i in wrong[:5]
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v", [1, 7, 257, 1000, 4099, 32000, 128256, 151936])
def test_every_combination_of_filters(v: int, dtype: torch.dtype) -> None:
    """bf16 has many ties."""
    agree(normal(len(ROWS), v, dtype, seed=v), parameters(ROWS, v))


@pytest.mark.parametrize(
    "name",
    ["flat", "equal", "one above", "tied at the top", "tied below", "barred", "peaked", "huge", "tiny"],
)
@pytest.mark.parametrize("v", [500, 32000, 128256])
def test_distributions(v: int, name: str) -> None:
    """Long lists of candidates, ties by the ten thousand, rows with few tokens above -inf."""
    rows = ROWS[::3]
    noise = normal(len(rows), v, seed=3)
    place = torch.arange(v, device=DEVICE)
    logits = {
        "flat": noise * 1e-2,
        "equal": noise * 0 - 3,
        "one above": torch.where(place == v // 2, 1.0, 0.0).expand(len(rows), v).contiguous(),
        "tied at the top": torch.where(noise > 2, 9.0, noise),
        "tied below": torch.where(noise > 2, 2.0, noise) + (place == 77),
        "barred": torch.where(place % 50 == 3, noise, -math.inf),
        "peaked": noise * 6,
        "huge": noise * 1e5,
        "tiny": noise * 1e-6 + 1000,
    }[name]
    agree(logits, parameters(rows, 5))


def test_every_configuration() -> None:
    for v, dtype in ((3, torch.float32), (997, torch.bfloat16), (33000, torch.float32)):
        rows = ROWS[::5]
        logits, given = normal(len(rows), v, dtype, seed=4), parameters(rows, 4)
        problem = OP.problem(f"m={len(rows)},v={v},x={SHORT[dtype]}")
        for config in KERNEL.space(problem, h200()):
            agree(logits, given, dict(config))


def test_the_largest_vocabulary() -> None:
    """One more than shared memory holds is read again in every pass."""
    rows = ROWS[::40]
    for v in (MOST_RANKS * MOST_OF_SLICE, MOST_RANKS * MOST_OF_SLICE + 1):
        agree(normal(len(rows), v, seed=6), parameters(rows, 6))
    problem = OP.problem(f"m=2,v={LARGEST}")
    agree(normal(2, LARGEST, seed=6), parameters([(0.7, 0, 0.9, 0.0), (1.0, 40, 1.0, 0.0)]))
    assert KERNEL.accepts(problem) is None
    assert KERNEL.accepts(OP.problem(f"m=1,v={LARGEST + 1}")) is not None


def test_rows_without_an_answer() -> None:
    inf = math.inf
    rows = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.8, 5, 0.9, 0.1), (inf, 0, 0.5, 0.0)]
    for v in (5, 20000):
        for place in (0, v - 1):
            for fault in (math.nan, inf, None):
                logits = normal(4, v, seed=7)
                if fault is None:
                    logits[:] = -inf
                else:
                    logits[:, place] = fault
                assert run(logits, parameters(rows)).tolist() == [-1] * 4
    logits = normal(2, 5000, seed=8)
    logits[1, 77] = -inf  # over an infinite temperature: NaN
    agree(logits, parameters([(inf, 0, 0.5, 0.0)] * 2))
    logits = normal(3, 5000, seed=9) * 1e38  # overflows when divided
    agree(logits, parameters([(0.5, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0)]))


def test_strided_and_unaligned_rows() -> None:
    rows = ROWS[::7]
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.full((2 * len(rows), 10007), math.nan, device=DEVICE, dtype=dtype)
        wide[:, 3:9004] = normal(2 * len(rows), 9001, dtype, seed=10)
        agree(wide[::2, 3:9004], parameters(rows))
        agree(wide[: len(rows), 8:9000], parameters(rows))


def test_rows_beyond_two_to_the_31_elements() -> None:
    v, stride = 32000, (1 << 31) + 8
    logits = torch.empty(stride + v, device=DEVICE, dtype=torch.bfloat16).as_strided((2, v), (stride, 1))
    logits.copy_(normal(2, v, torch.bfloat16, seed=11))
    agree(logits, parameters([(1.0, 40, 0.9, 0.0), (1.0, 0, 1.0, 0.0)]))


def test_no_rows() -> None:
    assert run(normal(0, 100), [x[:0] for x in parameters(ROWS[:1])]).shape == (0,)


def test_a_row_does_not_depend_on_its_batch_and_repeats() -> None:
    rows = ROWS[::2]
    logits, given = normal(len(rows), 50000, seed=12), parameters(rows, 12)
    together = run(logits, given)
    for _ in range(20):
        assert torch.equal(run(logits, given), together)
    for i in range(0, len(rows), 9):
        assert run(logits[i : i + 1], [x[i : i + 1] for x in given]) == together[i]


def test_in_a_graph_on_a_side_stream() -> None:
    """Replays read the logits and parameters of their time."""
    rows = ROWS[::11]
    logits, given = normal(len(rows), 20000, seed=13), parameters(rows, 13)
    ids = torch.full((len(rows),), -99, device=DEVICE)
    config = {"ranks": 8, "threads": 256, "keep": 1}
    launch(config, make_call("sample", logits, *given, None, ids))
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        launch(config, make_call("sample", logits, *given, None, ids))
    for seed in (14, 15):
        logits.copy_(normal(len(rows), 20000, seed=seed))
        given[4].add_(1)
        ids.fill_(-99)
        graph.replay()
        assert torch.equal(ids, sample.reference(logits, *given))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ids.fill_(-99)
        launch(config, make_call("sample", logits, *given, None, ids))
    stream.synchronize()
    assert torch.equal(ids, sample.reference(logits, *given))


def test_a_changed_logit_shows() -> None:
    """Greedy rows whose largest logit is anywhere: every token is read by somebody."""
    v = 12345
    logits = torch.zeros(v, v, device=DEVICE, dtype=torch.bfloat16)
    logits.fill_diagonal_(1)
    given = [tensor.expand(v).contiguous() for tensor in parameters([(0.0, 0, 1.0, 0.0)])]
    assert torch.equal(run(logits, given), torch.arange(v, device=DEVICE))
    given[0].fill_(0.01)  # the others have e^-100 of its probability
    assert torch.equal(run(logits, given), torch.arange(v, device=DEVICE))
