"""Paged attention for Hopper executed on the CPU: its source and its entry as C++, every thread of a CTA a fiber (wgmma_fibers.h), CTAs one after
the other.

Bits are not those of a GPU, whose tensor cores add in another order. What this cannot find beside: faults of the compiler, and races that need real
concurrency.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from struct import pack
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.lengths import error as attention_error
from gristmill.kernels.attention.paged_attention.sm90 import _launch
from gristmill.kernels.attention.paged_attention.sm90.spec import (
    COUNTER_BYTES,
    PART_TILES,
    PROMPT_ROWS,
    READING,
    UNITS,
)
from tests.calls import make_call
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
OP = default_registry().op("paged_attention")
NAMES = [parameter.name for parameter in OP.parameters]
OPTIONS = {
    "paged_on_cpu": ("ctas", "part_tiles", "reading", "prompt_rows", "units", "counters_at", "parts_at"),
    "decode_on_cpu": ("ctas", "cta_warps", "counters_at", "parts_at"),
}
"""Of the entries."""
PAD = 8
"""Elements between the heads of out."""


def load(folders: pytest.TempPathFactory, name: str) -> ctypes.CDLL:
    flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init", "-fno-gnu-unique"]
    source = ROOT / f"tests/native/{name}_fibers.cpp"
    return compiled_library.load(folders.mktemp(name) / f"{name}.so", source, flags=flags)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return load(tmp_path_factory, "paged_sm90")


@pytest.fixture(scope="module")
def decodes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels for few rows of each sequence."""
    return load(tmp_path_factory, "paged_decode_sm90")


class Entry:
    """In the place of the library's entry."""

    pack = _launch.ENTRY.pack

    def __init__(self, library: ctypes.CDLL, name: str, order: int) -> None:
        self.library, self.name, self.order = library, name, order

    def cuda(self, config: dict[str, int], call: Any, device: int) -> None:
        self.library.set_order(self.order)
        names = OPTIONS[self.name]
        options = pack(f"{len(names)}q", *(int(config[name]) for name in names))
        # -200: threads wait for each other in vain; -300: written past the shared memory.
        assert self.library[self.name](type(self).pack(call), options, 0, None) == 0
        assert not call.workspace[:COUNTER_BYTES].any(), "counters are left"


class Case:
    """Arguments of a problem, of which a test may change some. Contexts lie between NaN."""

    def __init__(self, text: str, **changed: Any) -> None:
        self.problem = OP.problem(text)
        self.given = dict(zip(NAMES, OP.inputs(self.problem, 1, "cpu"), strict=True)) | changed

    def outputs(self, out: Tensor, lse: Tensor | None) -> list[Tensor]:
        known = int(self.given["query_start"][-1])
        return [out[:known]] if lse is None else [out[:known], lse[:known]]

    def expected(self) -> list[Tensor]:
        lse = None if self.given["lse"] is None else torch.empty_like(self.given["lse"])
        return self.outputs(OP.reference(*(self.given | {"lse": lse}).values()), lse)

    def computed(
        self,
        library: ctypes.CDLL,
        ctas: int = 3,
        order: int = 0,
        parts: int = 0,
        rows: int = PROMPT_ROWS,
        decode: bool = False,
        warps: int = 4,
    ) -> list[Tensor]:
        """parts: tiles of keys of a part of a context, 0 for whole ones. rows: of a tile of prompts. decode: by the kernel for few rows."""
        q = self.given["q"]
        tokens, heads, dim = q.shape
        room = torch.full((tokens + 2, heads, dim + PAD), float("nan")).to(q.dtype)
        out = room[1:-1, :, :dim]
        config = {
            "ctas": ctas,
            "part_tiles": parts,
            "reading": READING,
            "prompt_rows": rows,
            "cta_warps": warps,
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_launch, "ENTRY", Entry(library, "paged_on_cpu", order))
            patch.setattr(_launch, "DECODE", Entry(library, "decode_on_cpu", order))
            _launch.launch(config, make_call("paged_attention", *self.given.values(), out), decode)
        assert bool(room[0].isnan().all() and room[-1].isnan().all() and room[..., dim:].isnan().all())
        return self.outputs(out, self.given["lse"])

    def error(self, outputs: list[Tensor]) -> float:
        """Relative to the tolerance."""
        arguments = list(self.given.values())
        return (
            attention_error(self.problem, arguments, outputs, self.expected())
            / OP.tolerance(self.problem).limit
        )


