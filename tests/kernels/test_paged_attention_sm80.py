"""Paged attention for sm_80 and newer without a GPU: accepted problems, what runs for a batch, shared memory, what the library and the launcher
refuse, the machine code."""

from __future__ import annotations

import re

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.paged_attention import triton
from gristmill.kernels.attention.paged_attention.sm80 import _launch, spec
from gristmill.kernels.cuda_ptx_call import PtxCallEntry
from gristmill.kernels.native import manifest
from tests.calls import make_call
from tests.kernels.machine_code import assembled, entries, loops, needs_assembler
from tests.kernels.test_linear_sm80 import needs_library

OP = default_registry().op("paged_attention")
KERNEL = default_registry().kernel("paged_attention", "paged_attention_sm80_split")
TARGET = Target.parse("sm_86")
GM_E_SHAPE, GM_E_ARG = -2, -5
SMALLEST = 99 << 10
"""Shared memory of a CTA at most on sm_86, sm_89 and sm_120."""
DECODE = "q_tokens=5,seqs=5,max_q=1,max_ctx=300,total_ctx=800"
SOURCES = sorted({*spec.SOURCES.values(), spec.CODES_SOURCE, spec.FLASH_SOURCE})
IS_BUILT = not {*SOURCES} & {*manifest().get("left_out", ())}
needs_source = pytest.mark.skipif(not IS_BUILT, reason="rare: GRISTMILL_RARE=on builds it")


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ("heads=8,kv_heads=2", None),
        ("heads=32,kv_heads=2,head_dim=64,x=fp16,sinks=true,window=128,softcap=true,lse=true", None),
        ("heads=8,kv_heads=1,head_dim=256,block_size=7", None),
        ("heads=8,kv_heads=2,x=fp32", "fp16 or bf16"),
        ("heads=8,kv_heads=2,kv=fp8,kv_scale=head", None),
        ("heads=8,kv_heads=1,head_dim=80,x=fp16,kv=fp8,kv_scale=token,softcap=true", None),
        ("heads=9,kv_heads=1,kv=fp8,kv_scale=head", "9 query heads per KV head are over 8"),
        ("heads=8,kv_heads=2,head_dim=72", "a head_dim of 64, 80, 96, 128, 192, 256, not 72"),
        ("heads=34,kv_heads=2", "17 query heads per KV head are over 16"),
        ("heads=9,kv_heads=1,head_dim=192", "9 query heads per KV head are over 8"),
    ],
)
def test_accepts(axes: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(f"{DECODE},{axes}"))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_every_gpu_from_sm_80_on(name: str) -> None:
    target = Target.parse(name)
    assert not KERNEL.requires.check_hardware(target)
    config = KERNEL.config(OP.problem(f"{DECODE},heads=8,kv_heads=2"), target)
    small = name in ("sm_86", "sm_89", "sm_120")
    assert config["ctas"] == spec.PROCESSORS * (1 if small else 2)
    assert config["keys"] == (32 if small else 64)
    for others in ("head_dim=64", "head_dim=256", "kv=fp8,kv_scale=head"):
        assert "keys" not in KERNEL.config(OP.problem(f"{DECODE},heads=8,kv_heads=2,{others}"), target)


@pytest.mark.parametrize(("max_q", "tiles"), [(1, False), (3, True), (100, False)])
def test_tuning_tries_numbers_of_ctas_and_tiles_of_triton_where_it_runs(max_q: int, tiles: bool) -> None:
    shape = "seqs=5,max_ctx=300,total_ctx=800,heads=16,kv_heads=2"
    problem = OP.problem(f"q_tokens={5 * max_q},max_q={max_q},{shape}")
    tried = list(KERNEL.space(problem, TARGET))  # type: ignore[misc]
    assert tried[0] == KERNEL.config(problem, TARGET)
    assert {one["ctas"] for one in tried} == {spec.PROCESSORS, 2 * spec.PROCESSORS}
    assert len(tried) == 2 + tiles * len(list(triton.split_space(problem, TARGET)))
    for config in tried:
        size = KERNEL.workspace(problem, config)
        behind = triton.split_workspace(problem, config).bytes
        assert size.zeroed and size.bytes == spec.decode_bytes(128, int(config["ctas"])) + behind


