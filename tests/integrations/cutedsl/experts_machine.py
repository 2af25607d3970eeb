"""What products of experts add to `block_scaled_machine`: rows of x that cp.async copies, barriers that wait for them, and the fence between the
proxies that write and read them.

Sources: PTX ISA 9.0, sections on cp.async, cp.async.mbarrier.arrive and the async proxy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from tests.integrations.cutedsl.block_scaled_machine import BlockScaledCta
from tests.integrations.cutedsl.ptx_arithmetic import Array
from tests.integrations.cutedsl.ptx_machine import Instruction, Warp

LANDED = 1000
"""In `Cta.unfenced`: written by cp.async; no fence has made it visible to tcgen05."""


@dataclass
class ExpertsCta(BlockScaledCta):
    """A CTA of a block-scaled product of experts. The copies of a warp land later, in their order, and those of several warps in any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queues |= {f"gather{warp.index}": deque() for warp in self.warps}

    def execute(self, warp: Warp, instruction: Instruction, active: Array) -> bool | None:
        op, operands, _, _ = instruction
        if op.startswith("cp.async.ca.shared.global"):
            return self.gather(warp, operands, active)
        if op.startswith("cp.async.mbarrier.arrive.noinc"):
            return self.arrive_later(warp, operands, active)
        return super().execute(warp, instruction, active)

    def gather(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        """Later: so many bytes of each lane."""
        size = int(operands[2])
        to, source = (
            warp.address(operand)[active, None] + np.arange(size) for operand in (operands[0], operands[1])
        )
        assert operands[2] == operands[3] and not (to[:, 0] % size).any() and not (source[:, 0] % size).any()

        def copy() -> None:
            self.shared[to] = self.memory[source]
            self.unfenced[to] = LANDED

        self.queues[f"gather{warp.index}"].append(copy)

    def arrive_later(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        """Later, when the copies of these lanes have landed: an arrival of each."""
        barrier = self.barriers[warp.one(warp.address(operands[0]), active)]

        def arrive() -> None:
            barrier.missing -= int(active.sum())
            barrier.settle()

        self.queues[f"gather{warp.index}"].append(arrive)

    def fence(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Makes what has landed visible to tcgen05."""
        self.unfenced[self.unfenced == LANDED] = -1

    def copy_scales(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        super().copy_scales(warp, operands, active)
        copy, start = self.queues["mma"].pop(), (warp.one(warp.value(operands[1]), active) & 0x3FFF) << 4

        def checked() -> None:
            self.visible(start + np.arange(512))
            copy()

        self.queues["mma"].append(checked)

    def operand(self, matrix: int, rows: int) -> torch.Tensor:
        start = (matrix & 0x3FFF) << 4
        self.visible(start // 128 * 128 + np.arange(rows * 128))  # whole rows, whatever the swizzle
        return super().operand(matrix, rows)

    def visible(self, places: Array) -> None:
        """AssertionError if tcgen05 reads what it need not see yet."""
        assert (self.unfenced[places] == -1).all(), "tcgen05 reads what no fence has made visible"
