"""linear_deepgemm without a GPU and without the library: where it looks for it, the calls that it makes, and what it refuses."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear import deepgemm
from gristmill.kernels.linear.w8a8_sm90 import _launch
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_deepgemm")
HOPPER = Target.parse("sm_90")
W = "w=fp8_block.fp8_g128"
BUNDLED = "vllm.third_party.deep_gemm"


def numbers(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory at an address."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype, count=count)


def quantize_in_torch(args: Any) -> int:
    """gm_quantize_rows_sm90 for groups of 128: scales of a group next to each other, `pitch` floats from group to group."""
    assert args.format == 1 and args.x_type == 2
    x = numbers(args.x, (args.m - 1) * args.ldx + args.k, torch.bfloat16).as_strided(
        (args.m, args.k), (args.ldx, 1)
    )
    made = quantize_activation(x, "fp8_g128")
    numbers(args.codes, args.m * args.k, torch.uint8).copy_(made.values.view(torch.uint8).flatten())
    by_column = numbers(args.scales, cdiv(args.k, 128) * args.pitch, torch.float32)
    by_column.view(-1, args.pitch)[:, : args.m] = made.scales.T
    return 0


class Library:
    """Stands for DeepGEMM: multiplies what `fp8_gemm_nt` is given, in float32, and remembers the strides of scales."""

    def __init__(self) -> None:
        self.strides: list[tuple[int, ...]] = []
        self.calls = 0

    def fp8_gemm_nt(self, a: Any, b: Any, d: torch.Tensor) -> None:
        (av, sa), (bv, sb) = a, b
        assert av.dtype == bv.dtype == torch.float8_e4m3fn and sa.dtype == sb.dtype == torch.float32
        assert av.is_contiguous() and d.is_contiguous() and d.dtype == torch.bfloat16
        assert tuple(sa.shape) == (av.shape[0], cdiv(av.shape[1], 128)) and sa.data_ptr() % 16 == 0
        self.strides.append(sa.stride())
        self.calls += 1
        of_b = sb.repeat_interleave(128, 0)[: bv.shape[0]].repeat_interleave(128, 1)[:, : bv.shape[1]]
        of_a = sa.repeat_interleave(128, 1)[:, : av.shape[1]]
        d.copy_((av.float() * of_a) @ (bv.float() * of_b).T)


@pytest.fixture(params=deepgemm.MODULES)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library in one of its places, and the quantizer in torch."""
    found = Library()
    for name in deepgemm.MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    parts = request.param.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(
            sys.modules, ".".join(parts[:length]), module := ModuleType(".".join(parts[:length]))
        )
    module.__dict__["fp8_gemm_nt"] = found.fp8_gemm_nt
    monkeypatch.setattr(deepgemm, "_ran", set())
    monkeypatch.setattr(_launch, "cuda_entry", lambda name, args: quantize_in_torch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    return found


@pytest.mark.parametrize("problem", KERNEL.examples)
def test_examples(library: Library, problem: str) -> None:
    parsed = OP.problem(problem)
    outcome = verify(OP, KERNEL, {}, parsed, "cpu")
    assert outcome.ok, outcome.reason
    m = parsed.integer("m")
    assert library.calls > 0 and set(library.strides) == {(1, cdiv(m, 4) * 4)}


def weight_of(n: int, k: int) -> QuantTensor:
    generator = torch.Generator().manual_seed(n + k)
    return quantize(torch.randn(n, k, generator=generator), "fp8_block.fp8_g128")


def launched(weight: QuantTensor, m: int, **more: Any) -> torch.Tensor:
    x = torch.randn(m, weight.k, generator=torch.Generator().manual_seed(m)).bfloat16()
    out = torch.full((m, weight.n), float("nan"), dtype=torch.bfloat16)
    call = make_call("linear", x=x, weight=pack(weight, "plain_v1").tensors, out=out, **more)
    KERNEL.load()({}, call)
    return out


@pytest.mark.parametrize("m", [1, 3, 4, 129])
def test_quantized_rows_lie_in_the_workspace_that_is_asked_for(library: Library, m: int) -> None:
    """Bytes behind it are untouched, and nothing else is read: the workspace begins as NaN."""
    weight = weight_of(128, 384)
    size = KERNEL.workspace(OP.problem(f"m={m},n=128,k=384,{W}"), {}).bytes
    workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8)
    out = launched(weight, m, workspace=workspace)
    assert out.isfinite().all() and (workspace[size:] == 0xFF).all()
    with pytest.raises(ValueError, match="workspace must be"):
        launched(weight, m, workspace=workspace[: size - 16])


