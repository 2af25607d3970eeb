"""Dense products of few rows on Hopper: every instance and configuration, tails, strided and unaligned x, epilogues, poisoned and guarded
outputs, repeated calls, a chain of dependent launches."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.linear.dense_sm90 import _launch
from gristmill.kernels.linear.dense_sm90.spec import configs
from tests.calls import make_call
from tests.conftest import HAS_GPU
from tests.gpu import dense_products
from tests.gpu.dense_products import DEVICE, LIMIT, SHORT, expected, random, worst

HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]
OP = default_registry().op("linear")
run = partial(dense_products.run, _launch.launch)
SPLIT = {"rt": 1, "wk": 4, "split": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
def test_every_configuration(m: int, dtype: torch.dtype) -> None:
    for n, k in ((1, 8), (7, 72), (257, 1000), (64, 2048), (1000, 1536)):
        x, w = random(m, k, dtype=dtype, seed=m), random(n, k, dtype=dtype, seed=n)
        reference = expected(x, w)
        problem = OP.problem(f"m={m},n={n},k={k},x={SHORT[dtype]},w={SHORT[dtype]}")
        for config in configs(problem):
            y = run(x, w, config)
            # Rounding of the largest results, and float32 sums.
            assert worst(y, reference) < LIMIT[dtype] * max(1.0, float(reference.abs().max())) * 2, (
                n,
                k,
                config,
            )
            assert float((y.double() - reference).norm() / reference.norm()) < LIMIT[dtype], (n, k, config)


@pytest.mark.parametrize("gated", [False, True])
def test_epilogues(gated: bool) -> None:
    for m, n, k in ((1, 514, 256), (9, 96, 520), (16, 2, 64)):
        width = n // 2 if gated else n
        x, w, bias, residual = random(m, k), random(n, k, seed=1), random(n, seed=2), random(m, width, seed=3)
        for config in (
            {"rt": 1, "wk": 2, "split": 1},
            {"rt": 2, "wk": 4, "split": 1},
            {"rt": 1, "wk": 1, "split": 2},
        ):
            if config["wk"] * config["split"] * 64 > max(k, 64):
                continue
            for arguments in ((None, None), (bias, None), (None, residual), (bias, residual)):
                y, reference = run(x, w, config, *arguments, gated), expected(x, w, *arguments, gated)
                assert float((y.double() - reference).norm() / reference.norm()) < LIMIT[torch.bfloat16]


def test_one_changed_weight_shows_in_its_column() -> None:
    """One-hot rows of x return columns of W, bit by bit."""
    w = random(300, 640)
    for first in range(0, 640, 16):
        x = torch.zeros(16, 640, device=DEVICE, dtype=torch.bfloat16)
        x[torch.arange(16), first + torch.arange(16)] = 1
        assert torch.equal(run(x, w, SPLIT), w[:, first : first + 16].T)


def test_strided_and_unaligned_rows_of_x() -> None:
    w, wide = random(130, 256, seed=1), random(9, 1000)
    for x in (wide[:, 8:264], wide[:, 3:259], wide[::2, :256], wide[:, 1:257][::3]):
        reference = expected(x, w)
        assert (
            float((run(x, w, SPLIT).double() - reference).norm() / reference.norm()) < LIMIT[torch.bfloat16]
        )


def test_a_weight_that_is_not_aligned_is_refused() -> None:
    flat = random(64 * 64 + 1)
    with pytest.raises(ValueError, match="contiguous and 16-byte aligned"):
        run(random(1, 64), flat[1:].view(64, 64), SPLIT)


def test_no_rows() -> None:
    assert run(random(0, 64), random(32, 64), SPLIT).shape == (0, 32)


def test_a_hundred_calls_have_the_same_bits() -> None:
    x, w = random(5, 4096), random(1024, 4096, seed=1)
    first = run(x, w, {"rt": 1, "wk": 4, "split": 4}).clone()
    for _ in range(100):
        assert torch.equal(run(x, w, {"rt": 1, "wk": 4, "split": 4}), first)


def test_rows_beyond_two_to_the_31_elements() -> None:
    """Offsets into W are 64 bits wide."""
    k, n = 16384, (1 << 31) // 16384 + 32
    w = torch.zeros(n, k, device=DEVICE, dtype=torch.bfloat16)
    w[-32:] = random(32, k)
    x = random(1, k, seed=1)
    y = run(x, w, {"rt": 2, "wk": 4, "split": 1})
    assert not y[:, :-32].any()
    reference = expected(x, w[-32:])
    assert float((y[:, -32:].double() - reference).norm() / reference.norm()) < LIMIT[torch.bfloat16]


def test_a_chain_of_launches_in_a_graph() -> None:
    """Each call reads what the one before it wrote, and starts before that one has ended."""
    weights = [random(512, 512, seed=i) / 22 for i in range(24)]
    start, buffers = (
        random(3, 512, seed=99),
        [torch.empty(3, 512, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)],
    )

    def chain() -> None:
        x = start
        for i, w in enumerate(weights):
            _launch.launch(SPLIT, make_call("linear", x, [w], None, None, False, 512, None, buffers[i % 2]))
            x = buffers[i % 2]

    step = start
    for w in weights:
        step = run(step, w, SPLIT).clone()
        torch.cuda.synchronize()
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        chain()
    for _ in range(20):
        buffers[1].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(buffers[1], step)