@pytest.mark.parametrize(
    ("seqs", "max_q", "heads", "kv_heads", "dim", "codes", "kernel"),
    [
        (1, 1, 32, 8, 128, False, "decode"),
        (1, 4, 32, 8, 128, False, "decode"),
        (1, 5, 32, 8, 128, False, "triton"),  # the context may be worth dividing
        (30, 5, 32, 8, 128, False, "flash"),  # enough sequences to fill the device
        (1, 17, 32, 8, 128, False, "flash"),
        (1, 200, 32, 8, 96, False, "triton"),
        (1, 1, 16, 2, 256, False, "decode"),
        (1, 2, 16, 2, 256, False, "triton"),
        (1, 9, 16, 2, 256, False, "flash"),
        (1, 1, 300, 300, 64, False, "flash"),  # more KV heads than CTAs
        (1, 1, 16, 2, 128, True, "decode"),
        (1, 2, 16, 2, 128, True, "triton"),
        (9, 200, 16, 2, 128, True, "triton"),
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
        _launch, "launch_triton", lambda config, call: ran.append(("triton", call.workspace.numel()))
    )
    for name, entry in (*_launch.ENTRIES.items(), ("flash", _launch.FLASH)):
        ran_as = name if name == "flash" else "decode"
        monkeypatch.setattr(
            entry,
            "cuda",
            lambda config, call, device, ran_as=ran_as: ran.append((ran_as, config["parts_at"])),
        )
    q = torch.zeros(seqs * max_q, heads, dim, dtype=torch.bfloat16)
    cache = torch.zeros(4, 16, kv_heads, dim).to(torch.float8_e4m3fn if codes else torch.bfloat16)
    room = torch.zeros(spec.decode_bytes(dim, 216) + 1000, dtype=torch.uint8)
    lengths = torch.arange(seqs + 1).int() * max_q, torch.full((seqs,), max_q).int()
    given = (q, cache, cache, torch.zeros(seqs, 1, dtype=torch.int32), *lengths, max_q, max_q, 1.0)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 1, kv_heads)) if codes else {}
    call = make_call("paged_attention", *given, workspace=room, out=torch.zeros_like(q), **scales)
    _launch.launch({"ctas": 216}, call)
    assert ran == [(kernel, 1000 if kernel == "triton" else 896)]
    if kernel != "triton":
        with pytest.raises(ValueError, match="workspace"):
            _launch.launch({"ctas": 216}, call.replace(workspace=room[:1000]))


def test_tuning_tries_both_lengths_of_steps_where_two_ctas_fit() -> None:
    problem = OP.problem(f"{DECODE},heads=8,kv_heads=2")
    for name, tried in (("sm_80", {32, 64}), ("sm_90", {32, 64}), ("sm_100", {32, 64}), ("sm_89", {32})):
        assert {one["keys"] for one in KERNEL.space(problem, Target.parse(name))} == tried  # type: ignore[misc]


