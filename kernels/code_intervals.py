"""How far values are from those that round to given codes: the error of an operation that quantizes what it computes.

A value that is one rounding off near the middle between two codes gets the other code. Comparing codes would call that an error of
a whole step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def outside(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The distance of float64 values from the interval that rounds to their codes, e4m3 or int8."""
    import torch

    if codes.dtype == torch.int8:
        code = codes.double()
        lower, upper = code - 0.5, code + 0.5
        lower, upper = lower.masked_fill(code == -128, -math.inf), upper.masked_fill(code == 127, math.inf)
        return (lower - values).clamp_min(0) + (values - upper).clamp_min(0)
    finite = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().to(values.device)
    middle = (finite[1:] + finite[:-1]) / 2
    upper = torch.cat((middle, middle.new_full((1,), math.inf)))
    lower = torch.cat((-middle[:1], middle))  # the interval of 0 extends to both sides
    byte = codes.contiguous().view(torch.uint8).long()
    magnitude = (byte & 0x7F).clamp(max=0x7E)
    signed = torch.where(byte >= 0x80, -values, values)
    return (lower[magnitude] - signed).clamp_min(0) + (signed - upper[magnitude]).clamp_min(0)
