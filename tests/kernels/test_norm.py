"""rms_norm and fused_add_rms_norm: agreement with transformers, strides, refusals, planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gristmill import ops
from gristmill.kernel_registry.op import Op
from gristmill.kernels.norm import fused_add_rms_norm, rms_norm
from tests.calls import positional
from tests.kernels.running import Runnable, close, padded_rows, runnables, verify_fault

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
EPS = 1e-6


def _rows(m: int, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(m, n, generator=generator) * torch.exp(torch.randn(m, 1, generator=generator))).to(
        dtype
    )


def _llama_norm(weight: torch.Tensor) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(weight.numel(), eps=EPS).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def test_rms_norm_means_what_transformers_means() -> None:
    x, weight = _rows(9, 257, torch.float32), 1 + 0.3 * torch.randn(257)
    with torch.no_grad():
        torch.testing.assert_close(
            rms_norm.reference(x, weight, EPS), _llama_norm(weight)(x), rtol=1e-6, atol=1e-7
        )


def test_rms_norm_reference_against_float64_in_every_dtype() -> None:
    for dtype, half_ulp in ((torch.float32, 6e-8), (torch.float16, 2**-11), (torch.bfloat16, 2**-8)):
        x, weight = _rows(9, 769, dtype), (1 + 0.3 * torch.randn(769)).to(dtype)
        x64 = x.double()
        exact = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        results = rms_norm.reference(x, weight, EPS).double()
        assert ((results - exact).abs() <= exact.abs() * (half_ulp + 5e-7) + 1e-7).all()


def test_fused_add_means_what_the_decoder_layer_means() -> None:
    """As between the two blocks of a decoder layer: hidden = residual + block; residual = hidden; hidden =
    norm(hidden)."""
    for dtype in (torch.float32, torch.bfloat16):
        x, residual, weight = (
            _rows(5, 300, dtype),
            _rows(5, 300, dtype, 1),
            (1 + 0.3 * torch.randn(300)).to(dtype),
        )
        stored = residual.clone()
        results = fused_add_rms_norm.reference(x, stored, weight, EPS)
        assert torch.equal(stored, residual + x), "the stored sum is the model's own, bit for bit"
        with torch.no_grad():
            expected = _llama_norm(weight)(residual + x)
        # In bf16 the model rounds once more, before it multiplies by the weight.
        rtol = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(results, expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_weights_in_float32(op: str, dtype: str) -> None:
    """1 + w with more digits than x has, as Gemma's norms: every kernel that takes them multiplies by all digits."""
    kind = DTYPES[dtype]
    x, residual = _rows(5, 300, kind), _rows(5, 300, kind, 1)
    weight = 1 + 2**-11 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    exact = x.double() + (residual.double() if op == "fused_add_rms_norm" else 0)
    exact = exact.to(kind).double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    ran = 0
    for implementation in runnables(op):
        if "w" not in implementation.kernel.supports:
            continue
        out = torch.empty_like(x)
        arguments = [x, residual.clone()] if op == "fused_add_rms_norm" else [x]
        implementation(*arguments, weight, EPS, out)
        half_step = {"fp16": 2**-11, "bf16": 2**-8}[dtype]
        assert bool(((out.double() - exact).abs() <= exact.abs() * (half_step + 1e-6) + 1e-7).all())
        ran += 1
    assert ran >= 3


def test_weights_of_another_dtype_are_refused() -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match="weight must have x's dtype torch.bfloat16 or torch.float32, got torch.float16"
    ):
        ops.rms_norm(x, torch.ones(8, dtype=torch.float16), EPS)


