"""Grouped top-k in CUDA C++ executed on the CPU: its rows as C++, every lane a fiber (cluster_fibers.h).

What this cannot find: faults of the compiler, and races that need real concurrency.
"""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path

import pytest
import torch

from gristmill.kernels.moe.grouped_topk import op as grouped_topk
from gristmill.kernels.native_call import CallEntry
from tests.calls import make_call
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
ENTRY = CallEntry("grouped_topk_fibers", "grouped_topk")
NONE, NO_WAITS, HALF_THE_LANES, OWN_VALUES, OWN_BALLOTS = 0, 4, 5, 6, 7
INF, NAN = math.inf, math.nan
SHAPES = [
    # experts, top_k, n_group, topk_group
    (256, 8, 8, 4),  # groups of whole lanes
    (128, 2, 8, 2),
    (384, 8, 1, 1),
    (512, 22, 1, 1),
    (1024, 3, 32, 5),
    (160, 6, 8, 3),  # groups of parts of lanes
    (12, 3, 12, 5),
    (96, 8, 3, 2),
    (1, 1, 1, 1),
    (60, 4, 1, 1),
    (7, 7, 1, 1),
    (257, 40, 1, 1),  # more places than lanes
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("grouped_topk") / "grouped_topk.so"
    source = ROOT / "tests" / "native" / "grouped_topk_fibers.cpp"
    return compiled_library.load(out, source, flags=["-O1", "-ffp-contract=off"])


def logits_of(kind: str, rows: int, experts: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Random logits, or such as are hard to order."""
    generator = torch.Generator().manual_seed(seed)
    noise = 1.5 * torch.randn(rows, experts, generator=generator)
    odds = torch.rand(rows, experts, generator=generator)
    logits = {
        "random": noise,
        "ties": (noise * 2).round() / 2,
        "equal": torch.zeros(rows, experts),
        "zeros": torch.where(odds < 0.5, -0.0, 0.0),
        "nan": torch.where(odds < 0.3, NAN, noise),
        "all nan": torch.full((rows, experts), NAN),
        "infinities": torch.where(odds < 0.2, INF, torch.where(odds < 0.6, -INF, noise.round())),
        "all -inf": torch.full((rows, experts), -INF),
        "saturated": 40 * noise.sign() + noise,
        "close": noise.round() + odds.mul(4).floor() * 2**-18,  # too close for the tags of experts
        "tiny": -88 + noise.round() / 4,  # scores that are denormal
    }[kind]
    return logits.to(dtype)


KINDS = (
    "random",
    "ties",
    "close",
    "equal",
    "zeros",
    "nan",
    "all nan",
    "infinities",
    "all -inf",
    "saturated",
    "tiny",
)


def differs(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 2.5,
    *,
    warps: int = 2,
    order: int = 0,
    fault: int = NONE,
) -> str | None:
    """What is wrong with the results; None if they are those of the reference, and nothing else was written."""
    rows = len(logits)
    memory = torch.full((rows + 2, top_k), -99.0), torch.full((rows + 2, top_k), -99, dtype=torch.int32)
    weights, ids = (tensor[1:-1] for tensor in memory)
    arguments = (logits, top_k, bias, n_group, topk_group, scoring, renormalize, scale)
    packed = ENTRY.pack(make_call("grouped_topk", *arguments, weights=weights, ids=ids))
    if library.grouped_topk_fibers(ctypes.c_char_p(packed), warps, order, fault):
        return "lanes wait in vain"
    if any((tensor[edge] != -99).any() for tensor in memory for edge in (0, -1)):
        return "written past the rows"
    expected, wanted = grouped_topk.reference(*arguments)
    wrong = (ids != wanted).any(-1) & ~grouped_topk.near_ties(*arguments[:6])
    if wrong.any():
        row = int(wrong.nonzero()[0])
        return f"row {row}: ids {ids[row].tolist()}, not {wanted[row].tolist()}"
    same = (ids == wanted).all(-1)
    if int((~same).sum()) > 1 + rows // 100:
        return "more near ties than may be"
    try:
        torch.testing.assert_close(weights[same], expected[same], rtol=4e-6, atol=1e-37, equal_nan=True)
    except AssertionError as error:
        return str(error)
    return None


def bias_of(experts: int, seed: int) -> torch.Tensor:
    """Some experts are never to be chosen, others always."""
    generator = torch.Generator().manual_seed(seed)
    bias = 0.1 * torch.randint(-3, 4, (experts,), generator=generator).float()
    return torch.where(torch.rand(experts, generator=generator) < 0.05, -INF, bias)


@pytest.mark.parametrize(("experts", "top_k", "n_group", "topk_group"), SHAPES)
def test_choices_are_those_of_the_reference(
    library: ctypes.CDLL, experts: int, top_k: int, n_group: int, topk_group: int
) -> None:
    """Of all kinds of logits in turn, with and without a bias, for both scores, all types, several orders of lanes."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for i, kind in enumerate(KINDS):
        logits = logits_of(kind, 5, experts, i, dtypes[i % 3])
        for j, scoring in enumerate(("sigmoid", "softmax")):
            bias = bias_of(experts, i) if (i + j) % 2 else None
            found = differs(
                library,
                logits,
                top_k,
                bias,
                n_group,
                topk_group,
                scoring,
                renormalize=i % 3 > 0,
                warps=1 + i % 4,
                order=i % 3,
            )
            assert found is None, (kind, scoring, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_any_stride_and_alignment(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    for experts, first, stride in ((256, 0, 264), (256, 1, 300), (256, 4, 260), (250, 0, 250), (255, 3, 259)):
        wide = torch.full((9, stride + first), NAN, dtype=dtype)
        logits = wide[:, first : first + experts]
        logits.copy_(logits_of("random", 9, experts, experts, dtype))
        for scoring in ("sigmoid", "softmax"):
            assert differs(library, logits, 8, None, scoring=scoring) is None, (experts, first, stride)
    bias = torch.zeros(260)[1:257]
    bias[100] = 2.0
    assert differs(library, logits_of("random", 3, 256, 1, dtype), 8, bias, 8, 4) is None


def test_planted_faults_are_seen(library: ctypes.CDLL) -> None:
    logits, bias = logits_of("ties", 16, 256, 3, torch.float32), bias_of(256, 3)
    for fault in (NONE, NO_WAITS, HALF_THE_LANES, OWN_VALUES, OWN_BALLOTS):
        found = [differs(library, logits, 8, bias, 8, 4, order=order, fault=fault) for order in range(3)]
        assert any(found) == (fault != NONE), (fault, found)
