"""The sampler for Hopper executed on the CPU: its source as C++, every thread of a cluster a fiber (cluster_fibers.h).

What this cannot find: faults of the compiler, and races that need real concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from gristmill.kernels.sampling import sample
from gristmill.kernels.sampling.sample_sm90 import MOST_RANKS
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
ROWS = [
    (temperature, top_k, top_p, min_p)
    for temperature in (0.0, 0.7, 1.5)
    for top_k, top_p in ((0, 1.0), (1, 1.0), (5, 0.9), (300, 1.0), (0, 0.5), (0, 0.9999), (2000, 0.8))
    for min_p in (0.0, 0.1)
    if temperature > 0 or top_k < 2
]
NONE, BLOCK_BARRIERS, CLUSTER_BARRIERS, WRONG_PEER = range(4)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("sample") / "sample.so"
    source = ROOT / "tests" / "native" / "sample_fibers.cpp"
    return compiled_library.load(out, source, flags=["-O2", "-ffp-contract=off"])


def differences(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    ranks: int,
    threads: int,
    order: int = 0,
    fault: int = NONE,
    keep: int = 1,
) -> int:
    """Rows whose token is not that of the reference; all of them if threads wait for each other in vain."""
    count, v = logits.shape
    temperature, top_k, top_p, min_p = zip(*(ROWS[i % len(ROWS)] for i in range(count)), strict=True)
    generator = torch.Generator().manual_seed(v)
    given = [
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
        torch.randint(0, 2**40, (count,), generator=generator),
    ]
    ids = torch.full((count,), -99)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*given, ids)]
    whole = [ctypes.c_int64(size) for size in (count, v)]
    code = library.sample_fibers(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_int64(logits.stride(0)),
        *pointers,
        *whole,
        int(logits.dtype == torch.bfloat16),
        ranks,
        threads,
        keep,
        order,
        fault,
    )
    return count if code else int((ids != sample.reference(logits, *given)).sum())


def normal(v: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(v)
    return (2 * torch.randn(len(ROWS), v, generator=generator)).to(dtype)


@pytest.mark.parametrize(
    ("v", "ranks", "threads", "order", "keep"),
    [
        (1, 1, 64, 0, 1),
        (7, 1, 64, 1, 0),
        (257, 2, 64, 2, 0),
        (4099, 4, 64, 0, 1),
        (3001, MOST_RANKS, 64, 2, 1),
        (2999, MOST_RANKS, 64, 1, 0),
    ],
)
def test_tokens_are_those_of_the_reference(
    library: ctypes.CDLL, v: int, ranks: int, threads: int, order: int, keep: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):  # bf16 has many ties
        assert differences(library, normal(v, dtype), ranks, threads, order, keep=keep) == 0


def test_ties_and_rows_without_an_answer(library: ctypes.CDLL) -> None:
    noise = normal(1500)
    for logits in (
        noise * 0 - 3,
        torch.where(noise > 1, 9.0, noise),
        torch.where(torch.arange(1500) % 50 == 3, noise, -torch.inf),
        torch.where(torch.arange(1500) == 1499, torch.nan, noise),
        noise * torch.inf,
        noise * 0 - torch.inf,
    ):
        for keep in (1, 0):
            assert differences(library, logits, 2, 64, keep=keep) == 0


def is_seen(library: ctypes.CDLL, fault: int, keep: int) -> bool:
    """Whether a row has another token than the reference's, or the process ends: faults may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_sample_fibers import differences, normal\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        f"found = (differences(library, normal(1500), 2, 64, order, {fault}, {keep}) for order in range(3))\n"
        "sys.exit(0 if any(found) else 3)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


@pytest.mark.parametrize("keep", [1, 0])
def test_a_planted_fault_is_seen(library: ctypes.CDLL, keep: int) -> None:
    """Missing barriers of blocks and of clusters, another block's memory."""
    faults = (NONE, BLOCK_BARRIERS, CLUSTER_BARRIERS, WRONG_PEER)
    assert [is_seen(library, fault, keep) for fault in faults] == [False, True, True, True]
