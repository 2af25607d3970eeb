"""What programs of CuTe DSL have in common: placeholders, barriers of a ring in shared memory, parts of rows, SwiGLU.

Without ``from __future__ import annotations``: CuTe DSL reads the annotations as objects.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator


def placeholder(element, *shape, align):
    """A tensor of any distance between rows, whose elements of a row follow each other."""
    divisor = max(1, align * 8 // element.width)
    strides = [cute.sym_int64(divisibility=divisor) for _ in shape[1:]]
    return make_fake_tensor(element, shape, stride=(*strides, 1), assumed_align=align)


class Slots(NamedTuple):
    """Barriers of a ring: `full` counts what has landed, `empty` those who have read a slot."""

    full: cute.Pointer
    empty: cute.Pointer


def allocate(memory: SmemAllocator, slots: int) -> Slots:
    """The barriers of a ring, not yet initialized."""
    return Slots(memory.allocate_array(Int64, slots), memory.allocate_array(Int64, slots))


def shared_tensor(memory: SmemAllocator, dtype, layout):
    """A tensor of a swizzled layout in shared memory."""
    return memory.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def initialize(barriers: Slots, slots: int, arrivals: int, readers: int):
    """Initialize the barriers, by all threads of a warp, which has to fence after the last ring: a slot is full after `arrivals` and the bytes that
    they announce, empty after `readers`."""
    with cute.arch.elect_one():
        for slot in range(slots):
            cute.arch.mbarrier_init(barriers.full + slot, arrivals)
            cute.arch.mbarrier_init(barriers.empty + slot, readers)


def eight(tensor: cute.Tensor, row: Int32 | Int64, column: Int32):
    """16 bytes of a row of 16-bit numbers, which begin at a multiple of 16 bytes."""
    at = tensor.iterator + Int64(row) * tensor.layout.stride[0] + column
    return cute.make_tensor(at.align(16), cute.make_layout(8))


@cute.jit
def advance(slot: Int32, phase: Int32, slots: cutlass.Constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    slot += 1
    if slot == slots:
        slot = Int32(0)
        phase ^= 1
    return slot, phase


def swiglu(gate: Float32, up: Float32, clamped: bool, alpha: Float32, limit: Float32):
    """silu(gate) · up; if `clamped`, g · sigmoid(alpha · g) · (u + 1), where g = min(gate, limit) and u = clamp(up, -limit, limit)."""
    factor = Float32(1)
    if const_expr(clamped):
        gate, factor = cute.arch.fmin(gate, limit), alpha
        up = 1.0 + cute.arch.fmax(cute.arch.fmin(up, limit), -limit)
    return gate * up / (1.0 + cute.math.exp(-factor * gate, fastmath=True))
