"""Latent attention for sm_80 and newer without a GPU: accepted problems, workspaces, what the library and the launcher refuse, the machine code."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.mla_attention import triton
from gristmill.kernels.attention.mla_attention.sm80 import _launch, spec
from gristmill.kernels.native import manifest
from tests.calls import make_call
from tests.kernels.machine_code import assembled, entries, loops, needs_assembler
from tests.kernels.test_linear_sm80 import needs_library

OP = default_registry().op("mla_attention")
CUT, WHOLE = spec.KERNELS
SOURCE = "_mla_attention_rare_sm80"
BASE = "q_tokens=64,seqs=4,max_q=32,max_ctx=64,total_ctx=200"
GM_E_SHAPE, GM_E_ARG = -2, -5
KIB = 1 << 10
needs_source = pytest.mark.skipif(
    SOURCE in manifest().get("left_out", ()), reason="rare: GRISTMILL_RARE=on builds it"
)


@pytest.mark.parametrize("kernel", spec.KERNELS, ids=lambda kernel: kernel.name)
def test_what_is_refused(kernel: Kernel) -> None:
    for axes, reason in (
        ("heads=16,x=fp32", "fp16 or bf16"),
        ("heads=16,latent_dim=256", "not 256 and 64"),
        ("heads=16,rope_dim=32", "not 512 and 32"),
    ):
        refusal = kernel.accepts(OP.problem(f"{BASE},{axes}"))
        assert refusal is not None and reason in refusal
    for heads in (1, 8, 16, 20, 128):
        for block_size in (1, 7, 24, 256):
            assert kernel.accepts(OP.problem(f"{BASE},heads={heads},block_size={block_size},x=fp16")) is None


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_every_gpu_from_sm_80_on(name: str) -> None:
    target, problem = Target.parse(name), OP.problem(f"{BASE},heads=16")
    for kernel in spec.KERNELS:
        assert not kernel.requires.check_hardware(target)
        config = kernel.config(problem, target)
        assert config["resident"] == (1 if name in ("sm_86", "sm_89", "sm_120") else 2)
        assert config["whole"] == (kernel is WHOLE)


def test_workspaces_and_tuning() -> None:
    """Two parts for each CTA if contexts are cut, whether these are 2 x 16 rows or 32; nothing if not."""
    problem, target = OP.problem(f"{BASE},heads=128"), Target.parse("sm_80")
    config = CUT.config(problem, target)
    assert CUT.workspace(problem, config).bytes == spec.parts_at(108) + 2 * 108 * 32 * 514 * 4
    assert spec.parts_at(108) == 3456 and spec.parts_at(7) == 256
    assert WHOLE.workspace(problem, WHOLE.config(problem, target)).bytes == 0
    tried = list(CUT.space(problem, target))  # type: ignore[misc]
    assert tried[0] == config and len({one["least"] for one in tried}) == len(tried) > 1


def test_ranks() -> None:
    """Before Triton's kernels of the same kind."""
    whole, cut = (kernel.priority for kernel in triton.KERNELS)
    assert CUT.priority > cut and WHOLE.priority > whole
    assert WHOLE.batch_invariant and not CUT.batch_invariant


def test_the_launcher_makes_scales_positive_and_checks_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[float, float]] = []
    monkeypatch.setattr(
        _launch.ENTRY, "cuda", lambda config, call, device: ran.append((call.scale, float(call.q.sum())))
    )
    config = {"ctas": 3, "resident": 1, "least": 2, "whole": 0}
    q, cache = torch.ones(2, 4, 576, dtype=torch.bfloat16), torch.zeros(2, 8, 576, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    table, total = torch.zeros(1, 1, dtype=torch.int32), 2 * 4 * 576
    out = torch.empty(2, 4, 512, dtype=torch.bfloat16)
    for scale in (0.5, -0.5, 0.0):
        call = make_call("mla_attention", q, cache, table, *lengths, 2, 5, scale, out=out)
        _launch.launch(config, call)
    assert ran == [(0.5, total), (0.5, -total), (1.0, 0.0)]
    with pytest.raises(ValueError, match="workspace"):
        _launch.launch(config, call.replace(workspace=torch.empty(64, dtype=torch.uint8)))
    _launch.launch({**config, "whole": 1}, call)  # needs none


def ask(heads: int, max_q: int = 1, x: torch.dtype = torch.bfloat16, **o: int) -> int:
    """The library's answer to a call that launches nothing: bytes of shared memory, or an error code."""
    q, cache = torch.zeros(4, heads, 576, dtype=x), torch.zeros(4, 16, 576, dtype=x)
    lengths = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([5, 7], dtype=torch.int32)
    out = torch.zeros(4, heads, 512, dtype=x)
    given = (q, cache, torch.zeros(2, 1, dtype=torch.int32), *lengths, max_q, 7, 1.0)
    options = {"ctas": 108, "resident": 2, "least": 2, "whole": 0} | o
    return _launch.ENTRY.ask(options, make_call("mla_attention", *given, out=out))


@needs_library
@needs_source
def test_what_fits_into_a_multiprocessor() -> None:
    """sm_86 has 99 KiB for a CTA, sm_80 164 KiB for all, of which each takes 1 beside its own: two with 16 rows."""
    for x in (torch.float16, torch.bfloat16):
        few, many = ask(16, x=x), ask(17, x=x)
        assert 0 < few < many <= 99 * KIB and 2 * (few + KIB) <= 164 * KIB
        assert ask(8, 2, x=x) == few and ask(9, 2, x=x) == many


@needs_library
@needs_source
def test_the_library_refuses_what_it_cannot_run() -> None:
    assert ask(16, ctas=0) == ask(16, resident=3) == ask(16, least=0) == GM_E_ARG
    assert ask(16, max_q=0) == GM_E_SHAPE
    assert ask(16, x=torch.float32) == -1


@needs_assembler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_machine_code(arch: str) -> None:
    """Nothing spills, and two CTAs of 16 rows share the registers of a multiprocessor."""
    used, code = assembled(SOURCE, arch, entries(SOURCE))
    assert len(used) == len(code) == 8
    for kernel, (registers, stack) in used.items():
        assert stack == 0, f"{kernel}: {stack} bytes of stack"
        if "merge" in kernel:
            continue
        assert registers * 256 * (2 if kernel.endswith("x1") else 1) <= 65536, f"{kernel}: {registers}"
        for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS.E.BYPASS"):
            assert instruction in code[kernel], (kernel, instruction)
        few = kernel.endswith("x1")
        steps = [
            body for body in loops(code[kernel]) if sum("HMMA" in one for one in body) == (34 if few else 68)
        ]
        assert len(min(steps, key=len)) <= (330 if few else 470), "instructions of a step"
