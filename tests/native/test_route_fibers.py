"""Route in one launch for Hopper executed on the CPU: its clusters as C++, every lane a fiber (cluster_fibers.h).

The choice itself is tested in test_grouped_topk_fibers.py, in more shapes. What this cannot find: faults of the compiler, and races that need
real concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from gristmill.kernels.moe.permute import op as permute
from gristmill.kernels.moe.route import op as route
from gristmill.kernels.native_call import CallEntry
from tests.calls import make_call
from tests.native import compiled_library
from tests.native.test_grouped_topk_fibers import KINDS, bias_of, logits_of

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
ENTRY = CallEntry("route_fibers", "route")
NONE, NO_BLOCK_WAITS, NO_CLUSTER_WAITS, OWN_VALUES, PLAIN_STORES, OWN_BYTES, NO_BYTES = 0, 1, 2, 6, 8, 9, 10
POISON = -99


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("route") / "route.so"
    source = ROOT / "tests" / "native" / "route_fibers.cpp"
    return compiled_library.load(out, source, flags=["-O1", "-ffp-contract=off"])


def differs(
    library: ctypes.CDLL,
    logits: torch.Tensor,
    top_k: int,
    local: int,
    first: int = 0,
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scoring: str = "sigmoid",
    *,
    order: int = 0,
    fault: int = NONE,
) -> str | None:
    """What is wrong with the results; None if they are those of the reference, and nothing else was written."""
    rows = len(logits)
    arguments = (logits, top_k, local, first, bias, n_group, topk_group, scoring, True, 2.5)
    sizes = {
        "weights": rows * top_k,
        "ids": rows * top_k,
        "expert_offsets": local + 1,
        "permutation": rows * top_k,
        "inverse": rows * top_k,
    }
    memory = {
        name: torch.full((size + 2,), POISON, dtype=torch.float32 if name == "weights" else torch.int32)
        for name, size in sizes.items()
    }
    inside = {name: tensor[1:-1] for name, tensor in memory.items()}
    weights, ids = (inside.pop(name).view(rows, top_k) for name in ("weights", "ids"))
    call = make_call("route", *arguments, weights=weights, ids=ids, **inside)
    if library.route_fibers(ctypes.c_char_p(ENTRY.pack(call)), order, fault):
        return "lanes wait in vain"
    if any((tensor[edge] != POISON).any() for tensor in memory.values() for edge in (0, -1)):
        return "written past the end"
    problem = route.OP.describe(*arguments)
    for name, found, expected in zip(inside, inside.values(), permute.reference(ids, local), strict=True):
        if not torch.equal(found, expected):
            return f"{name}: {found.tolist()}, not {expected.tolist()}, by ids {ids.tolist()}"
    error = route.error(problem, arguments, (weights, ids, *inside.values()), route.reference(*arguments))
    return None if error <= 4e-6 else f"ids or weights: {error}"


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 33, 63, 64])
def test_any_number_of_tokens(library: ctypes.CDLL, rows: int) -> None:
    """A cluster of one to eight CTAs; DeepSeek-V3's router, on one rank and on the last and the first of eight."""
    logits = logits_of("ties", rows, 256, rows, torch.float32)
    bias = bias_of(256, 1)
    for order, (local, first) in enumerate(((256, 0), (32, 224), (32, 0))):
        found = differs(library, logits, 8, local, first, bias, 8, 4, order=order)
        assert found is None, (local, first, found)


@pytest.mark.parametrize(
    ("experts", "top_k", "n_group", "topk_group", "local", "first"),
    [
        (128, 8, 1, 1, 128, 0),  # Qwen3-30B-A3B
        (8, 2, 1, 1, 8, 0),  # Mixtral
        (32, 4, 1, 1, 32, 0),  # gpt-oss
        (384, 8, 1, 1, 48, 100),
        (160, 6, 8, 3, 159, 1),
        (1024, 32, 32, 5, 1024, 0),  # a lane for each place
        (1024, 3, 1, 1, 257, 600),
        (257, 7, 1, 1, 256, 0),
        (12, 12, 1, 1, 5, 3),  # every token has every expert
        (1, 1, 1, 1, 1, 0),
    ],
)
def test_shapes(
    library: ctypes.CDLL, experts: int, top_k: int, n_group: int, topk_group: int, local: int, first: int
) -> None:
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        logits = logits_of("random", (64, 41, 5)[i], experts, i, dtype)
        bias = bias_of(experts, i) if i == 1 else None
        found = differs(
            library,
            logits,
            top_k,
            local,
            first,
            bias,
            n_group,
            topk_group,
            ("softmax", "sigmoid")[i % 2],
            order=i,
        )
        assert found is None, (dtype, found)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_hard_to_order(library: ctypes.CDLL, kind: str) -> None:
    """Places are those of the ids that were chosen, and these are those of the reference."""
    logits = logits_of(kind, 9, 60, 4, torch.float32)
    for scoring in ("sigmoid", "softmax"):
        if kind == "tiny" and scoring == "sigmoid":
            continue  # weights of denormal scores: test_grouped_topk_fibers.py
        found = differs(library, logits, 4, 31, 20, scoring=scoring)
        assert found is None, (scoring, found)


def test_one_expert_has_all_tokens_or_none(library: ctypes.CDLL) -> None:
    logits = torch.zeros(64, 40)
    logits[:, 17] = 5
    for local, first in ((1, 17), (1, 18), (40, 0), (17, 0), (22, 18)):
        found = differs(library, logits, 1, local, first)
        assert found is None, (local, first, found)


def test_order_of_lanes_and_blocks_does_not_matter(library: ctypes.CDLL) -> None:
    logits = logits_of("ties", 20, 60, 5, torch.float32)
    for order in range(5):
        assert differs(library, logits, 6, 40, 10, order=order) is None


def test_planted_faults_are_seen(library: ctypes.CDLL) -> None:
    logits = logits_of("ties", 11, 60, 3, torch.float32)
    for fault in (NONE, NO_BLOCK_WAITS, NO_CLUSTER_WAITS, OWN_VALUES, PLAIN_STORES, OWN_BYTES, NO_BYTES):
        found = [differs(library, logits, 6, 40, 10, order=order, fault=fault) for order in (0, 1, 4)]
        assert any(found) == (fault != NONE), (fault, found)
