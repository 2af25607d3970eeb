"""Collective kernels over peer memory without a GPU: accepted problems, refused arguments, and the error of a rank that is missing."""

from __future__ import annotations

from ctypes import byref, c_void_p, sizeof

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.collective import all_gather_sm90, all_reduce_add_rms_norm_sm90, all_reduce_sm90
from gristmill.kernels.collective import symmetric as memories
from gristmill.kernels.collective.symmetric import BUFFER_BYTES, PushParams, Symmetric, check, symmetric
from gristmill.kernels.native import cuda_function, library_dir
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
        ("all_reduce_one_shot_sm90", "m=640,n=4096,world=4", "more than the 8388608"),
        ("all_reduce_two_shot_sm90", "m=1,n=1,world=8,x=fp32", None),
        ("all_reduce_two_shot_sm90", "m=1,n=1,world=9", "2 to 8 ranks"),
        ("all_reduce_one_shot_sm90", "m=1,n=1,world=1", "2 to 8 ranks"),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=8192,world=2", None),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=8200,world=2", "up to 8192 values"),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=4092,world=2", "a multiple of 8"),
        ("all_reduce_add_rms_norm_sm90", "m=1,n=4096,world=2,x=fp32", "fp16 or bf16"),
        ("all_reduce_add_rms_norm_sm90", "m=1025,n=4096,world=2", "more than the 8388608"),
        ("all_gather_sm90", "m=64,n=64128,world=2", None),
        ("all_gather_sm90", "m=1,n=257,world=2", "multiple of 16 bytes"),
        ("all_gather_sm90", "m=128,n=64128,world=2", "more than the 8388608"),
    ],
)
def test_accepts(kernel: str, problem: str, reason: str | None) -> None:
    op = kernel.removesuffix("_sm90").removesuffix("_one_shot").removesuffix("_two_shot")
    refusal = REGISTRY.kernel(op, kernel).accepts(REGISTRY.op(op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def params(world: int = 2, rank: int = 0) -> PushParams:
    return PushParams(capacity=BUFFER_BYTES // 16, rank=rank, world=world)


@needs_library
def test_the_library_refuses_what_would_leave_its_memory() -> None:
    """Before any driver is needed."""
    assert sizeof(PushParams) == 8 * 8 + 4 * 8 + 2 * 4, "the struct of _push.h"
    reduce = cuda_function("gm_all_reduce_sm90", "sm_90a", all_reduce_sm90._SIGNATURE)
    x = c_void_p(4096)

    def all_reduce(at: PushParams, elements: int, kind: int = 2, shots: int = 1, threads: int = 128) -> int:
        return reduce(byref(at), x, elements, kind, shots, threads, 132, 0, None)

    assert all_reduce(params(), 0) == 0
    assert all_reduce(params(), BUFFER_BYTES // 2 + 1) == SHAPE
    assert all_reduce(params(), -1) == SHAPE
    assert all_reduce(params(), 8, kind=3) == DTYPE
    for wrong in (params(1), params(9), params(2, 2), params(2, -1)):
        assert all_reduce(wrong, 8) == ARGUMENT
    assert all_reduce(params(), 8, shots=3) == ARGUMENT
    assert all_reduce(params(), 8, threads=1024) == ARGUMENT
    assert reduce(byref(params()), c_void_p(4098), 8, 2, 1, 128, 132, 0, None) == ARGUMENT

    norm = cuda_function("gm_all_reduce_add_rms_norm_sm90", "sm_90a", all_reduce_add_rms_norm_sm90._SIGNATURE)

    def sum_and_norm(rows: int, n: int, kind: int = 2, each: int = 1) -> int:
        return norm(byref(params()), x, x, x, x, rows, n, 1e-5, kind, each, 132, 0, None)

    assert sum_and_norm(0, 4096) == 0
    assert sum_and_norm(1025, 4096) == SHAPE
    assert sum_and_norm(1, 4104, each=1) == SHAPE, "more vectors than threads"
    assert sum_and_norm(1, 12) == SHAPE
    assert sum_and_norm(1, 8, kind=0) == DTYPE
    assert sum_and_norm(1, 8, each=3) == ARGUMENT

    gather = cuda_function("gm_all_gather_sm90", "sm_90a", all_gather_sm90._SIGNATURE)
    assert gather(byref(params()), x, x, 0, 16, 132, 0, None) == 0
    assert gather(byref(params()), x, x, 1, 24, 132, 0, None) == SHAPE
    assert gather(byref(params()), x, x, 65, BUFFER_BYTES // 64, 132, 0, None) == SHAPE
    assert gather(byref(params(9)), x, x, 1, 16, 132, 0, None) == ARGUMENT


def test_a_missing_rank_is_named() -> None:
    failed = torch.zeros(1, dtype=torch.int32)
    memory = Symmetric(params(rank=1), 132, 60.0, failed, ())
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
