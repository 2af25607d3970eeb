"""Collective kernels over peer memory without a GPU: accepted problems, refused arguments, and the error of a rank that is missing."""

from __future__ import annotations

import itertools
from ctypes import addressof, c_uint64
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.collective import (
    all_reduce_add_rms_norm_sm90,
    all_reduce_sm90,
    columns_sm90,
    groups,
)
from gristmill.kernels.collective import symmetric as memories
from gristmill.kernels.collective.symmetric import BUFFER_BYTES, Symmetric, check, symmetric
from gristmill.kernels.native import library_dir
from gristmill.runtime.layers.linear import PartialSum
from gristmill.runtime.layers.norm import RMSNorm
from gristmill.runtime.layers.plans import Plans

REGISTRY = default_registry()
needs_library = pytest.mark.skipif(
    not (library_dir() / "libgristmill_cuda_sm90a.so").is_file(),
    reason="the CUDA library is not built: needs nvcc",
)
SHAPE, ARGUMENT, DTYPE = -2, -5, -1


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        ("all_reduce_one_shot_sm90", "m=1024,n=4096,world=2", None),
        ("all_reduce_one_shot_sm90", "m=1025,n=4096,world=2", "more than the 8388608"),
        ("all_reduce_one_shot_sm90", "m=1024,n=4096,world=4", "more than the 8388608"),
        ("all_reduce_two_shot_sm90", "m=640,n=4096,world=4", None),
        ("all_reduce_two_shot_sm90", "m=65536,n=8192,world=8", None),
        ("all_reduce_one_shot_sm90", "m=640,n=4096,world=4", "more than the 8388608"),
        ("all_reduce_two_shot_sm90", "m=1,n=1,world=8,x=fp32", None),
        ("all_reduce_two_shot_sm90", "m=1,n=1,world=9", "2 to 8 ranks"),
        ("all_reduce_one_shot_sm90", "m=1,n=1,world=1", "2 to 8 ranks"),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=8192,world=2", None),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=8200,world=2", "up to 8192 values"),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=4092,world=2", "a multiple of 8"),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=4096,world=2,x=fp32", "fp16 or bf16"),
        ("all_reduce_add_rms_norm_sm90", "m=1025,n=4096,world=2", None),
        ("all_reduce_add_rms_norm_sm90", "m=1025,n=4096,world=4", "more than the 8388608"),
        ("all_gather_sm90", "m=64,n=64128,world=2", None),
        ("all_gather_sm90", "m=1,n=257,world=2", "multiple of 16 bytes"),
        ("all_gather_sm90", "m=128,n=64128,world=2", None),
        ("all_gather_sm90", "m=1,n=4194312,world=2", "more than the 8388608"),
    ],
)
def test_accepts(kernel: str, problem: str, reason: str | None) -> None:
    op = kernel.removesuffix("_sm90").removesuffix("_one_shot").removesuffix("_two_shot")
    refusal = REGISTRY.kernel(op, kernel).accepts(REGISTRY.op(op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


PEERS = (c_uint64 * 8)()


def options(world: int = 2, rank: int = 0) -> dict[str, int]:
    unused = dict.fromkeys(("state", "failed", "limit"), 0)
    return {
        "peers": addressof(PEERS),
        "capacity": BUFFER_BYTES // 16,
        "rank": rank,
        "world": world,
        "sms": 132,
        **unused,
    }


class Matrix:
    """What a call is packed from, without memory."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, address: int = 4096) -> None:
        self.shape: tuple[int, ...] = (rows, columns)
        self.dtype, self.data_ptr = dtype, lambda: address


@needs_library
def test_the_library_refuses_what_would_leave_its_memory() -> None:
    """Before any driver is needed."""

    def all_reduce(
        at: dict[str, int],
        elements: int,
        dtype: torch.dtype = torch.bfloat16,
        address: int = 4096,
        **more: int,
    ) -> int:
        call: Any = REGISTRY.op("all_reduce").Call(Matrix(1, elements, dtype, address), world=2, group="")
        return all_reduce_sm90.ENTRY.ask({"shots": 1, "threads": 128, **at, **more}, call)

    assert all_reduce(options(), 0) == 0
    assert all_reduce(options(), BUFFER_BYTES // 2 + 1) == SHAPE
    assert all_reduce(options(), -1) == SHAPE
    assert all_reduce(options(), 8, torch.int8) == DTYPE
    for wrong in (options(1), options(9), options(2, 2), options(2, -1), options() | {"sms": 0}):
        assert all_reduce(wrong, 8) == ARGUMENT
    assert all_reduce(options(), 8, shots=3) == ARGUMENT
    assert all_reduce(options(), 8, threads=1024) == ARGUMENT
    assert all_reduce(options(), 8, address=4098) == ARGUMENT

    def sum_and_norm(rows: int, n: int, dtype: torch.dtype = torch.bfloat16, each: int = 1) -> int:
        x = Matrix(rows, n, dtype)
        call: Any = REGISTRY.op("all_reduce_add_rms_norm").Call(x, x, x, 1e-5, "", 2, x)
        return all_reduce_add_rms_norm_sm90.ENTRY.ask({"each": each, **options()}, call)

    assert sum_and_norm(0, 4096) == 0
    assert sum_and_norm(1025, 4096) == SHAPE
    assert sum_and_norm(1, 4104, each=1) == SHAPE, "more vectors than threads"
    assert sum_and_norm(1, 12) == SHAPE
    assert sum_and_norm(1, 8, torch.float32) == DTYPE
    assert sum_and_norm(1, 8, each=3) == ARGUMENT

    def send(name: str, at: dict[str, int], rows: int, n: int) -> int:
        x = Matrix(rows, n, torch.bfloat16)
        x.shape = (rows, n) if name == "all_gather" else (rows, 2, n)
        call: Any = REGISTRY.op(name).Call(x, world=2, group="", out=x)
        entry = columns_sm90.ALL_GATHER if name == "all_gather" else columns_sm90.ALL_TO_ALL
        return entry.ask(at, call)

    for name in ("all_gather", "all_to_all"):
        assert send(name, options(), 0, 8) == 0
        assert send(name, options(), 1, 12) == SHAPE
        assert send(name, options(), 65, BUFFER_BYTES // 128) == SHAPE
        assert send(name, options(9), 1, 8) == ARGUMENT


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("elements", [8, 4 * BUFFER_BYTES // 2, 3 * BUFFER_BYTES + 8])
def test_long_calls_are_made_in_launches_that_fit(
    monkeypatch: pytest.MonkeyPatch, world: int, elements: int
) -> None:
    """Values and sums of each launch fit in the memory of a rank, and together the launches are the whole tensor, in order."""
    group = SimpleNamespace(size=lambda: world)
    memory = Symmetric(options(world), 60.0, torch.zeros(1, dtype=torch.int32), ())
    monkeypatch.setattr(groups, "_GROUPS", {"g": group})
    monkeypatch.setattr(memories, "_MEMORY", {"g": memory})
    x = torch.empty(1, elements, dtype=torch.bfloat16, device="meta")
    launched: list[tuple[int, int]] = []

    def entry(at: dict[str, int], call: Any, device: int) -> None:
        part = -(-call.x.numel() // 8 // -world)
        assert 2 * (world - 1) * part <= at["capacity"]
        assert call.x.storage_offset() % 8 == 0
        launched.append((call.x.storage_offset(), call.x.numel()))

    monkeypatch.setattr(all_reduce_sm90.ENTRY, "cuda", entry)
    call: Any = REGISTRY.op("all_reduce").Call(x, "g", world)
    all_reduce_sm90.launch({"shots": 2, "threads": 512}, call)
    begins = [0, *itertools.accumulate(count for _, count in launched)]
    assert [begin for begin, _ in launched] == begins[:-1] and begins[-1] == elements
    assert (len(launched) > 1) == (elements > 8)


def test_rows_of_long_calls_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has its rows of every tensor that has rows, and the whole of the others."""
    monkeypatch.setattr(groups, "_GROUPS", {"g": SimpleNamespace(size=lambda: 2)})
    memory = Symmetric(options(2), 60.0, torch.zeros(1, dtype=torch.int32), ())
    monkeypatch.setattr(memories, "_MEMORY", {"g": memory})
    rows: list[int] = []

    def entry(at: dict[str, int], call: Any, device: int) -> None:
        begins = {one.storage_offset() // one.shape[1] for one in (call.x, call.residual, call.out)}
        assert len(begins) == 1 and begins == {sum(rows)} and call.weight.shape == (4096,)
        assert call.x.shape == call.residual.shape == call.out.shape
        assert call.x.nbytes <= BUFFER_BYTES
        rows.append(len(call.x))

    monkeypatch.setattr(all_reduce_add_rms_norm_sm90.ENTRY, "cuda", entry)
    x, residual, out = (torch.empty(2500, 4096, dtype=torch.bfloat16, device="meta") for _ in range(3))
    weight = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    op = REGISTRY.op("all_reduce_add_rms_norm")
    all_reduce_add_rms_norm_sm90.launch({"each": 1}, op.Call(x, residual, weight, 1e-5, "g", 2, out))
    assert rows == [1024, 1024, 452]


def test_a_missing_rank_is_named() -> None:
    failed = torch.zeros(1, dtype=torch.int32)
    memory = Symmetric(options(rank=1), 60.0, failed, ())
    memory.check()
    failed[0] = 1  # what a kernel writes: 1 + the rank that did not send
    with pytest.raises(RuntimeError, match="rank 0 sent nothing for 60 s to a collective call of rank 1"):
        memory.check()


def test_a_group_without_such_memory_says_so() -> None:
    check("nobody")
    with pytest.raises(RuntimeError, match="'nobody' has no symmetric memory: it is not a group of CUDA"):
        symmetric("nobody")


def test_memory_that_cannot_be_mapped_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining the group goes on; the kernels that need the memory say why they cannot run."""
    import torch.distributed._symmetric_memory as symm_mem

    def refuse(*size: int, **options: object) -> torch.Tensor:
        raise RuntimeError("CUDA driver error: invalid argument")

    class Two:
        rank, size = (lambda self: 0), (lambda self: 2)

    waited = []
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(torch.distributed, "barrier", waited.append)
    monkeypatch.setattr(symm_mem, "empty", refuse)
    monkeypatch.setattr(memories, "_MEMORY", {})
    memories.share("refused", Two(), 60.0)
    assert len(waited) == 1, "the other ranks wait here, too"
    with pytest.raises(RuntimeError, match="torch cannot map it: CUDA driver error: invalid argument"):
        symmetric("refused")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    memories.share("apart", Two(), 60.0)
    with pytest.raises(RuntimeError, match="GPU 0 cannot access the memory of GPU 1"):
        symmetric("apart")


def test_a_summand_needs_ranks() -> None:
    """A model of one process has no sums that wait."""
    norm = RMSNorm(Plans(torch.device("cpu"), torch.float32), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="partial sum over ranks"):
        norm.add(PartialSum(torch.ones(1, 8)), torch.zeros(1, 8))
