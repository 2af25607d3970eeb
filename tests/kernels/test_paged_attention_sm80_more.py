"""Paged attention for sm_80 and newer over e4m3 caches and of heads of 80, 96 and 192 elements, without a GPU: accepted problems, what runs for a
batch, shared memory, what the library refuses, the machine code."""

from __future__ import annotations

import re

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.paged_attention import triton
from gristmill.kernels.attention.paged_attention.sm80 import _launch_more, more, spec
from gristmill.kernels.native import manifest
from tests.calls import make_call
from tests.kernels.machine_code import assembled, entries, needs_assembler
from tests.kernels.test_linear_sm80 import needs_library

OP = default_registry().op("paged_attention")
KERNEL = default_registry().kernel("paged_attention", "paged_attention_sm80_more_split")
TARGET = Target.parse("sm_86")
GM_E_SHAPE, GM_E_ARG = -2, -5
KIB = 1 << 10
PROMPTS = "q_tokens=300,seqs=3,max_q=200,max_ctx=421,total_ctx=700"
SOURCES = (more.SOURCE, more.CODES_SOURCE)
needs_source = pytest.mark.skipif(
    bool({*SOURCES} & {*manifest().get("left_out", ())}), reason="rare: GRISTMILL_RARE=on builds it"
)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ("heads=8,kv_heads=2,head_dim=96", None),
        ("heads=8,kv_heads=1,head_dim=192,block_size=7,softcap=true", None),
        ("heads=8,kv_heads=1,head_dim=80,x=fp16,kv=fp8,kv_scale=token,softcap=true", None),
        ("heads=8,kv_heads=2,head_dim=256,kv=fp8,kv_scale=head", None),
        ("heads=8,kv_heads=2", "e4m3 caches and for a head_dim of 80, 96, 192, not 128"),
        ("heads=8,kv_heads=2,head_dim=72,kv=fp8,kv_scale=head", "not 72"),
        ("heads=8,kv_heads=2,head_dim=96,x=fp32", "fp16 or bf16"),
        ("heads=34,kv_heads=2,head_dim=96", "17 query heads per KV head are over 16"),
    ],
)
def test_accepts(axes: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(f"{PROMPTS},{axes}"))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


def test_it_comes_before_the_kernel_that_leaves_these_batches_to_triton() -> None:
    assert KERNEL.priority > spec.KERNEL.priority
    problem = OP.problem(f"{PROMPTS},heads=8,kv_heads=2,head_dim=80")
    size = KERNEL.workspace(problem, KERNEL.config(problem, TARGET))
    behind = triton.split_workspace(problem, KERNEL.config(problem, TARGET)).bytes
    assert size.zeroed and size.bytes == spec.decode_bytes(96, spec.PROCESSORS) + behind


@pytest.mark.parametrize(
    ("seqs", "max_q", "heads", "kv_heads", "dim", "codes", "kernel"),
    [
        (1, 1, 16, 2, 128, True, "decode"),
        (1, 2, 16, 2, 128, True, "flash"),  # 16 rows, whose contexts the kernel for any batch divides
        (1, 3, 16, 2, 128, True, "triton"),  # the context may be worth dividing
        (30, 5, 32, 8, 64, True, "flash"),  # enough sequences to fill the device
        (9, 200, 16, 2, 256, True, "flash"),
        (1, 2, 16, 2, 256, True, "triton"),
        (1, 1, 32, 8, 96, False, "decode"),
        (1, 200, 32, 8, 96, False, "flash"),
        (1, 17, 32, 8, 80, False, "flash"),
        (1, 5, 32, 8, 80, False, "triton"),
        (1, 9, 16, 2, 192, False, "flash"),
        (1, 1, 300, 300, 96, False, "flash"),  # more KV heads than CTAs
    ],
)
def test_what_runs_a_batch(
    seqs: int,
    max_q: int,
    heads: int,
    kv_heads: int,
    dim: int,
    codes: bool,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, object]] = []
    monkeypatch.setattr(
        _launch_more, "launch_triton", lambda config, call: ran.append(("triton", call.workspace.numel()))
    )
    for kind, table in (("decode", _launch_more.ENTRIES), ("flash", _launch_more.FLASH)):
        for entry in table.values():
            monkeypatch.setattr(
                entry,
                "cuda",
                lambda config, call, device, kind=kind: ran.append((kind, config["parts_at"])),
            )
    q = torch.zeros(seqs * max_q, heads, dim, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, kv_heads, dim).to(torch.float8_e4m3fn if codes else torch.bfloat16)
    room = torch.zeros(more.room(dim, 216) + 1000, dtype=torch.uint8)
    lengths = torch.arange(seqs + 1).int() * max_q, torch.full((seqs,), max_q).int()
    given = (q, cache, cache, torch.zeros(seqs, 1, dtype=torch.int32), *lengths, max_q, max_q, 1.0)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 1, kv_heads)) if codes else {}
    call = make_call("paged_attention", *given, workspace=room, out=torch.zeros_like(q), **scales)
    _launch_more.launch({"ctas": 216}, call)
    assert ran == [(kernel, 1000 if kernel == "triton" else 896)]
    if kernel != "triton":
        with pytest.raises(ValueError, match="workspace"):
            _launch_more.launch({"ctas": 216}, call.replace(workspace=room[:1000]))


