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
from tests.integrations.cutedsl.ptx_machine import Cta, Instruction, Map, Warp

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
        if op.startswith(("cp.async.ca.shared.global", "cp.async.cg.shared.global")):
            return self.gather(warp, operands, active)
        if op.startswith("cp.async.mbarrier.arrive.noinc"):
            return self.arrive_later(warp, operands, active)
        return super().execute(warp, instruction, active)

    def gather(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        """Later: so many bytes of each lane, zeros past those that it reads, which are all if a copy does not say how many."""
        size = int(operands[2])
        to, source = (
            warp.address(operand)[active, None] + np.arange(size) for operand in (operands[0], operands[1])
        )
        read = np.full((int(active.sum()), 1), size)
        if len(operands) > 3:
            read = warp.value(operands[3]).astype(np.int64)[active, None]
        assert not (to[:, 0] % size).any() and not (source[:, 0] % size).any()
        assert (read >= 0).all() and (read <= size).all()

        def copy() -> None:
            self.shared[to] = np.where(np.arange(size) < read, self.memory[source], 0)
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


@dataclass(frozen=True)
class Experts(Map):
    """A tensor map of all experts' W [E, N, K]; rows past N are zero."""


class DenseExpertsCta(ExpertsCta):
    """A CTA of a product of experts whose operands are numbers of 16 bits."""

    multiply = Cta.multiply
    bulk_load = Cta.bulk_load

    def load_scales(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        """Later: a box of one expert's W to shared memory."""
        tensor, (x, y, expert) = self.map_of(warp, operands[1], active)
        to, at = warp.one(warp.address(operands[0]), active), warp.one(warp.address(operands[2]), active)
        assert isinstance(tensor, Experts) and active.sum() == 1 and not to % 1024
        rows, columns = tensor.box

        def copy() -> None:
            box = np.zeros(tensor.box, tensor.data.dtype)
            inside = tensor.data[expert, y : y + rows, x : x + columns]
            box[: inside.shape[0], : inside.shape[1]] = inside
            self.shared[tensor.places(to)] = box.view(np.uint8).reshape(rows, -1)
            self.barriers[at].bytes -= box.nbytes
            self.barriers[at].settle()

        self.queues["load"].append(copy)
