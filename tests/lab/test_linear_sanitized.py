"""The program for compute-sanitizer reaches every method by which the kernels of linear add partial sums."""

from __future__ import annotations

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from lab import linear_sanitized as program


@pytest.mark.parametrize("scheme", program.SCHEMES.split(","))
def test_every_way_is_reached(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "device_target", lambda device, policy: Target.parse("h200"))
    kernels = [
        k
        for k in default_registry().kernels_of("linear")
        if k.language == "cuda" and k.provider == "gristmill"
    ]
    configurations = [
        config
        for text in program.PROBLEMS.split(",")
        for kernel in kernels
        for config in program.configs(kernel, scheme, *(int(part) for part in text.split("x")))
    ]
    decode, gemm = [c for c in configurations if "nt" in c], [c for c in configurations if "even" in c]
    stream_k = [c for c in configurations if "share" in c]
    assert (
        {c["nt"] for c in decode} == {1, 2}
        and {c["split"] for c in decode} >= {1, 2}
        and {"wn" in c for c in decode} == {True, False}
    )
    assert (
        {c["mt"] for c in gemm} >= {32, 64, 128}
        and {c["split"] for c in gemm} >= {1, 2}
        and {c["even"] for c in gemm} >= {0, 1}
    )
    assert {c["mt"] for c in stream_k} == {32, 64, 128} and {c["share"] for c in stream_k} == {0, 1}
    if scheme != "int4_g32_zp":  # has no slices
        assert {c["slices"] for c in gemm} > {1}