@pytest.mark.parametrize(("config", "keys"), [({}, 32), ({"keys": 64}, 64)])
def test_the_keys_of_a_step_reach_the_kernel(
    config: dict[str, int], keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Configurations from before there was a choice mean 32."""
    ran: list[object] = []
    monkeypatch.setattr(_launch.FLASH, "cuda", lambda config, call, device: ran.append(config["keys"]))
    q, cache = torch.zeros(100, 8, 128).half(), torch.zeros(7, 16, 2, 128).half()
    table, lengths = torch.zeros(1, 7).int(), (torch.tensor([0, 100]).int(), torch.tensor([100]).int())
    call = make_call("paged_attention", q, cache, cache, table, *lengths, 100, 100, 1.0, out=q.clone())
    _launch.launch({"ctas": 216, **config}, call)
    assert ran == [keys]


def test_every_source_of_a_problem_must_be_built() -> None:
    """A build without one of them cannot run some of the batches."""
    for flags, sources in (
        ("", ("_paged_decode_rare_sm80", "_paged_flash_rare_sm80")),
        (",head_dim=96", ("_paged_decode_more_rare_sm80",)),
        (",kv=fp8,kv_scale=head", ("_paged_decode_codes_rare_sm80",)),
    ):
        problem = OP.problem(f"{DECODE},heads=8,kv_heads=2{flags}")
        assert KERNEL.sources is not None and KERNEL.sources(problem) == sources


def ask(
    dim: int,
    heads: int = 8,
    kv_heads: int = 2,
    max_q: int = 1,
    x: torch.dtype = torch.bfloat16,
    codes: bool = False,
    entry: PtxCallEntry | None = None,
    **o: int,
) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    kv = torch.float8_e4m3fn if codes else x
    q, cache = torch.zeros(2, heads, dim, dtype=x), torch.zeros(4, 16, kv_heads, dim).to(kv)
    scales = dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 1, kv_heads)) if codes else {}
    lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32)
    given = (q, cache, cache, torch.zeros(2, 1, dtype=torch.int32), *lengths, max_q, 7, 1.0)
    call = make_call("paged_attention", *given, **scales, out=torch.zeros_like(q))
    options = {"ctas": 108, "parts_at": 512, "keys": 32} | o
    return (entry or _launch.ENTRIES[spec.source(dim, codes)]).ask(options, call)


@needs_library
@needs_source
@pytest.mark.parametrize("dim", spec.SOURCES)
def test_every_instance_fits_the_smallest_multiprocessor(dim: int) -> None:
    for x in (torch.float16, torch.bfloat16):
        for heads in (2, 2 * spec.most_rows(dim)):
            size = ask(dim, heads, x=x)
            assert 0 < size <= SMALLEST and 2 * (size + 1024) <= 164 << 10
        size = ask(dim, 16, x=x, codes=True)
        assert 0 < size <= SMALLEST and 2 * (size + 1024) <= 164 << 10
    assert ask(dim, 18, codes=True) in (GM_E_SHAPE, GM_E_ARG)
    assert ask(dim, 2 * spec.most_rows(dim) + 2) in (GM_E_SHAPE, GM_E_ARG)


@needs_library
@needs_source
def test_the_library_refuses_what_it_cannot_run() -> None:
    assert ask(128) > 0
    assert ask(128, max_q=0) == GM_E_SHAPE
    assert ask(128, max_q=17) == GM_E_ARG
    assert ask(128, ctas=1) == GM_E_ARG, "fewer CTAs than KV heads"
    assert ask(128, x=torch.float32) == -1


@needs_library
@needs_source
@pytest.mark.parametrize(("dim", "resident"), [(64, 2), (128, 2), (256, 1)])
def test_how_many_ctas_of_any_batch_fit(dim: int, resident: int) -> None:
    """sm_86 has 100 KiB of shared memory per multiprocessor, sm_80 164, of which a CTA takes 1 beside its own."""
    for x in (torch.float16, torch.bfloat16):
        size = ask(dim, x=x, entry=_launch.FLASH, max_q=300)
        assert (
            0 < size <= SMALLEST and resident * (size + 1024) <= 100 << 10 and 2 * (size + 1024) <= 164 << 10
        )
        longer = ask(dim, x=x, entry=_launch.FLASH, max_q=300, keys=64)
        assert longer == size + 17 * 1024 * (dim == spec.STEPS_HEAD) and 2 * (longer + 1024) <= 164 << 10
    assert ask(dim, entry=_launch.FLASH, keys=48) == GM_E_ARG
    rows = spec.FLASH_ROWS[dim]
    assert ask(dim, rows, 1, entry=_launch.FLASH) > 0
    assert ask(dim, rows + 1, 1, entry=_launch.FLASH) == GM_E_SHAPE
    assert ask(dim, codes=True, entry=_launch.FLASH) == GM_E_ARG


STACK_ON_RECORD = {
    **dict.fromkeys(("d80_rows16_cap", "d96_rows16", "d96_rows16_cap", "d128_rows16"), 8),
    "d128_rows16_cap": 16,
    **dict.fromkeys(("d192", "d192_cap"), 24),
    **dict.fromkeys(("codes_d192", "codes_d192_cap"), 8),
    **dict.fromkeys(("codes_d256", "codes_d256_cap"), 40),
}
"""Bytes of stack allowed, by the end of a kernel's name: those of floats are what the schedule has on Hopper too."""
STACK_ON_HOPPER = {
    "d128_rows16_cap": 24,
    **dict.fromkeys(("codes_d192", "codes_d192_cap"), 24),
    **dict.fromkeys(("codes_d256", "codes_d256_cap"), 56),
}
"""With the same PTX and all 255 registers, ptxas 13.0 and 13.4 spill more for sm_90 than for sm_80 and sm_86."""


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("source", SOURCES)
def test_machine_code(source: str, arch: str) -> None:
    used, code = assembled(source, arch, entries(source))
    codes, flash = source == spec.CODES_SOURCE, source == spec.FLASH_SOURCE
    assert len(used) == len(code) == 2 * (8 if flash or source == spec.SOURCES[128] else 6 if codes else 12)
    for kernel, (registers, stack) in used.items():
        dim = int(re.search(r"_d(\d+)", kernel)[1])  # type: ignore[index]
        threads = 64 if dim > 128 and not flash else 128
        record = STACK_ON_RECORD | (STACK_ON_HOPPER if arch == "sm_90" else {})
        allowed = record.get(kernel.split("_", 2 if codes else 3)[-1], 0)
        assert stack <= allowed, f"{kernel}: {stack} bytes of stack"
        assert registers * threads * 2 <= 65536, f"{kernel}: {registers} registers"
        for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDGSTS.E.BYPASS"):
            assert instruction in code[kernel], (kernel, instruction)


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize(
    ("kernel", "products", "most"),
    [("paged_flash_bf16_d128", 128, 933), ("paged_flash_bf16_d128_keys64", 256, 1414)],
)
def test_instructions_of_a_step(kernel: str, products: int, most: int, arch: str) -> None:
    """What a prompt's steps cost beside the products: as many instructions as were counted when it was last made faster."""
    _, code = assembled(spec.FLASH_SOURCE, arch, [kernel])
    found = [body for body in loops(code[kernel]) if sum("HMMA" in one for one in body) == products]
    step = min(found, key=len)
    assert len(step) <= most
    assert not any(one.startswith(("LDL", "STL")) for one in step), "spills"