CAPPED = (
    "q_tokens=262,seqs=3,max_q=200,max_ctx=421,total_ctx=700,heads=4,kv_heads=2,head_dim=64,softcap=true,lse=true",
    "q_tokens=400,seqs=1,max_q=400,max_ctx=700,total_ctx=700,heads=2,kv_heads=2,head_dim=64,softcap=true,lse=true",
    "q_tokens=90,seqs=4,max_q=80,max_ctx=300,total_ctx=600,heads=6,kv_heads=2,head_dim=64,block_size=7,window=33,softcap=true,sinks=true,lse=true",
    "q_tokens=90,seqs=5,max_q=80,max_ctx=600,total_ctx=1200,heads=4,kv_heads=1,head_dim=56,block_size=24,window=150,softcap=true,sinks=true",
    "q_tokens=80,seqs=2,max_q=75,max_ctx=400,total_ctx=520,heads=3,kv_heads=1,head_dim=256,block_size=8,softcap=true,lse=true",
    "q_tokens=9,seqs=6,max_q=3,max_ctx=900,total_ctx=1300,heads=8,kv_heads=2,head_dim=64,softcap=true,sinks=true,lse=true",
)
PLAIN = (
    "q_tokens=130,seqs=3,max_q=100,max_ctx=421,total_ctx=700,heads=4,kv_heads=2,head_dim=64,window=200,sinks=true,lse=true",
    "q_tokens=140,seqs=1,max_q=140,max_ctx=350,total_ctx=350,heads=2,kv_heads=1,head_dim=256,lse=true",
    "q_tokens=90,seqs=4,max_q=80,max_ctx=300,total_ctx=600,heads=2,kv_heads=1,head_dim=200,block_size=8,window=130,sinks=true",
    "q_tokens=130,seqs=40,max_q=80,max_ctx=300,total_ctx=900,heads=2,kv_heads=1,head_dim=64,block_size=32,lse=true",
    "q_tokens=150,seqs=1,max_q=150,max_ctx=420,total_ctx=420,heads=6,kv_heads=2,head_dim=64,window=90,sinks=true,lse=true",
    "q_tokens=7,seqs=1,max_q=7,max_ctx=900,total_ctx=900,heads=8,kv_heads=2,head_dim=64,lse=true",
)


@pytest.mark.parametrize("cap", [0.05, 30.0, 50.0])
def test_caps_far_from_the_scores_and_near_them(library: ctypes.CDLL, cap: float) -> None:
    """Within the limit of capped scores in bf16: a large cap leaves a row's largest weight anywhere between two powers of two."""
    for text in (CAPPED[0], CAPPED[4]):
        case = Case(text, softcap=cap)
        assert OP.tolerance(case.problem).limit == 1.6e-2
        assert case.error(case.computed(library, rows=128)) < 1, text


@pytest.mark.parametrize("text", (*CAPPED, *PLAIN))
def test_prompts_and_decodes(library: ctypes.CDLL, text: str) -> None:
    """In tiles of 128 rows; contexts of few rows are cut in every other case, and shared by both warpgroups."""
    number = (*CAPPED, *PLAIN).index(text)
    case = Case(text)
    for order in (number % 4, 3 - number % 4):
        found = case.error(case.computed(library, order=order, parts=order % 2 * 2, rows=128))
        assert found < 1, (order, found)


def test_prompts_in_tiles_of_192_rows(library: ctypes.CDLL) -> None:
    """Three warpgroups; of several sequences and of one."""
    for order, text in enumerate(
        (
            "q_tokens=260,seqs=3,max_q=100,max_ctx=300,total_ctx=600,heads=4,kv_heads=1,head_dim=64,window=70,sinks=true,lse=true",
            "q_tokens=200,seqs=1,max_q=200,max_ctx=330,total_ctx=330,heads=2,kv_heads=1,head_dim=64,lse=true",
        )
    ):
        case = Case(text)
        assert case.error(case.computed(library, order=order * 3, rows=PROMPT_ROWS)) < 1, text


