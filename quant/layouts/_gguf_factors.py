"""Scales of K-quants as the file has them: a float16 times an integer, recovered from their float32 products."""

from __future__ import annotations

import torch
from torch import Tensor

_UNIT = 2.0**-24
"""Every float16 is a multiple of it."""
_MOST = 255
"""The largest divisor that is tried: a common divisor of bytes."""


def factor_rows(values: Tensor, signed: bool) -> tuple[Tensor, Tensor] | None:
    """float32 [R, G] -> d float16 [R] and integers int16 [R, G] with values = d * integers, bit for bit; None if a row has no such factors.

    Integers are -128..127 if `signed`, else 0..255. The d of a file divides the greatest common divisor of its row: the largest that does
    and that a float16 holds is taken.
    """
    units = values.double() / _UNIT
    if not bool((units == units.round()).all()) or float(units.abs().amax()) >= 2.0**53:
        return None
    whole = units.to(torch.int64)
    divisor = whole[:, 0].abs()
    for column in whole.unbind(1)[1:]:
        divisor = torch.gcd(divisor, column.abs())
    factor = _largest_half(divisor)
    if factor is None:
        return None
    empty = divisor == 0
    integers = whole // factor[:, None]
    # The sign of d is that of the row's zeros; without zeros, the one that keeps the integers in range.
    zeros, minus = whole == 0, torch.signbit(values)
    outside = (integers == 128).any(1) if signed else (integers < 0).any(1)
    negative = torch.where(zeros.any(1), (zeros & minus).any(1), outside)
    if signed:  # zeros of both signs are 0 times 1 and -1
        negative &= ~empty
        integers = torch.where(empty[:, None], 1 - 2 * minus.long(), integers)
    integers = torch.where(negative[:, None], -integers, integers)
    low, high = (-128, 127) if signed else (0, 255)
    if int(integers.amin()) < low or int(integers.amax()) > high:
        return None
    size = torch.where(empty, 0, factor).double() * _UNIT
    d = torch.where(negative, -size, size).half()
    same = torch.equal(products(d, integers).view(torch.int32), values.contiguous().view(torch.int32))
    return (d, integers.to(torch.int16)) if same else None


def products(d: Tensor, integers: Tensor) -> Tensor:
    """float16 [R] and integers [R, G] -> float32 [R, G]."""
    return d.float()[:, None] * integers.float()


def _largest_half(divisor: Tensor) -> Tensor | None:
    """Of each of int64 [R], in units of 2^-24, the largest divisor that a float16 holds; 1 for 0. None if one has none within reach."""
    factor = torch.ones_like(divisor)
    pending = (divisor > 0).nonzero()[:, 0]
    for parts in range(1, _MOST + 1):
        if not pending.numel():
            return factor
        whole = divisor[pending]
        part = whole // parts
        value = part.double() * _UNIT
        fits = (part * parts == whole) & (value.half().double() == value)
        factor[pending[fits]] = part[fits]
        pending = pending[~fits]
    return None if pending.numel() else factor