@pytest.mark.parametrize("implementation", runnables("rms_norm"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_row_strides(implementation: Runnable, dtype: str) -> None:
    x, weight = padded_rows(_rows(6, 131, DTYPES[dtype])), (1 + 0.3 * torch.randn(131)).to(DTYPES[dtype])
    out = padded_rows(torch.zeros_like(x))
    implementation(x, weight, EPS, out)
    assert close(out, rms_norm.reference(x, weight, EPS), "rms_norm", f"m=6,n=131,x={dtype}")
    assert out._base is not None and out._base.isnan().sum() == out._base.numel() - out.numel(), (
        "wrote between rows"
    )


@pytest.mark.parametrize("implementation", runnables("fused_add_rms_norm"), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_takes_row_strides_and_out_may_be_x(implementation: Runnable, dtype: str) -> None:
    text = f"m=6,n=131,x={dtype}"
    x, residual = (
        padded_rows(_rows(6, 131, DTYPES[dtype])),
        padded_rows(_rows(6, 131, DTYPES[dtype], 1), extra=9),
    )
    weight = (1 + 0.3 * torch.randn(131)).to(DTYPES[dtype])
    stored = residual.clone()
    expected = fused_add_rms_norm.reference(x, stored, weight, EPS)
    implementation(x, residual, weight, EPS, x)
    assert torch.equal(residual, stored)
    assert close(x, expected, "fused_add_rms_norm", text)


@pytest.mark.parametrize("implementation", runnables("fused_add_rms_norm"), ids=str)
def test_fused_add_normalises_what_it_stored(implementation: Runnable) -> None:
    """256 + 1 is 256 in bf16 (ties to even). In a row that is otherwise uniform, the norm of the unrounded
    sum would differ."""
    x = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16)
    residual[0, 0] = 1.0
    out = torch.empty_like(x)
    implementation(x, residual, torch.ones(64, dtype=torch.bfloat16), 0.0, out)
    assert residual.tolist() == [[2.0] + [256.0] * 63]
    exact = torch.tensor([2.0] + [256.0] * 63).double()
    exact = exact / exact.square().mean().sqrt()
    assert torch.equal(out[0], exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    "implementation", [*runnables("rms_norm"), *runnables("fused_add_rms_norm")], ids=str
)
def test_a_row_does_not_depend_on_the_others(implementation: Runnable) -> None:
    if not implementation.kernel.batch_invariant:
        pytest.skip("does not promise it")
    fused = implementation.op.name == "fused_add_rms_norm"
    x, residual, weight = _rows(7, 515, torch.float32), _rows(7, 515, torch.float32, 1), torch.randn(515)

    def run(rows: slice) -> torch.Tensor:
        out = torch.empty_like(x[rows])
        implementation(*((x[rows], residual[rows].clone()) if fused else (x[rows],)), weight, EPS, out)
        return out

    assert torch.equal(run(slice(3, 4))[0], run(slice(None))[3])


@pytest.mark.parametrize("implementation", runnables("rms_norm"), ids=str)
def test_zero_rows_give_zero_and_nan_stays_in_its_row(implementation: Runnable) -> None:
    x = torch.zeros(3, 33)
    x[1, 5] = float("nan")
    out = torch.empty_like(x)
    implementation(x, torch.ones(33), EPS, out)
    assert (out[[0, 2]] == 0).all() and out[1].isnan().all()


def test_refusals_say_what_was_expected() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    cases: list[tuple[type[Exception], str, Any]] = [
        (
            ValueError,
            r"weight must be \[n\] = \[8\], n as in x, got \[7\]",
            lambda: ops.rms_norm(x, torch.randn(7), EPS),
        ),
        (TypeError, "weight must have x's dtype", lambda: ops.rms_norm(x, weight.bfloat16(), EPS)),
        (
            ValueError,
            "x must be rows of one stride, contiguous in the last dimension",
            lambda: ops.rms_norm(x.t().contiguous().t(), weight, EPS),
        ),
        (ValueError, "eps must be at least 0, got -1.0", lambda: ops.rms_norm(x, weight, -1.0)),
        (
            TypeError,
            "x must be torch.float32 or torch.float16 or torch.bfloat16, got torch.int8",
            lambda: ops.rms_norm(x.to(torch.int8), weight.to(torch.int8), EPS),
        ),
        (
            ValueError,
            r"x must be \[..., n\] with n at least 1, got \[4, 0\]",
            lambda: ops.rms_norm(torch.empty(4, 0), torch.empty(0), EPS),
        ),
        (
            ValueError,
            r"residual must be \[..., n\] = \[4, 8\], n as in x, got \[3, 8\]",
            lambda: ops.fused_add_rms_norm(x, x[:3].clone(), weight, EPS),
        ),
        (
            TypeError,
            "residual must have x's dtype",
            lambda: ops.fused_add_rms_norm(x, x.bfloat16(), weight, EPS),
        ),
        (
            ValueError,
            "residual is written, so its elements must not overlap",
            lambda: ops.fused_add_rms_norm(x, torch.randn(1, 8).expand(4, 8), weight, EPS),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.parametrize("op", [rms_norm.OP, fused_add_rms_norm.OP])
def test_guards_refuse_what_would_read_or_write_elsewhere(op: Op) -> None:
    fused = op is fused_add_rms_norm.OP
    static = op.static(op.problem("n=8,x=fp32"))

    def call(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> int:
        arguments = (x, torch.zeros_like(x), weight) if fused else (x, weight)
        return op.guard(static)(op.Call(*arguments, EPS, out))

    x, weight = torch.randn(4, 8), torch.randn(8)
    assert call(x, weight, torch.empty(4, 8)) == 4
    assert call(x.view(2, 2, 8), weight, torch.empty(2, 2, 8)) == 4
    wrong = [
        (x, weight, torch.empty(3, 8)),
        (x, weight[:7], torch.empty(4, 8)),
        (x, torch.randn(8, 8), torch.empty(4, 8)),
        (x, torch.randn(16)[::2], torch.empty(4, 8)),
        (x.bfloat16(), weight.bfloat16(), torch.empty(4, 8, dtype=torch.bfloat16)),
        (x, weight, torch.empty(4, 8, dtype=torch.float64)),
        (x, weight.bfloat16(), torch.empty(4, 8)),
        (torch.randn(8, 4).t(), weight, torch.empty(4, 8)),
        (x, weight, torch.empty(8, 4).t()),
        (x, weight, torch.empty(1, 8).expand(4, 8)),
        (torch.randn(2, 3, 2, 8)[:, 0], torch.randn(8), torch.empty(2, 3, 8)),
    ]
    for arguments in wrong:
        with pytest.raises(ValueError, match="planned for|contiguous|overlap"):
            call(*arguments)


@positional
def skipped_tail(config: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
    out.copy_(rms_norm.reference(x, weight, eps))
    out[..., -1] = x[..., -1]


@positional
def mean_over_padding(config: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
    n = x.shape[-1]
    scale = (x.float().square().sum(-1, keepdim=True) / (-(-n // 16) * 16) + eps).rsqrt()
    out.copy_(x.float() * scale * weight.float())


@positional
def unwritten_row(config: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
    out[:-1].copy_(rms_norm.reference(x, weight, eps)[:-1])


@positional
def row_off_by_one(config: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
    out.copy_(rms_norm.reference(x.roll(1, 0), weight, eps))


@positional
def past_the_end(config: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
    out.copy_(rms_norm.reference(x, weight, eps))
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0)


@pytest.mark.parametrize(
    "fault", ["skipped_tail", "mean_over_padding", "unwritten_row", "row_off_by_one", "past_the_end"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_verification_catches_wrong_norms(fault: str, dtype: str) -> None:
    assert not verify_fault("rms_norm", __name__, fault, f"m=7,n=257,x={dtype}").ok


@positional
def residual_not_written(config: Any, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
    out.copy_(fused_add_rms_norm.reference(x, residual.clone(), weight, eps))


@positional
def norm_before_addition(config: Any, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
    out.copy_(rms_norm.reference(x, weight, eps))
    residual.add_(x)


@positional
def one_column_added_twice(config: Any, x: Any, residual: Any, weight: Any, eps: float, out: Any) -> None:
    out.copy_(fused_add_rms_norm.reference(x, residual, weight, eps))
    residual[0, 3] += x[0, 3]


@pytest.mark.parametrize("fault", ["residual_not_written", "norm_before_addition", "one_column_added_twice"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_verification_catches_wrong_fused_norms(fault: str, dtype: str) -> None:
    assert not verify_fault("fused_add_rms_norm", __name__, fault, f"m=7,n=257,x={dtype}").ok


def test_operators_run_in_place_and_into_out(policy_file: Any) -> None:
    policy_file()
    x, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    stored = residual.clone()
    expected = fused_add_rms_norm.reference(x, stored, weight, EPS)
    out = torch.empty_like(x)
    stream = residual.clone()
    assert ops.fused_add_rms_norm(x, stream, weight, EPS, out=out) is out
    assert torch.equal(stream, stored)
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=1e-6)
    stream = residual.clone()
    torch.testing.assert_close(ops.fused_add_rms_norm(x, stream, weight, EPS), expected, rtol=4e-6, atol=1e-6)
    assert torch.equal(stream, stored)


def test_opcheck_of_the_operators(policy_file: Any) -> None:
    policy_file()
    x, weight = torch.randn(3, 40), torch.randn(40)
    torch.library.opcheck(torch.ops.gristmill.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(
        torch.ops.gristmill.fused_add_rms_norm.default, (x, torch.randn(3, 40), weight, EPS)
    )