@pytest.mark.parametrize("order", [1, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", [CAPPED[0], CAPPED[4]])
def test_scores_far_above_and_below_the_cap(library: ctypes.CDLL, text: str, order: int) -> None:
    """Rows of which all keys have the least weight, and some the largest; logits of sinks that outweigh both."""
    for cap in (0.5, 64.0):
        case = Case(text, scale=100.0, softcap=cap)
        q = case.given["q"]
        q[::3] = 0
        k = case.given["k_cache"]
        k[..., 0] = torch.where(k[..., 0].isnan(), k[..., 0], 16.0)
        q[1::3, :, 0] = -1000.0  # every score of these rows is -cap
        q[1::6, 0, 0] = 1000.0
        case.given["sinks"] = torch.tensor([-80.0, 80.0, -1e30, 3.0])[: q.shape[1]]
        outputs = case.computed(library, order=order, rows=128)
        for computed, expected in zip(outputs, case.expected(), strict=True):
            assert torch.allclose(computed.float(), expected.float(), rtol=2**-6, atol=2**-8), cap


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 3, 6])
def test_results_are_stored_as_boxes(library: ctypes.CDLL, group: int) -> None:
    """Of 16 rows: the heads of whole tokens, or some heads of one. Fewer rows, and those of groups that make no boxes, are stored in pieces."""
    for order, queries in ((0, 131), (3, 128)):
        case = Case(
            f"q_tokens={queries},seqs=1,max_q={queries},max_ctx=200,total_ctx=200,heads={group},kv_heads=1,head_dim=64,lse=true"
        )
        before = library.boxes_stored()
        assert case.error(case.computed(library, order=order, rows=128)) < 1
        of_tile = 128 // group  # queries, but for the last tile
        tiles = [min(of_tile, queries - start) * group for start in range(0, queries, of_tile)]
        boxes = 16 % group == 0 or group % 16 == 0
        assert library.boxes_stored() - before == boxes * sum(rows // 16 for rows in tiles)


def test_parts_of_long_contexts(library: ctypes.CDLL) -> None:
    """By several CTAs, the last of which reduces them, and by one where the workspace has no room; also next to a prompt."""
    text = "q_tokens=80,seqs=3,max_q=70,max_ctx=1500,total_ctx=2700,heads=4,kv_heads=2,head_dim=64,softcap=true,sinks=true,lse=true"
    case = Case(text)
    for order, units in enumerate((UNITS, 7, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(_launch.PLACES, "units", units)
            assert case.error(case.computed(library, order=order, parts=PART_TILES // 8, rows=128)) < 1, units


def test_a_query_that_is_no_number_shows_in_its_rows_alone(library: ctypes.CDLL) -> None:
    for text in (CAPPED[2], PLAIN[0]):
        case = Case(text)
        before = case.computed(library, rows=128)
        case.given["lse"] = torch.empty_like(case.given["lse"])
        case.given["q"][2, 1] = float("nan")
        for computed, without in zip(case.computed(library, rows=128), before, strict=True):
            assert bool(computed[2, 1].isnan().all())
            computed[2, 1] = without[2, 1]
            assert torch.equal(computed, without)


def test_rows_do_not_depend_on_the_batch(library: ctypes.CDLL) -> None:
    """Bit for bit, with contexts whole: the last queries of a prompt alone, beside other sequences before."""
    case = Case(CAPPED[0])
    whole = case.computed(library, rows=128)
    start, lengths = case.given["query_start"].tolist(), case.given["seq_lens"]
    for seq in range(3):
        queries = start[seq + 1] - start[seq]
        for some in {min(queries, count) for count in (1, 40)} - {0}:
            rows = slice(start[seq + 1] - some, start[seq + 1])
            alone = Case(
                CAPPED[0],
                q=case.given["q"][rows],
                lse=torch.empty_like(case.given["lse"][rows]),
                block_table=case.given["block_table"][seq : seq + 1],
                query_start=torch.tensor([0, some], dtype=torch.int32),
                seq_lens=lengths[seq : seq + 1],
            )
            for computed, expected in zip(alone.computed(library, rows=128), whole, strict=True):
                assert torch.equal(computed, expected[rows]), (seq, some)


DECODES = (  # and CTAs
    (
        "q_tokens=5,seqs=6,max_q=1,max_ctx=700,total_ctx=1300,heads=8,kv_heads=2,head_dim=64,sinks=true,lse=true",
        7,
    ),
    (
        "q_tokens=9,seqs=5,max_q=3,max_ctx=300,total_ctx=700,heads=4,kv_heads=1,head_dim=80,block_size=7,window=40",
        3,
    ),
    (
        "q_tokens=3,seqs=3,max_q=1,max_ctx=1200,total_ctx=1300,heads=4,kv_heads=1,head_dim=256,block_size=24,lse=true",
        9,
    ),
    # Contexts that are about equal: pieces of each, of which the last may be empty, and contexts of a piece.
    ("q_tokens=2,seqs=2,max_q=1,max_ctx=1248,total_ctx=2438,heads=4,kv_heads=1,head_dim=64,lse=true", 6),
    ("q_tokens=2,seqs=2,max_q=1,max_ctx=1000,total_ctx=2000,heads=8,kv_heads=1,head_dim=256,sinks=true", 12),
    ("q_tokens=21,seqs=7,max_q=3,max_ctx=300,total_ctx=2060,heads=8,kv_heads=2,head_dim=80,sinks=true", 4),
)


@pytest.mark.parametrize(("text", "ctas"), DECODES)
def test_decodes(decodes: ctypes.CDLL, text: str, ctas: int) -> None:
    """Of few rows, in pieces of equal length and in whole ones."""
    case = Case(text)
    for order in range(2):
        found = case.error(case.computed(decodes, ctas, order=order, decode=True))
        assert found < 1, (order, found)


@pytest.mark.parametrize("new", [1, 3])
def test_ctas_of_twice_as_many_warps(decodes: ctypes.CDLL, new: int) -> None:
    """Right for contexts of equal and of different lengths, in as many CTAs as pairs of a context and a KV head, in fewer, and in more. The warps
    of a CTA are added in another order than CTAs are, so results are not those of two CTAs of half as many."""
    shape = "seqs=6,max_ctx=1200,heads=8,kv_heads=2,head_dim=64,sinks=true,lse=true"
    for total, ctas in ((7200, 12), (3000, 12), (7200, 5), (7000, 40)):
        case = Case(f"q_tokens={6 * new},max_q={new},total_ctx={total},{shape}")
        four, eight = (case.computed(decodes, ctas, decode=True, warps=warps) for warps in (4, 8))
        assert case.error(eight) < 1, (total, ctas)
        assert not all(torch.equal(a, b) for a, b in zip(four, eight, strict=True)), (total, ctas)


@pytest.mark.parametrize(
    ("seqs", "ctas", "wide"), [(6, 12, True), (6, 13, False), (7, 12, False), (1, 12, True), (2, 12, False)]
)
def test_which_ctas_a_call_gets(decodes: ctypes.CDLL, seqs: int, ctas: int, wide: bool) -> None:
    """With two KV heads: of eight warps for one context, and for as many pairs of a context and a head as CTAs, or nearly."""
    shape = f"q_tokens={seqs},seqs={seqs},max_q=1,max_ctx=1200,total_ctx={1200 * seqs},heads=8,kv_heads=2"
    case = Case(f"{shape},head_dim=64,lse=true")
    own, four, eight = (case.computed(decodes, ctas, decode=True, warps=warps) for warps in (0, 4, 8))
    same, other = (eight, four) if wide else (four, eight)
    assert all(torch.equal(a, b) for a, b in zip(own, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def test_heads_without_such_ctas_have_four_warps(decodes: ctypes.CDLL) -> None:
    case = Case("q_tokens=3,seqs=3,max_q=1,max_ctx=300,total_ctx=700,heads=8,kv_heads=2,head_dim=256")
    four, eight = (case.computed(decodes, 6, decode=True, warps=warps) for warps in (4, 8))
    assert all(torch.equal(a, b) for a, b in zip(four, eight, strict=True))
