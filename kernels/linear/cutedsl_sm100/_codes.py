"""Arguments of products of e4m3 codes in CuTe DSL.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-defs, allow-incomplete-defs

from cutlass import Float32, Int32, Uint8, cute
from cutlass.cute.runtime import make_fake_tensor

from gristmill.kernels.cutedsl._pieces import placeholder


def scaled_codes(m, n, blocks: bool, align: int):
    """Placeholders of x uint8 [M, K], W uint8 [N, K], x's scales float32 [M, groups of K or 1], W's float32 [block rows, groups] or [N, 1], and the
    block row of each row of W int32 [N]. Without blocks, W's scales stand in for block rows.

    align: bytes to whose multiples the scales of x's groups are aligned, those of all rows of a group behind each other.
    """
    k, groups = cute.sym_int32(divisibility=16), cute.sym_int32()
    x, w = (placeholder(Uint8, rows, k, align=16) for rows in (m, n))
    pitch = cute.sym_int64(divisibility=align // 4)
    of_x = make_fake_tensor(Float32, (m, groups), stride=(1, pitch), assumed_align=align)
    of_w = placeholder(Float32, cute.sym_int32(), cute.sym_int32(), align=4)
    return x, w, of_x, of_w, placeholder(Int32, n, align=4) if blocks else of_w
