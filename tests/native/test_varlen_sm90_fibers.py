"""Attention over dense sequences for Hopper executed on the CPU: its source as C++, every thread of a CTA a fiber (wgmma_fibers.h).

Bits are not those of a GPU, whose tensor cores add in another order. What this cannot find beside: faults of the compiler, and races that need real
concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.lengths import error as attention_error
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
OP = default_registry().op("varlen_attention")
KEYS = 128
"""Keys of a tile, and queries of one."""
TENSORS = ("q", "k", "v", "query_start", "context_start", "out", "lse")
SIZES = (
    "tokens",
    "seqs",
    "rows",
    "heads",
    "kv_heads",
    "qk_dim",
    "v_dim",
    "left",
    "right",
    "ctas",
)


class Call(ctypes.Structure):
    """VarlenCall of varlen_sm90_fibers.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int) for name in SIZES),
        ("scale", ctypes.c_float),
        ("order", ctypes.c_int),
        ("tiles", ctypes.c_long),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("varlen_sm90") / "varlen_sm90.so"
    flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init"]
    flags.append("-fno-gnu-unique")  # inline variables are each library's own
    return compiled_library.load(out, ROOT / "tests/native/varlen_sm90_fibers.cpp", flags=flags)


class Case:
    """Sequences of `lengths` queries and keys, as arguments of the operation."""

    def __init__(
        self, lengths: list[tuple[int, int]], window: tuple[int, int], dims: tuple[int, int] = (64, 64)
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths, self.window, self.dims = lengths, window, dims
        self.heads, self.kv_heads = 2, 1
        queries, keys = (sum(counts) for counts in zip(*lengths, strict=True))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        self.q, self.k = normal(queries, 2, dims[0]) * 2, normal(keys, 1, dims[0])
        self.v = normal(keys, 1, dims[1])
        self.starts = [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths, strict=True)]
        bounds = [max(column) for column in zip(*lengths, strict=True)]
        self.text = (
            f"q_tokens={queries},seqs={len(lengths)},max_q={max(1, bounds[0])},max_ctx={max(1, bounds[1])},total_ctx={keys},heads=2,kv_heads=1,"
            f"qk_dim={dims[0]},v_dim={dims[1]},lse=true,window_left={window[0]},window_right={window[1]}"
        )

    def expected(self) -> list[Tensor]:
        lse = torch.empty(self.q.shape[:2])
        bounds = [max(1, *column) for column in zip(*self.lengths, (1, 1), strict=True)]
        scale = self.dims[0] ** -0.5
        out = OP.reference(self.q, self.k, self.v, *self.starts, *bounds, scale, lse, *self.window)
        return [out, lse]

    def computed(
        self, library: ctypes.CDLL, window: tuple[int, int] | None = None, ctas: int = 2, order: int = 0
    ) -> tuple[list[Tensor], int]:
        """Outputs, and how many tiles of keys were copied."""
        reach = len(self.q) + len(self.k)
        window = tuple(side if side < reach else -1 for side in window or self.window)  # as the entry does
        out = torch.full((*self.q.shape[:2], self.dims[1]), float("nan")).bfloat16()
        lse = torch.full(self.q.shape[:2], float("nan"))
        tensors = (self.q, self.k, self.v, *self.starts, out, lse)
        call = Call(
            *(tensor.data_ptr() for tensor in tensors),
            len(self.q), len(self.lengths), len(self.k), self.heads, self.kv_heads, *self.dims, *window, ctas,
            self.dims[0] ** -0.5, order, 0,
        )  # fmt: skip
        status = library.varlen_on_cpu(ctypes.byref(call))
        assert status == 0, (
            f"{self.text}: {('', 'threads wait for each other in vain', 'no such instance')[status]}"
        )
        return [out, lse], call.tiles

    def error(self, outputs: list[Tensor]) -> float:
        """Relative to the tolerance."""
        problem = OP.problem(self.text)
        arguments = [self.q, self.k, self.v, *self.starts]
        return attention_error(problem, arguments, outputs, self.expected()) / OP.tolerance(problem).limit

    def visible(self) -> int:
        """Tiles of keys of which a tile of queries sees at least one key, of all heads."""
        count, (left, right) = 0, self.window
        for queries, keys in self.lengths:
            for begin in range(0, queries, KEYS):
                seen = set()
                for position in range(keys - queries + begin, keys - queries + min(queries, begin + KEYS)):
                    first = 0 if left < 0 else max(0, position - left)
                    end = keys if right < 0 else min(keys, position + right + 1)
                    seen |= set(range(first // KEYS, (end - 1) // KEYS + 1)) if end > first else set()
                count += len(seen)
        return count * self.heads


def some(cases: Iterable[Any], fast: int) -> list[Any]:
    """All cases; those after the first `fast` ones only where slow tests run."""
    return [
        case if number < fast else pytest.param(case, marks=pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


WINDOWS = ((64, 64), (-1, -1), (5, 3), (0, -1), (-1, 200), (129, 0), (3, 10**9), (0, 0), (127, -1), (300, 1), (128, 128), (10**9, 7))  # fmt: skip
LENGTHS = ([(257, 257), (0, 0), (1, 1), (7, 7)], [(0, 9), (130, 400), (300, 129)])


@pytest.mark.parametrize("window", some(WINDOWS, 7), ids=str)
@pytest.mark.parametrize("number", some((0, 1), 1))
def test_windows(library: ctypes.CDLL, window: tuple[int, int], number: int) -> None:
    """Keys before and after a query's own, none and all of them: results are the reference's, and only tiles that are seen are copied."""
    order = (WINDOWS.index(window) + number) % 2
    case = Case(LENGTHS[order], window)
    outputs, tiles = case.computed(library, ctas=1 + 2 * number, order=WINDOWS.index(window) // 2)
    assert case.error(outputs) < 1, case.text
    assert tiles == case.visible(), case.text


@pytest.mark.parametrize("dims", some([(192, 128), (128, 128), (72, 64), (64, 128)], 1), ids=str)
def test_other_heads(library: ctypes.CDLL, dims: tuple[int, int]) -> None:
    """Every instance, and heads that are padded to one."""
    for order, window in enumerate(((-1, 0), (-1, -1), (100, 30))):
        case = Case([(130, 257), (3, 3)], window, dims)
        outputs, tiles = case.computed(library, order=order)
        assert case.error(outputs) < 1, case.text
        assert tiles == case.visible(), case.text


@pytest.mark.slow
@pytest.mark.parametrize("length", [63, 129, 257])
def test_windows_end_at_any_key(library: ctypes.CDLL, length: int) -> None:
    """Windows that begin and end at tiles, and one key before and after."""
    for left in (0, 127, 128, 129):
        for right in (1, 127, 128, -1):
            case = Case([(length, length)], (left, right))
            outputs, tiles = case.computed(library, order=left + right)
            assert case.error(outputs) < 1, case.text
            assert tiles == case.visible(), case.text


@pytest.mark.parametrize("window", some([(128, 64), (0, 0), (200, -1), (-1, 17)], 1), ids=str)
def test_values_of_tiles_that_nobody_sees(library: ctypes.CDLL, window: tuple[int, int]) -> None:
    """NaN in them changes no bit: neither those before and behind the window of a tile of queries, nor the next sequence's."""
    left, right = window
    case = Case([(512, 512), (1, 1)], window)
    expected, _ = case.computed(library)
    for tile in (1, 2):
        queries = slice(tile * KEYS, (tile + 1) * KEYS)
        first = 0 if left < 0 else max(0, tile * KEYS - left) // KEYS * KEYS
        end = 512 if right < 0 else min(512, (tile + 1) * KEYS + right)
        spoiled = Case(case.lengths, window)
        for rows in (slice(0, first), slice(end, None)):
            spoiled.v[rows] = float("nan")
        outputs, _ = spoiled.computed(library, order=tile)
        assert torch.equal(outputs[0][queries], expected[0][queries]), tile


@pytest.mark.parametrize("window", some([(64, 64), (5, 3), (127, 129), (-1, 130)], 1), ids=str)
def test_one_key_more_or_less_is_seen(library: ctypes.CDLL, window: tuple[int, int]) -> None:
    """The tolerance tells windows from those that are one key shorter or longer on one side."""
    case = Case([(200, 200)], window)
    for side in range(2):
        for by in (-1, 1):
            if window[side] >= 0:
                wrong = tuple(size + by * (place == side) for place, size in enumerate(window))
                assert case.error(case.computed(library, wrong)[0]) > 1, wrong


def test_a_query_that_is_no_number_shows(library: ctypes.CDLL) -> None:
    """In the sums and in their logarithm; no other row changes a bit."""
    case = Case([(40, 200), (9, 9)], (-1, 0))
    before, _ = case.computed(library)
    case.q[3, 1] = float("nan")
    for computed, without in zip(case.computed(library)[0], before, strict=True):
        assert bool(computed[3, 1].isnan().all())
        computed[3, 1] = without[3, 1]
        assert torch.equal(computed, without)