@pytest.mark.parametrize("pitch", [8, 12, None])
def test_given_scales_are_copied_unless_they_lie_by_columns(library: Library, pitch: int | None) -> None:
    m, weight = 7, weight_of(64, 256)
    x = torch.randn(m, 256, generator=torch.Generator().manual_seed(m)).bfloat16()
    made = quantize_activation(x, "fp8_g128")
    scales = made.scales if pitch is None else torch.empty(2, pitch).T[:m].copy_(made.scales)
    given: list[int] = []
    multiply = library.fp8_gemm_nt

    def seen(a: Any, b: Any, d: torch.Tensor) -> None:
        given.append(a[1].data_ptr())
        multiply(a, b, d)

    for name in deepgemm.MODULES:
        if sys.modules[name] is not None:
            sys.modules[name].__dict__["fp8_gemm_nt"] = seen
    y = launched(weight, m, codes=made.values, scales=scales)
    assert torch.equal(y, launched(weight, m)) and library.strides == [(1, 8)] * 2
    assert (given[0] == scales.data_ptr()) == (pitch == 8)


def test_scales_inside_a_block_are_refused(library: Library) -> None:
    weight = weight_of(256, 128)
    tensors = pack(weight, "plain_v1").tensors
    x, out = torch.ones(2, 128, dtype=torch.bfloat16), torch.empty(2, 192, dtype=torch.bfloat16)
    cut = [tensors[0][64:], *tensors[1:]]
    cut[1] = torch.cat((tensors[1], tensors[1]))
    with pytest.raises(ValueError, match="fused or sharded inside a block"):
        KERNEL.load()({}, make_call("linear", x=x, weight=cut, out=out))
    assert library.calls == 0


def test_what_has_not_run_is_not_captured(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM compiles what it first runs, and a capture would have the loading of it."""
    weight, capturing = weight_of(64, 128), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    launched(weight, 4)
    capturing = True
    launched(weight, 4)
    with pytest.raises(RuntimeError, match="M=5, N=64, K=128 has not run yet"):
        launched(weight, 5)
    assert library.calls == 2
    capturing = False
    launched(weight, 5)
    capturing = True
    launched(weight, 5)


def test_no_rows_are_no_call(library: Library) -> None:
    launched(weight_of(64, 128), 0)
    assert library.calls == 0


def test_the_package_comes_before_the_copy_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Library(), Library()
    for name, found in zip(deepgemm.MODULES, (first, second), strict=True):
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        module.__dict__["fp8_gemm_nt"] = found.fp8_gemm_nt
    assert deepgemm.product() == first.fp8_gemm_nt
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))  # PyPI's has no such function
    assert deepgemm.product() == second.fp8_gemm_nt
    monkeypatch.setitem(sys.modules, BUNDLED, None)
    with pytest.raises(ImportError, match=BUNDLED):
        deepgemm.product()


def test_a_module_that_is_there_is_found_without_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path.joinpath(*BUNDLED.split("."))
    folder.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('vLLM was imported')\n")
    (folder / "__init__.py").write_text("from ._C import (\n    fp8_gemm_nt,\n)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Build.none().confirm(KERNEL.requires.offers).offers == set(KERNEL.requires.offers)


def test_either_place_suffices() -> None:
    build = replace(Build.none(), cuda_archs=("sm_90a",))
    (reason,) = KERNEL.requires.check_build(HOPPER, build.confirm(KERNEL.requires.offers))
    assert "module deep_gemm is not installed and module vllm is not installed" in reason
    assert "it comes from https://github.com/deepseek-ai/DeepGEMM" in reason
    assert KERNEL.requires.check_build(HOPPER, replace(build, offers=frozenset(KERNEL.requires.offers))) == ()
    without_quantizer = replace(Build.none(), offers=frozenset(KERNEL.requires.offers))
    assert "sm_90a" in KERNEL.requires.check_build(HOPPER, without_quantizer)[0]
    for name in ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942"):
        assert KERNEL.requires.check_hardware(Target.parse(name)), name


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (f"m=1,n=64,k=128,{W}", None),
        (f"m=0,n=192,k=256,{W},epilogue=bias+residual+silu_mul,codes=true", None),
        ("m=1,n=64,k=128,w=fp8_block", "not fp8_block"),
        ("m=1,n=64,k=128,w=fp8_ch.fp8_token", "not fp8_ch.fp8_token"),
        (f"m=1,n=64,k=100,{W}", "K a multiple of 128"),
        (f"m=1,n=96,k=128,{W}", "N of 64"),
        (f"m=1,n=64,k=128,x=fp16,{W}", "writes bf16"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal
