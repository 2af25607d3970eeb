"""Triton's interpreter, repaired: bf16 and fp8 arithmetic as on a GPU.

Triton's interpreter (3.6 to 3.9) keeps bf16 and fp8 as integers and adds, multiplies and rounds those bit patterns; the
results are silently wrong. `install` computes them in float32 and rounds to nearest even by ml_dtypes instead, and
`check` proves it against torch: it raises if a new Triton has changed the private names that this module relies on.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any


class InterpreterError(RuntimeError):
    """The interpreter differs from what this module expects, so its results cannot be trusted."""


def interpreting() -> bool:
    """Whether Triton kernels run in the interpreter in this process (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def install() -> None:
    """Repair the interpreter in this process and check the repair."""
    try:
        _patch()
    except (ImportError, AttributeError) as error:
        raise InterpreterError(
            f"Triton's interpreter has changed: {error}; it computes bf16 wrongly unrepaired"
        ) from error
    check()


def _patch() -> None:
    import ml_dtypes
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    from gristmill.kernels import _interpreter_speed

    _interpreter_speed.install()
    narrow = {
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
        tl.float8e5: ml_dtypes.float8_e5m2,
        tl.float8e4b8: ml_dtypes.float8_e4m3fnuz,
        tl.float8e5b16: ml_dtypes.float8_e5m2fnuz,
    }
    builder, handle, numpy_type = (
        interpreter.InterpreterBuilder,
        interpreter.TensorHandle,
        interpreter._get_np_dtype,
    )

    def convert(values: Any, source: Any, target: Any, _rounding: Any) -> Any:
        plain = np.ascontiguousarray(values)
        plain = plain.view(narrow[source]) if source in narrow else plain
        cast = plain.astype(np.float32).astype(narrow.get(target) or numpy_type(target))
        return cast.view(getattr(np, f"uint{target.primitive_bitwidth}"))

    def widen(h: Any) -> Any:
        scalar = h.dtype.scalar
        return h.data.view(narrow[scalar]).astype(np.float32) if scalar in narrow else h.data

    def narrowed(values: Any, dtype: Any) -> Any:
        return handle(values.astype(narrow[dtype]).view(numpy_type(dtype)), dtype)

    old_binary, old_unary, old_cast = builder.binary_op, builder.unary_op, builder.cast_impl

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar not in narrow:
            return old_binary(self, left, right, op)
        out = op(widen(left), widen(right))
        return handle(out, tl.int1) if out.dtype == bool else narrowed(out, left.dtype.scalar)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar not in narrow:
            return old_unary(self, arg, op)
        return narrowed(op(widen(arg)), arg.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right = widen(a), widen(b)
        if np.issubdtype(d.data.dtype, np.integer):
            return handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)
        total = np.matmul(left.astype(np.float32), right.astype(np.float32)) + widen(d)
        return handle(total.astype(widen(d).dtype), d.dtype.scalar)

    def scaled(value: Any, scale: Any, k_last: bool) -> Any:
        """An operand of `dot_scaled` in float32: e2m1 in bytes or floats, times a scale (e8m0 in bytes, or e4m3) for each part of K."""
        plain = value.data if k_last else np.swapaxes(value.data, -1, -2)
        if value.dtype.scalar in (tl.uint8, tl.int8):
            table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
            plain = table[np.stack((plain & 15, plain.view(np.uint8) >> 4), -1)].reshape(
                *plain.shape[:-1], -1
            )
        else:
            plain = widen(handle(np.ascontiguousarray(plain), value.dtype.scalar)).astype(np.float32)
        if scale is None:
            return plain
        if scale.dtype.scalar in narrow:
            factors = widen(scale)
        else:
            byte = scale.data.view(np.uint8).astype(np.int32)
            factors = np.where(byte == 255, np.float32("nan"), np.ldexp(np.float32(1), byte - 127))
        return plain * np.repeat(factors, plain.shape[-1] // factors.shape[-1], -1)

    def create_dot_scaled(self: Any, *operands: Any) -> Any:
        # The dtypes tell the formats apart: bytes are e2m1.
        a, a_scale, _, b, b_scale, *_, a_packs_k, b_packs_k, total = operands
        if not (a_packs_k and b_packs_k):
            raise NotImplementedError("dot_scaled of codes that are packed along another dimension than K")
        product = np.matmul(scaled(a, a_scale, True), np.swapaxes(scaled(b, b_scale, False), -1, -2))
        return handle(product + total.data, total.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if after in narrow:
            return narrowed(widen(source).astype(np.float32), after)
        if before in narrow and not after.is_ptr():
            return handle(widen(source).astype(numpy_type(after)), after)
        return old_cast(self, source, target)

    interpreter._convert_float = convert
    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_dot_scaled = create_dot_scaled
    for name in ("fp_ext", "fp_trunc", "si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui"):
        setattr(
            builder, f"create_{name}", lambda self, source, target, *rest: cast_impl(self, source, target)
        )


def check() -> None:
    """Compare bf16 addition, matrix product and rounding, and fp8 rounding, with torch; InterpreterError if any differs."""
    import torch

    from gristmill.kernels import _interpreter_check

    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(16, 16, generator=generator, dtype=torch.float32).to(torch.bfloat16) for _ in range(2)
    )
    computed = _interpreter_check.run(a, b)
    expected = {
        "bf16 addition": a + b,
        "bf16 matrix product": a.float() @ b.float(),
        "rounding to bf16": (a.float() * b.float()).to(torch.bfloat16),
        "rounding to fp8": (a.float() * 7).to(torch.float8_e4m3fn),
    }
    for name, value in expected.items():
        if not torch.allclose(
            computed[name].float(), value.float(), rtol=0 if "matrix" not in name else 1e-6, atol=1e-6
        ):
            raise InterpreterError(
                f"{name} differs from torch in Triton's interpreter, repaired; do not trust its results"
            )
