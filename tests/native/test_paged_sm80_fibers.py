"""The schedules of paged attention for sm_80 executed on the CPU: their source as C++, every thread of a CTA a fiber (sm80_fibers.h).

What this cannot find: faults of the compiler, and races that need real concurrency.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.attention.lengths import error as attention_error
from gristmill.kernels.attention.paged_attention.sm80.more import PADDED, part_rows
from tests import forked
from tests.native import compiled_library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
OP = default_registry().op("paged_attention")
NONE, NO_BARRIERS, _, _, EARLY_READS = range(5)
MAP_NORESERVE = 0x4000
"""Of Linux, which Python's mmap does not name everywhere: address space that may exceed the memory."""
TENSORS = (
    "q",
    "k",
    "v",
    "table",
    "query_start",
    "seq_lens",
    "out",
    "lse",
    "sinks",
    "k_scale",
    "v_scale",
    "counters",
    "parts",
)
SIZES = (
    "seqs",
    "heads",
    "kv_heads",
    "head_dim",
    "page",
    "table_row",
    "window",
    "max_ctx",
    "codes",
    "by_token",
    "bf16",
    "rows",
    "ctas",
    "tokens",
    "keys",
)


class Call(ctypes.Structure):
    """PagedCall of paged_sm80_fibers.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in TENSORS),
        *((name, ctypes.c_int64) for name in ("k_block", "v_block")),
        *((name, ctypes.c_int) for name in SIZES),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int) for name in ("order", "fault")),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("paged_sm80") / "paged_sm80.so"
    flags = ["-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-extern-tls-init"]
    return compiled_library.load(out, ROOT / "tests/native/paged_sm80_fibers.cpp", flags=flags)


def spread(cache: Tensor, by: int) -> Tensor:
    """The same pages with `by` bytes from one to the next. Only what is written takes memory."""
    pages, rows = cache.shape[0], cache[0].numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, pages * by + rows * cache.element_size(), flags=flags)
    room = torch.frombuffer(memory, dtype=cache.dtype)
    apart = room.as_strided(cache.shape, (by // cache.element_size(), *cache.stride()[1:]))
    for to, page in zip(apart, cache, strict=True):
        to.copy_(page)
    return apart


def run(
    library: ctypes.CDLL,
    entry: str,
    text: str,
    ctas: int,
    order: int = 0,
    fault: int = NONE,
    keys: int = 32,
    apart: tuple[int, int] | None = None,
    lost: tuple[int, int] | None = None,
) -> bool | None:
    """Whether a problem's outputs are the reference's within the operation's tolerance; None if threads wait for each other in vain.

    Args:
        keys: of a step, of heads of 128 elements.
        apart: bytes from a page of keys to the next one, and of values, where they do not follow each other.
        lost: token and head of a query that is no number.
    """
    problem = OP.problem(text)
    given = OP.inputs(problem, 1, "cpu")
    if lost is not None:
        given[0][lost] = float("nan")
    (
        q,
        k,
        v,
        table,
        query_start,
        seq_lens,
        max_q,
        max_ctx,
        scale,
        window,
        sinks,
        lse,
        _,
        k_scale,
        v_scale,
        softcap,
    ) = given
    heads, kv_heads, dim = problem.integers("heads", "kv_heads", "head_dim")
    q, codes = q.contiguous(), k_scale is not None
    if apart is not None:
        k, v = (spread(cache, by) for cache, by in zip((k, v), apart, strict=True))
    rows = max_q * (heads // kv_heads)
    tensors: dict[str, Tensor | None] = {
        "q": q, "k": k, "v": v, "table": table, "query_start": query_start, "seq_lens": seq_lens,
        "out": torch.full_like(q, float("nan")), "lse": lse, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
        "counters": torch.zeros(4096, dtype=torch.int32),
        "parts": torch.full((2 * ctas * part_rows(dim) * (PADDED.get(dim, dim) + 2),), float("nan")),
    }  # fmt: skip
    sizes = (
        seq_lens.numel(), heads, kv_heads, dim, k.shape[1], table.stride(0), window, max_ctx, codes,
        codes and k_scale.shape[0] * k_scale.shape[1] > 1, q.dtype is torch.bfloat16, rows, ctas, q.shape[0], keys,
    )  # fmt: skip
    blocks = [cache.stride(0) * cache.element_size() for cache in (k, v)]
    pointers = (None if t is None else t.data_ptr() for t in tensors.values())
    code = getattr(library, entry)(
        ctypes.byref(Call(*pointers, *blocks, *map(int, sizes), scale, softcap, order, fault))
    )
    assert code < 2, "no such instance"
    if code:
        return None
    counters, out = tensors["counters"], tensors["out"]
    assert counters is not None and out is not None
    expected = [*given]
    expected[11] = None if lse is None else torch.empty_like(lse)
    y = OP.reference(*expected)
    known = int(query_start[-1])
    outputs = [out[:known]] if lse is None else [out[:known], lse[:known]]
    references = [y[:known]] if lse is None else [y[:known], expected[11][:known]]
    shows = True
    if lost is not None:
        for computed, wanted in zip(outputs, references, strict=True):
            shows = shows and bool(computed[lost].isnan().all()) and bool(wanted[lost].isnan().all())
            computed[lost] = wanted[lost] = 0
    error = attention_error(problem, given, outputs, references)
    return shows and error <= OP.tolerance(problem).limit and not counters.any()


def some_slow(texts: tuple[str, ...], slow: tuple[int, ...]) -> list[object]:
    """The texts as parameters, those at the places `slow` marked."""
    return [pytest.param(text, marks=pytest.mark.slow if i in slow else ()) for i, text in enumerate(texts)]


DECODES = (
    "q_tokens=3,seqs=3,max_q=1,max_ctx=257,total_ctx=265,heads=24,kv_heads=2,head_dim=64,softcap=true,lse=true",
    "q_tokens=7,seqs=5,max_q=2,max_ctx=70,total_ctx=120,heads=16,kv_heads=2,head_dim=64,block_size=7,window=33,sinks=true,softcap=true",
    "q_tokens=4,seqs=4,max_q=1,max_ctx=61,total_ctx=80,heads=8,kv_heads=1,head_dim=256,sinks=true,lse=true",
    "q_tokens=4,seqs=3,max_q=2,max_ctx=257,total_ctx=300,heads=4,kv_heads=1,head_dim=80,kv=fp8,kv_scale=token,lse=true",
    "q_tokens=3,seqs=3,max_q=1,max_ctx=90,total_ctx=130,heads=6,kv_heads=2,head_dim=80,block_size=7,x=fp16,kv=fp8,kv_scale=head,window=33",
    "q_tokens=3,seqs=3,max_q=1,max_ctx=40,total_ctx=77,heads=8,kv_heads=1,head_dim=256,kv=fp8,kv_scale=token,softcap=true,lse=true",
)


@pytest.mark.parametrize("text", some_slow(DECODES, (0,)))
def test_decode(library: ctypes.CDLL, text: str) -> None:
    order = DECODES.index(text) % 3
    assert run(library, "decode_on_cpu", text, ctas=2 + 5 * (order > 0), order=order)


EQUAL = (  # and CTAs
    ("q_tokens=3,seqs=3,max_q=1,max_ctx=1000,total_ctx=3000,heads=4,kv_heads=1,head_dim=256,lse=true", 12),
    (
        "q_tokens=4,seqs=2,max_q=2,max_ctx=300,total_ctx=600,heads=16,kv_heads=2,head_dim=64,softcap=true,sinks=true",
        4,
    ),
    (
        "q_tokens=3,seqs=3,max_q=1,max_ctx=515,total_ctx=1540,heads=2,kv_heads=1,head_dim=80,kv=fp8,kv_scale=token,lse=true",
        6,
    ),
    ("q_tokens=7,seqs=7,max_q=1,max_ctx=129,total_ctx=903,heads=8,kv_heads=2,head_dim=256,window=128", 8),
    (
        "q_tokens=4,seqs=2,max_q=2,max_ctx=1248,total_ctx=2438,heads=8,kv_heads=1,head_dim=64,softcap=true,lse=true",
        12,
    ),
)
"""Contexts that are about equal: four pieces, one and two for each of them, up to two of them in a piece, and six pieces of which the last is
past the end of each context."""


@pytest.mark.parametrize(("text", "ctas"), EQUAL)
def test_decode_of_equal_contexts(library: ctypes.CDLL, text: str, ctas: int) -> None:
    """None begins within a piece."""
    assert run(library, "decode_on_cpu", text, ctas=ctas, order=ctas % 3)


@pytest.mark.parametrize("x", [torch.float16, torch.bfloat16])
def test_every_code(library: ctypes.CDLL, x: torch.dtype) -> None:
    """Subnormals, zeros with a sign and NaN among them."""
    out = torch.zeros(256, dtype=x)
    library.decode_codes(ctypes.c_void_p(out.data_ptr()), int(x is torch.bfloat16))
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(x)
    assert torch.equal(out.isnan(), codes.isnan())
    assert torch.equal(out.nan_to_num().view(torch.int16), codes.nan_to_num().view(torch.int16))


def is_seen(library: ctypes.CDLL, entry: str, text: str, fault: int, keys: int = 32) -> bool:
    """Whether a result is wrong in some order of threads, or the process ends: a fault may write anywhere, so it is one of its own."""
    program = (
        "import ctypes, sys\n"
        "from tests.native.test_paged_sm80_fibers import run\n"
        f"library = ctypes.CDLL({library._name!r})\n"
        f"right = all(run(library, {entry!r}, {text!r}, 3, order, {fault}, {keys}) for order in range(3))\n"
        "sys.exit(3 if right else 0)\n"
    )
    return forked.run("-c", program, path=[ROOT]).returncode != 3


BATCHES = (
    "q_tokens=257,seqs=1,max_q=257,max_ctx=257,total_ctx=257,heads=2,kv_heads=2,head_dim=64,x=fp16,softcap=true,lse=true",
    "q_tokens=62,seqs=4,max_q=50,max_ctx=257,total_ctx=400,heads=6,kv_heads=2,head_dim=64,x=fp16,block_size=7,window=33,sinks=true,softcap=true",
    "q_tokens=90,seqs=3,max_q=80,max_ctx=140,total_ctx=300,heads=8,kv_heads=2,lse=true",
    "q_tokens=40,seqs=3,max_q=37,max_ctx=65,total_ctx=100,heads=5,kv_heads=1,window=17,sinks=true,lse=true",
    "q_tokens=8,seqs=7,max_q=7,max_ctx=31,total_ctx=60,heads=4,kv_heads=1,head_dim=256,block_size=24,sinks=true,lse=true",
    "q_tokens=33,seqs=3,max_q=31,max_ctx=1100,total_ctx=1300,heads=4,kv_heads=1,head_dim=128,lse=true",
    "q_tokens=9,seqs=2,max_q=8,max_ctx=1500,total_ctx=1510,heads=4,kv_heads=1,head_dim=256,block_size=32,window=1030",
)


@pytest.mark.parametrize("text", some_slow(BATCHES, (0, 2, 6)))
def test_any_batch(library: ctypes.CDLL, text: str) -> None:
    """Chunks of prompts and decodes in one launch. Some of 64 CTAs have parts of the long contexts."""
    assert run(library, "flash_on_cpu", text, ctas=64, order=BATCHES.index(text) % 3)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("decode_on_cpu", DECODES[2]),
        ("decode_on_cpu", DECODES[5]),
        ("flash_on_cpu", BATCHES[3]),
        ("flash_on_cpu", BATCHES[5]),
    ],
)
def test_a_query_that_is_no_number_shows(library: ctypes.CDLL, entry: str, text: str) -> None:
    """In contexts that are cut, too."""
    assert run(library, entry, text, ctas=64 if entry == "flash_on_cpu" else 7, lost=(2, 1))


LONGER_STEPS = (
    "q_tokens=90,seqs=3,max_q=80,max_ctx=140,total_ctx=300,heads=8,kv_heads=2,lse=true",
    "q_tokens=40,seqs=3,max_q=37,max_ctx=65,total_ctx=100,heads=5,kv_heads=1,window=17,sinks=true,lse=true",
    "q_tokens=20,seqs=2,max_q=17,max_ctx=257,total_ctx=258,heads=2,kv_heads=2,block_size=7,window=33,sinks=true",
    "q_tokens=33,seqs=3,max_q=31,max_ctx=1100,total_ctx=1300,heads=4,kv_heads=1,block_size=24,lse=true",
    "q_tokens=24,seqs=5,max_q=18,max_ctx=257,total_ctx=300,heads=4,kv_heads=2,block_size=1,x=fp16,softcap=true,lse=true",
    "q_tokens=19,seqs=2,max_q=18,max_ctx=18,total_ctx=25,heads=1,kv_heads=1,block_size=64,x=fp16,window=5,sinks=true,softcap=true",
    "q_tokens=9,seqs=3,max_q=7,max_ctx=7,total_ctx=9,heads=4,kv_heads=1,block_size=7,lse=true",
    "q_tokens=20,seqs=1,max_q=20,max_ctx=257,total_ctx=257,heads=3,kv_heads=1,block_size=48,lse=true",
)


@pytest.mark.parametrize("text", some_slow(LONGER_STEPS, (0, 3)))
def test_any_batch_by_64_keys(library: ctypes.CDLL, text: str) -> None:
    """As `test_any_batch`, steps of 64 keys."""
    assert run(library, "flash_on_cpu", text, ctas=64, order=LONGER_STEPS.index(text) % 3, keys=64)


@pytest.mark.parametrize("keys", [32, 64])
@pytest.mark.parametrize("apart", [(2**31 + 4096, 2**15), (2**15, 2**31 + 64), (2**30, 2**29)])
def test_pages_may_be_far_apart(library: ctypes.CDLL, keys: int, apart: tuple[int, int]) -> None:
    """Where a key is in the cache may pass 2^31 and 2^32 bytes, and differ from where its values are."""
    text = "q_tokens=20,seqs=2,max_q=18,max_ctx=40,total_ctx=63,heads=2,kv_heads=1,lse=true"
    assert run(library, "flash_on_cpu", text, ctas=64, keys=keys, apart=apart)


@pytest.mark.parametrize(
    "text",
    [
        "q_tokens=9,seqs=2,max_q=8,max_ctx=40,total_ctx=63,heads=4,kv_heads=1,head_dim=256",
        "q_tokens=20,seqs=2,max_q=18,max_ctx=40,total_ctx=63,heads=2,kv_heads=1,head_dim=80",
    ],
)
def test_pages_of_other_head_sizes_may_be_far_apart(library: ctypes.CDLL, text: str) -> None:
    entry = "flash_on_cpu" if "256" in text else "flash_more_on_cpu"
    assert run(library, entry, text, ctas=64, apart=(2**31 + 4096, 2**32))


MORE = (
    "q_tokens=40,seqs=3,max_q=37,max_ctx=65,total_ctx=100,heads=4,kv_heads=2,head_dim=64,x=fp16,kv=fp8,kv_scale=token,window=17,sinks=true,softcap=true,lse=true",
    "q_tokens=20,seqs=3,max_q=18,max_ctx=257,total_ctx=300,heads=5,kv_heads=1,block_size=7,kv=fp8,kv_scale=token,lse=true",
    "q_tokens=33,seqs=4,max_q=31,max_ctx=65,total_ctx=100,heads=2,kv_heads=2,block_size=24,kv=fp8,kv_scale=head,window=33,sinks=true,lse=true",
    "q_tokens=10,seqs=3,max_q=8,max_ctx=40,total_ctx=77,heads=4,kv_heads=1,head_dim=256,kv=fp8,kv_scale=token,lse=true",
    "q_tokens=20,seqs=3,max_q=18,max_ctx=40,total_ctx=77,heads=4,kv_heads=2,head_dim=80,block_size=7,kv=fp8,kv_scale=token",
    "q_tokens=20,seqs=3,max_q=18,max_ctx=65,total_ctx=90,heads=4,kv_heads=2,head_dim=80,block_size=7,window=9,lse=true",
    "q_tokens=20,seqs=3,max_q=18,max_ctx=40,total_ctx=77,heads=8,kv_heads=1,head_dim=96,block_size=24,sinks=true,lse=true",
    "q_tokens=30,seqs=3,max_q=28,max_ctx=65,total_ctx=90,heads=4,kv_heads=2,head_dim=192,x=fp16,window=30,softcap=true,lse=true",
    "q_tokens=4,seqs=2,max_q=3,max_ctx=1100,total_ctx=1200,heads=4,kv_heads=1,kv=fp8,kv_scale=token,lse=true",
    "q_tokens=4,seqs=2,max_q=3,max_ctx=1100,total_ctx=1200,heads=4,kv_heads=1,head_dim=80,lse=true",
)


@pytest.mark.parametrize("text", some_slow(MORE, (8, 9)))
def test_any_batch_over_codes_and_of_other_head_sizes(library: ctypes.CDLL, text: str) -> None:
    """As `test_any_batch`; of sequences with few rows the warps divide the keys, and CTAs the long contexts of the last two."""
    assert run(library, "flash_more_on_cpu", text, ctas=64, order=MORE.index(text) % 3)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NONE, NO_BARRIERS, EARLY_READS])
@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("decode_on_cpu", DECODES[2]),
        ("flash_on_cpu", BATCHES[5]),
        ("flash_more_on_cpu", MORE[1]),
        ("flash_more_on_cpu", MORE[5]),
    ],
)
def test_a_planted_fault_is_seen(library: ctypes.CDLL, entry: str, text: str, fault: int) -> None:
    """Barriers that do nothing, and keys that are read before their copies have landed."""
    assert is_seen(library, entry, text, fault) == (fault != NONE)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [NO_BARRIERS, EARLY_READS])
def test_a_fault_is_seen_in_steps_of_64_keys(library: ctypes.CDLL, fault: int) -> None:
    assert is_seen(library, "flash_on_cpu", LONGER_STEPS[0], fault, keys=64)
