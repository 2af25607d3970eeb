"""All-reduce kernels over peer memory on two GPUs: odd shapes, ranks that are late, replayed graphs, a rank that has ended."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.place import place
from gristmill.autotune.worker_group import WorkerGroup
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.collective.groups import rendezvous
from gristmill.kernels.collective.symmetric import symmetric
from gristmill.kernels.load import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
REGISTRY, TARGET = default_registry(), Target.parse("h200")
KERNELS = [
    kernel
    for op in ("all_reduce", "all_reduce_add_rms_norm", "all_gather", "all_to_all")
    for kernel in REGISTRY.kernels_of(op)
    if "cpu" not in kernel.requires.vendors
]
SHAPES = (
    "m=0,n=64",
    "m=1,n=1",
    "m=7,n=257",
    "m=7,n=257,x=fp32",
    "m=33,n=768,x=fp16",
    "m=3,n=4104",
    "m=1,n=4096",
    "m=257,n=4096",
    "m=513,n=4096",
    "m=512,n=8192",
    "m=1500,n=4096",  # more than the memory of a rank: several launches
)


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerGroup]:
    """Returns a worker group of two GPUs."""
    group = WorkerGroup(2, timeout=120)
    yield group
    group.close()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_two_ranks_match_the_reference(pair: WorkerGroup, kernel: Any) -> None:
    here = place(None)
    if reasons := kernel.requires.check_build(here.target, here.build):
        pytest.skip("; ".join(reasons))
    op, checked = REGISTRY.op(kernel.op), 0
    for shape in SHAPES:
        problem = op.problem(f"{shape},world=2")
        if kernel.accepts(problem) is not None:
            continue
        tuned = kernel.space is not None and kernel.language == "cuda"
        for config in kernel.space(problem, TARGET) if tuned else [kernel.config(problem, TARGET)]:
            outcome = pair.verify(op, kernel, dict(config), problem, "cuda")
            assert outcome["ok"], (shape, config, outcome["reason"])
            if op.name != "all_reduce_add_rms_norm":
                assert outcome["error"] == 0, "the sum of two numbers is rounded once, whatever the order"
            checked += 1
    assert checked >= 5


def late_ranks(rank: int) -> None:
    """Thousands of calls in turn, of all kernels and sizes, while each rank sleeps now and then."""
    shared, own = random.Random(5), random.Random(100 + rank)
    wrong = torch.zeros((), device=f"cuda:{rank}")
    for _ in range(2000):
        shape = shared.choice([1, 2, 7, 33, 130]), shared.choice([8, 256, 4096])
        value, kind = shared.randint(1, 50), shared.randint(0, 3)
        x = torch.full(shape, float(value * (rank + 1)), dtype=torch.bfloat16, device=wrong.device)
        if own.random() < 0.05:
            torch.cuda._sleep(own.randint(1000, 200000))
        if kind == 3:
            out = x.new_empty(shape[0], 2 * shape[1])
            ranks = torch.arange(1.0, 3.0, device=x.device).repeat_interleave(shape[1])
            if shared.random() < 0.5:
                _gather(x, out)
                wrong += (out != (value * ranks).to(x.dtype)).any()
            else:
                _run_kernel(
                    "all_to_all_sm90", {}, torch.stack([x, x + 100], 1), "pair", 2, out.view(shape[0], 2, -1)
                )
                wrong += (out != (value * ranks + 100 * rank).to(x.dtype)).any()
            continue
        if kind == 2:
            residual, weight = torch.zeros_like(x), torch.ones(shape[1], dtype=x.dtype, device=x.device)
            _run_kernel("all_reduce_add_rms_norm_sm90", {"each": 1}, x, residual, weight, 0.0, "pair", 2, x)
            wrong += (x != 1).any()
            x = residual
        else:
            _sum(x, shots=kind + 1, threads=256)
        wrong += (x != torch.tensor(3.0 * value, dtype=x.dtype)).any()
    assert float(wrong) == 0
    symmetric("pair").check()


def replays(rank: int) -> None:
    """A captured call counts like any other: replays and eager calls in turn, with new values."""
    x = torch.zeros(4, 4096, dtype=torch.bfloat16, device=f"cuda:{rank}")
    y, small = torch.zeros_like(x), torch.ones(2, 8, dtype=x.dtype, device=x.device)
    both = x.new_empty(4, 8192)
    wrong = torch.zeros((), device=x.device)
    _sum(y, shots=1, threads=128)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with capturing(graph, stream=stream):
        for _ in range(3):
            y.copy_(x)
            _sum(y, shots=1, threads=128)
        _gather(x, both)
    for turn in range(300):
        value = float(turn % 50)
        x.fill_(value * (rank + 1))
        graph.replay()
        wrong += (y != value * 3).any()
        wrong += (both[:, :4096] != value).any() + (both[:, 4096:] != value * 2).any()
        if turn % 7 == 0:
            small.fill_(1.0)
            _sum(small, shots=2, threads=128)
            wrong += (small != 2).any()
    assert float(wrong) == 0


def zeros_and_nans(rank: int) -> None:
    """Every value arrives: -0 and NaN too, of which the protocol uses one as a mark. All ranks get the same bits."""
    special = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -1.0, 1e-40, -3e38, 2.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        values = special.to(dtype).repeat(9)[None].cuda(rank)
        for shots in (1, 2):
            x = values.clone() if rank == 0 else torch.full_like(values, -0.0)
            _sum(x, shots=shots, threads=128)
            assert torch.equal(x.nan_to_num(7.0), values.nan_to_num(7.0)), (dtype, shots)
            both = [torch.empty_like(x) for _ in range(2)]
            torch.distributed.all_gather(both, x)
            assert torch.equal(both[0].view(torch.uint8), both[1].view(torch.uint8)), (dtype, shots)
        x, out = values.roll(rank, 1), values.new_empty(1, 144)
        _gather(x, out)
        expected = torch.cat([values, values.roll(1, 1)], 1)
        assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0)), dtype


def a_rank_that_has_ended(rank: int) -> None:
    """The kernel ends at the limit, the error names the rank, and later calls are refused."""
    if rank:
        return
    memory = symmetric("pair")
    memory.options["limit"] = 10**9
    x, begin = torch.zeros(512, 4096, dtype=torch.bfloat16, device="cuda:0"), time.monotonic()
    _sum(x, shots=1, threads=512)
    torch.cuda.synchronize()
    assert 0.9 < time.monotonic() - begin < 5
    with pytest.raises(RuntimeError, match="rank 1 sent nothing"):
        memory.check()
    with pytest.raises(RuntimeError, match="rank 1 sent nothing"):
        _sum(x, shots=1, threads=512)


def _run_kernel(name: str, config: dict[str, int], *arguments: Any) -> None:
    op = next(kernel.op for kernel in KERNELS if kernel.name == name)
    load(REGISTRY.kernel(op, name))(config, REGISTRY.op(op).Call(*arguments))


def _sum(x: torch.Tensor, shots: int, threads: int) -> None:
    name = ("all_reduce_one_shot_sm90", "all_reduce_two_shot_sm90")[shots - 1]
    _run_kernel(name, {"shots": shots, "threads": threads}, x, "pair", 2)


def _gather(x: torch.Tensor, out: torch.Tensor) -> None:
    _run_kernel("all_gather_sm90", {}, x, "pair", 2, out)


def _run(rank: int, case: Callable[[int], None], file: str) -> None:
    rendezvous("pair", rank, 2, "cuda", file, 60.0)
    case(rank)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "case", [late_ranks, replays, zeros_and_nans, a_rank_that_has_ended], ids=lambda case: case.__name__
)
def test_with_two_processes(case: Callable[[int], None], tmp_path: Path) -> None:
    """A case that fails in a process fails here, with its traceback."""
    torch.multiprocessing.spawn(_run, (case, str(tmp_path / "rendezvous")), nprocs=2)