def test_every_source_of_a_problem_must_be_built() -> None:
    for flags, sources in (
        (",head_dim=96", ("_paged_decode_more_rare_sm80", more.SOURCE)),
        (",kv=fp8,kv_scale=head", ("_paged_decode_codes_rare_sm80", more.CODES_SOURCE)),
        (",head_dim=80,kv=fp8,kv_scale=head", ("_paged_decode_codes_rare_sm80", more.CODES_SOURCE)),
    ):
        problem = OP.problem(f"{PROMPTS},heads=8,kv_heads=2{flags}")
        assert KERNEL.sources is not None and KERNEL.sources(problem) == sources


def ask(
    dim: int,
    heads: int = 8,
    kv_heads: int = 2,
    x: torch.dtype = torch.bfloat16,
    codes: bool = False,
    source: str = "",
) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    q, kv = torch.zeros(2, heads, dim, dtype=x), torch.float8_e4m3fn if codes else x
    cache = torch.zeros(4, 16, kv_heads, dim).to(kv)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 1, kv_heads)) if codes else {}
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32)
    given = (q, cache, cache, torch.zeros(2, 1, dtype=torch.int32), *lengths, 1, 7, 1.0)
    call = make_call("paged_attention", *given, **scales, out=torch.zeros_like(q))
    entry = _launch_more.FLASH[source or more.flash_source(dim, codes)]
    return entry.ask({"ctas": 108, "parts_at": 512}, call)


@needs_library
@needs_source
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dim", more.ROWS)
def test_how_many_ctas_fit(dim: int, codes: bool) -> None:
    """sm_86 has 100 KiB of shared memory per multiprocessor, sm_80 164, of which a CTA takes 1 beside its own."""
    if more.flash_source(dim, codes) is None:
        assert ask(dim, source=more.SOURCE) == GM_E_SHAPE
        return
    for x in (torch.float16, torch.bfloat16):
        size = ask(dim, x=x, codes=codes)
        resident = 1 if dim > 128 else 2
        assert 0 < size <= 99 * KIB and resident * (size + KIB) <= 100 * KIB and 2 * (size + KIB) <= 164 * KIB
    assert ask(dim, more.ROWS[dim], 1, codes=codes) > 0
    assert ask(dim, more.ROWS[dim] + 1, 1, codes=codes) == GM_E_SHAPE
    assert ask(dim, x=torch.float32, codes=codes) == -1


@needs_library
@needs_source
def test_caches_of_the_other_kind_are_refused() -> None:
    assert ask(96, codes=True, source=more.SOURCE) == ask(96, source=more.CODES_SOURCE) == GM_E_ARG


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("source", SOURCES)
def test_machine_code(source: str, arch: str) -> None:
    """Nothing spills."""
    used, code = assembled(source, arch, entries(source))
    assert len(used) == len(code) == (20 if source == more.CODES_SOURCE else 8)
    for kernel, (registers, stack) in used.items():
        assert stack == 0, f"{kernel}: {stack} bytes of stack"
        assert registers <= 255 and re.search(r"_d(64|96|128|192|256)(_cap)?$", kernel)
        for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS"):
            assert instruction in code[kernel], (kernel, instruction)
