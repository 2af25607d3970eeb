"""Latent attention for sm_80 executed on the CPU: its source as C++, every thread of a CTA a fiber (sm80_fibers.h).

What this cannot find: faults of the compiler, and races that need real concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.lengths import error as attention_error
from gristmill.kernels.attention.mla_attention.sm80.spec import ROWS, parts_at
from gristmill.kernels.attention.mla_attention.sm90.spec import LATENT
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
OP = default_registry().op("mla_attention")
NONE, NO_BARRIERS, EARLY_READS = 0, 1, 4
CANARY = 3
"""Rows behind the outputs that must stay as they are."""
TENSORS = ("q", "cache", "table", "query_start", "seq_lens", "out", "lse", "records", "parts")
SIZES = ("seqs", "tokens", "heads", "page", "table_row", "max_q", "max_ctx", "bf16", "ctas", "least", "whole")


class Call(ctypes.Structure):
    """MlaCall of mla_sm80_fibers.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int) for name in SIZES),
        ("scale", ctypes.c_float),
        ("order", ctypes.c_int),
        ("fault", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("mla_sm80") / "mla_sm80.so"
    flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init"]
    return compiled_library.load(out, ROOT / "tests/native/mla_sm80_fibers.cpp", flags=flags)


def run(
    library: ctypes.CDLL,
    text: str,
    ctas: int = 7,
    least: int = 1,
    whole: int = 0,
    order: int = 0,
    fault: int = NONE,
    lost: tuple[int, int] | None = None,
) -> tuple[int, bool, list[Tensor]]:
    """How many tiles' contexts were cut (-1 if all were to stay whole, -2 if threads wait for each other in vain), whether the outputs are the
    reference's within the operation's tolerance, and the outputs. The query `lost`, a token and a head, is no number."""
    problem = OP.problem(text)
    given = OP.inputs(problem, 1, "cpu")
    if lost is not None:
        given[0][lost] = float("nan")
    q, cache, table, query_start, seq_lens, max_q, max_ctx, scale, _, lse, _ = given
    tokens, heads, _ = q.shape
    out = torch.full((tokens + CANARY, heads, LATENT), float("nan"), dtype=q.dtype)
    own_lse = None if lse is None else torch.full((tokens + CANARY, heads), float("nan"))
    tensors = {
        "q": q, "cache": cache, "table": table, "query_start": query_start, "seq_lens": seq_lens, "out": out, "lse": own_lse,
        "records": torch.full((parts_at(ctas) // 16, 4), -1, dtype=torch.int32),
        "parts": torch.full((2 * ctas * ROWS * (LATENT + 2),), float("nan")),
    }  # fmt: skip
    sizes = (
        seq_lens.numel(), tokens, heads, cache.shape[1], table.stride(0), max_q, max_ctx, q.dtype is torch.bfloat16, ctas, least, whole,
    )  # fmt: skip
    pointers = (None if t is None else t.data_ptr() for t in tensors.values())
    pieces = library.mla_on_cpu(ctypes.byref(Call(*pointers, *map(int, sizes), scale, order, fault)))
    known = int(query_start[-1])
    expected_lse = None if lse is None else torch.empty_like(lse)
    reference = OP.reference
    assert reference is not None
    expected = [reference(*given[:9], expected_lse)[:known]]
    outputs = [out[:known]]
    right = bool(out[known:].isnan().all())
    if own_lse is not None and expected_lse is not None:
        outputs.append(own_lse[:known])
        expected.append(expected_lse[:known])
        right = right and bool(own_lse[known:].isnan().all())
    if lost is not None:
        for computed, wanted in zip(outputs, expected, strict=True):
            right = right and bool(computed[lost].isnan().all()) and bool(wanted[lost].isnan().all())
            computed[lost] = wanted[lost] = 0
    error = attention_error(problem, given, outputs, expected)
    records = tensors["records"]
    assert records is not None
    cut = int((records[:, 2] > 0).sum()) if pieces > 0 else pieces - 1
    return cut, right and error <= OP.tolerance(problem).limit, outputs


CUT = (
    ("q_tokens=1,seqs=1,max_q=1,max_ctx=257,total_ctx=257,heads=16,lse=true", 1),
    ("q_tokens=3,seqs=5,max_q=1,max_ctx=129,total_ctx=300,heads=5,block_size=7,x=fp16,lse=true", 1),
    ("q_tokens=2,seqs=2,max_q=1,max_ctx=97,total_ctx=150,heads=40,block_size=24,lse=true", 2),
    ("q_tokens=4,seqs=2,max_q=2,max_ctx=130,total_ctx=190,heads=16,block_size=1,x=fp16", 2),
    ("q_tokens=4,seqs=1,max_q=4,max_ctx=34,total_ctx=34,heads=9,block_size=16,lse=true", 2),
    ("q_tokens=2,seqs=2,max_q=1,max_ctx=7,total_ctx=8,heads=1,lse=true", 0),
)
"""Problems, and how many tiles' contexts `CTAS` CTAs cut."""
CTAS = 7
WHOLE = (
    "q_tokens=1,seqs=1,max_q=1,max_ctx=1,total_ctx=1,heads=3,block_size=7,lse=true",
    "q_tokens=9,seqs=4,max_q=7,max_ctx=65,total_ctx=100,heads=20,block_size=7,lse=true",
    "q_tokens=4,seqs=3,max_q=2,max_ctx=40,total_ctx=77,heads=8,block_size=24,x=fp16,lse=true",
)


@pytest.mark.parametrize(("text", "cut"), CUT)
def test_contexts_are_cut_and_merged(library: ctypes.CDLL, text: str, cut: int) -> None:
    ran, right, _ = run(library, text, CTAS, order=[one for one, _ in CUT].index(text) % 3)
    assert (ran, right) == (cut, True)


@pytest.mark.parametrize("text", WHOLE)
def test_contexts_stay_whole(library: ctypes.CDLL, text: str) -> None:
    ran, right, _ = run(library, text, whole=1, order=WHOLE.index(text))
    assert (ran, right) == (-1, True)


@pytest.mark.parametrize(("text", "whole"), [(CUT[0][0], 0), (WHOLE[1], 1)])
def test_a_query_that_is_no_number_shows(library: ctypes.CDLL, text: str, whole: int) -> None:
    assert run(library, text, CTAS, whole=whole, lost=(0, 2))[1]


def test_longer_sequences_of_a_mixed_batch_are_not_cut(library: ctypes.CDLL) -> None:
    """A chunk beside decodes: a CTA for each tile."""
    text = "q_tokens=12,seqs=6,max_q=7,max_ctx=33,total_ctx=90,heads=16,lse=true"
    assert run(library, text, ctas=64)[:2] == (-1, True)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_order_of_threads(library: ctypes.CDLL) -> None:
    outputs = [run(library, CUT[2][0], CTAS, order=order)[2] for order in range(3)]
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


def is_seen(library: ctypes.CDLL, text: str, fault: int) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_mla_sm80_fibers import run\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        f"right = all(run(library, {text!r}, order=order, fault={fault})[1] for order in range(3))\n"
        "sys.exit(3 if right else 0)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NONE, NO_BARRIERS, EARLY_READS])
def test_a_planted_fault_is_seen(library: ctypes.CDLL, fault: int) -> None:
    """Barriers that do nothing, and keys that are read before their copies have landed."""
    assert is_seen(library, CUT[3][0], fault) == (fault != NONE)
