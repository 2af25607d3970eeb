"""Wrapped linear providers against stub host modules: the calls that they receive, and what is refused
beforehand."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target

REGISTRY = default_registry()
OP = REGISTRY.op("linear")


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)]
)
def test_aiter_is_given_the_fp8_of_its_device(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype
) -> None:
    def gemm_a8w8(
        xq: Any, wq: Any, x_scale: Any, w_scale: Any, bias: Any = None, _dtype: Any = None, *, dtype: Any
    ) -> Any:
        assert (
            xq.dtype == wq.dtype == expected
            and x_scale.shape == (xq.shape[0], 1)
            and w_scale.shape == (1, wq.shape[0])
        )
        return ((xq.float() * x_scale) @ (wq.float() * w_scale.T).T).to(dtype)

    expected = dtype
    stub(monkeypatch, "aiter", gemm_a8w8=gemm_a8w8)
    kernel = REGISTRY.kernel("linear", "linear_aiter")
    for text in ("m=5,n=48,k=64,w=fp8_ch.fp8_token", "m=2,n=32,k=96,w=fp8.fp8_token,epilogue=bias"):
        problem = OP.problem(text)
        outcome = verify(OP, kernel, kernel.config(problem, Target.parse(arch)), problem, "cpu")
        assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    ("op", "name", "target", "repository"),
    [
        ("linear", "linear_aiter", "gfx942", "https://github.com/ROCm/aiter"),
        ("rms_norm", "rms_norm_aiter", "gfx942", "https://github.com/ROCm/aiter"),
    ],
)
def test_a_library_without_an_extra_is_refused_with_its_repository(
    op: str, name: str, target: str, repository: str
) -> None:
    requires = REGISTRY.kernel(op, name).requires
    (reason,) = requires.check_build(Target.parse(target), Build.none().confirm(requires.offers))
    assert "is not installed; it comes from " in reason and repository in reason
    build = replace(Build.none(), offers=frozenset(requires.offers))
    assert requires.check_build(Target.parse(target), build) == ()


def test_wrapped_kernels_refuse_what_they_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = {
        "linear_aiter": ("m=1,n=64,k=64,w=fp8_ch", "m=1,n=64,k=64,x=fp32,w=fp8_ch.fp8_token"),
        "linear_humming": (
            "m=1,n=64,k=128,w=fp8_ch",
            "m=1,n=64,k=128,x=fp16,w=int4_g128",
            "m=1,n=60,k=128,w=int4_g128",
            "m=1,n=64,k=128,w=int4_g128,act_order=true",
        ),
    }
    for name, texts in refusals.items():
        kernel = REGISTRY.kernel("linear", name)
        assert kernel.requires.offers
        for text in texts:
            assert kernel.accepts(OP.problem(text)), (name, text)
