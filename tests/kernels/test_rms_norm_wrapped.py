"""The wrapped norms of FlashInfer and AITER: their requirements, and the calls that the wrappers make to
their hosts."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.target import Target
from gristmill.kernels.norm import rms_norm, rms_norm_aiter, rms_norm_flashinfer, rms_norm_triton
from tests.calls import make_call
from tests.kernels.running import padded_rows


def _checked(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert x.dim() == 2 and x.stride(1) == 1 and weight.shape == (x.shape[1],) and weight.is_contiguous()
    assert x.dtype == weight.dtype and x.dtype in (torch.float16, torch.bfloat16)


def flashinfer_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    **_pdl: bool | None,
) -> torch.Tensor:
    """Has the signature of flashinfer.norm.rmsnorm and refuses what its kernel refuses."""
    _checked(input, weight)
    assert out is not None and out.shape == input.shape and out.dtype == input.dtype and out.stride(1) == 1
    return out.copy_(rms_norm.reference(input, weight, eps))


def aiter_rmsnorm2d_fwd(
    input: torch.Tensor, weight: torch.Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> torch.Tensor:
    """Has the signature of aiter.rmsnorm2d_fwd."""
    _checked(input, weight)
    assert use_model_sensitive_rmsnorm == 0
    return rms_norm.reference(input, weight, epsilon)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stub modules with these functions in place of the two libraries."""

    def place(flashinfer: Any = flashinfer_rmsnorm, aiter: Any = aiter_rmsnorm2d_fwd) -> None:
        for path, name, function in (
            ("flashinfer.norm", "rmsnorm", flashinfer),
            ("aiter.ops.rmsnorm", "rmsnorm2d_fwd", aiter),
        ):
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                module = ModuleType(".".join(parts[:length]))
                module.__path__ = []
                if length == len(parts):
                    setattr(module, name, function)
                monkeypatch.setitem(sys.modules, module.__name__, module)

    for spec in (rms_norm_flashinfer, rms_norm_aiter):
        spec._host.cache_clear()
    yield place
    for spec in (rms_norm_flashinfer, rms_norm_aiter):
        spec._host.cache_clear()


@pytest.mark.parametrize("spec", [rms_norm_flashinfer, rms_norm_aiter])
@pytest.mark.parametrize("problem", ["m=7,n=257,x=bf16", "m=33,n=768,x=fp16", "m=1,n=1,x=bf16"])
def test_wrappers_keep_the_contract(hosts: Any, spec: Any, problem: str) -> None:
    hosts()
    parsed = rms_norm.OP.problem(problem)
    assert spec.KERNEL.accepts(parsed) is None
    outcome = verify(
        rms_norm.OP, spec.KERNEL, spec.KERNEL.config(parsed, Target.parse("sm_90")), parsed, "cpu"
    )
    assert outcome.ok, outcome.reason


@pytest.mark.parametrize("spec", [rms_norm_flashinfer, rms_norm_aiter])
def test_wrappers_take_strides_and_leading_dimensions(hosts: Any, spec: Any) -> None:
    hosts()
    x, weight = padded_rows(torch.randn(6, 33).bfloat16()), torch.randn(33).bfloat16()
    for shape in ((6, 33), (2, 3, 33)):
        rows = x if len(shape) == 2 else x.contiguous().view(shape)
        out = padded_rows(torch.zeros(6, 33).bfloat16()) if len(shape) == 2 else torch.empty(shape).bfloat16()
        spec.launch({}, make_call("rms_norm", rows, weight, 1e-5, out))
        assert torch.equal(out, rms_norm.reference(rows, weight, 1e-5))


@pytest.mark.parametrize("spec", [rms_norm_flashinfer, rms_norm_aiter])
def test_a_host_that_is_wrong_is_not_let_through(hosts: Any, spec: Any) -> None:
    def plus_one(input: torch.Tensor, weight: torch.Tensor, eps: float, out: Any = None) -> torch.Tensor:
        result = rms_norm.reference(input, weight + 1, eps)
        return result if out is None else out.copy_(result)

    hosts(plus_one, plus_one)
    problem = rms_norm.OP.problem("m=7,n=257,x=bf16")
    assert not verify(rms_norm.OP, spec.KERNEL, {}, problem, "cpu").ok


def test_what_they_require() -> None:
    nothing = Build.none()
    flashinfer, aiter = rms_norm_flashinfer.KERNEL, rms_norm_aiter.KERNEL
    h100, mi300, cpu = Target.parse("sm_90"), Target.parse("gfx942"), Target.parse("cpu:avx2")
    assert not flashinfer.requires.check_hardware(h100) and not aiter.requires.check_hardware(mi300)
    assert flashinfer.requires.check_hardware(mi300) and flashinfer.requires.check_hardware(cpu)
    assert aiter.requires.check_hardware(h100) and aiter.requires.check_hardware(Target.parse("gfx1201"))
    assert "flashinfer-python" in flashinfer.requires.check_build(h100, nothing)[0]
    assert "aiter.ops.rmsnorm:rmsnorm2d_fwd" in aiter.requires.check_build(mi300, nothing)[0]
    for kernel in (flashinfer, aiter):
        assert "fp32" in (kernel.accepts(rms_norm.OP.problem("m=1,n=8,x=fp32")) or "")
        assert kernel.proven == "" and kernel.priority < rms_norm_triton.KERNEL.priority
    assert flashinfer.auto and not aiter.auto


@pytest.mark.parametrize(
    ("source", "offered"),
    [
        ("def rmsnorm2d_fwd(input, weight, epsilon):\n    pass\n", True),
        ("def other():\n    pass\n", False),
        (None, False),
    ],
)
def test_the_unrelated_aiter_is_not_taken_for_amds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, offered: bool
) -> None:
    package = tmp_path / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text("async def iter(): ...\n")
    if source is not None:
        (package / "ops").mkdir()
        (package / "ops" / "__init__.py").touch()
        (package / "ops" / "rmsnorm.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    build = Build.none().confirm(rms_norm_aiter.KERNEL.requires.offers)
    reasons = rms_norm_aiter.KERNEL.requires.check_build(Target.parse("gfx942"), build)
    assert (not reasons) == offered, reasons
    assert offered or "aiter" in reasons[0]
    assert "aiter" not in sys.modules, "probing runs nothing of the package"


def test_the_stubs_have_the_real_signatures_when_a_host_is_installed() -> None:
    flashinfer = pytest.importorskip("flashinfer.norm", reason="flashinfer-python is not installed")
    real = list(inspect.signature(flashinfer.rmsnorm).parameters)
    assert real[:4] == list(inspect.signature(flashinfer_rmsnorm).parameters)[:4]
