"""What block-scaled products add to `ptx_machine`: codes of 4 bits, scales in tensor memory, stores to global memory.

Sources: PTX ISA 9.0, sections on tcgen05.cp, tcgen05.mma with block scales (descriptors, layouts of scales), and the types of tensor maps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gristmill.quant import numeric
from tests.integrations.cutedsl.ptx_arithmetic import Array
from tests.integrations.cutedsl.ptx_machine import Cta, Instruction, Map, Warp

STEPS = {"mxf4": 64, "mxf4nvf4": 64, "mxf8f6f4": 32}
"""Kind of product -> its columns of K."""


@dataclass(frozen=True)
class Codes(Map):
    """A tensor map of codes, as bytes, of so many bits each. spread: 16 codes of 4 bits take 16 bytes of shared memory, of which they fill 8."""

    bits: int = 8
    spread: bool = False


@dataclass(frozen=True)
class Scales(Map):
    """A tensor map of tiles of scales [down, across, 256] of 16 bits; box: tiles across, and 256. Where that is one tile, CuTe lets tiles down come
    before tiles across."""


class BlockScaledCta(Cta):
    """A CTA of a block-scaled product."""

    def execute(self, warp: Warp, instruction: Instruction, active: Array) -> bool | None:
        op, operands, _, _ = instruction
        if op.startswith("st.global.v4.b32"):
            values = np.stack([warp.value(name) for name in names_of(operands[1])], 1)
            at = warp.address(operands[0])
            assert not (at[active] % 16).any()
            self.memory[(at[:, None] + np.arange(16))[active]] = values.copy().view(np.uint8)[active]
            return None
        if op.startswith("cp.async.bulk.tensor.3d"):
            return self.load_scales(warp, operands, active)
        if op.startswith("tcgen05.cp"):
            return self.copy_scales(warp, operands, active)
        return super().execute(warp, instruction, active)

    def bulk_load(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Later: a box of codes to shared memory."""
        tensor, (x, y) = self.map_of(warp, operands[1], active)
        assert isinstance(tensor, Codes) and active.sum() == 1
        to, at = warp.one(warp.address(operands[0]), active), warp.one(warp.address(operands[2]), active)
        rows, width = tensor.box
        first = x * tensor.bits // 8
        assert to % 1024 == 0 and first % 16 == 0

        def copy() -> None:
            box = np.zeros(tensor.box, np.uint8)
            inside = tensor.data[y : y + rows, first : first + width]
            box[: inside.shape[0], : inside.shape[1]] = inside
            held = box
            if tensor.spread:
                held = np.full((rows, width // 8, 16), 0xFF, np.uint8)
                held[:, :, :8] = box.reshape(rows, -1, 8)
                held = held.reshape(rows, -1)
            flat = to + np.arange(held.size).reshape(held.shape)
            self.shared[flat ^ ((flat >> 7 & 7) << 4)] = held
            self.barriers[at].bytes -= box.nbytes
            self.barriers[at].settle()

        self.queues["load"].append(copy)

    def load_scales(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        """Later: tiles of scales to shared memory, zeros past the last one."""
        tensor, (column, across, down) = self.map_of(warp, operands[1], active)
        if isinstance(tensor, Scales) and tensor.box[0] == 1:
            across, down = down, across
        assert isinstance(tensor, Scales) and active.sum() == 1 and column == 0
        to, at = warp.one(warp.address(operands[0]), active), warp.one(warp.address(operands[2]), active)
        assert to % 128 == 0

        def copy() -> None:
            box = np.zeros(tensor.box, np.uint16)
            if down < tensor.data.shape[0]:
                inside = tensor.data[down, across : across + tensor.box[0]]
                box[: len(inside)] = inside
            self.shared[to : to + box.nbytes] = box.view(np.uint8).reshape(-1)
            self.barriers[at].bytes -= box.nbytes
            self.barriers[at].settle()

        self.queues["load"].append(copy)

    def copy_scales(self, warp: Warp, operands: tuple[str, ...], active: Array) -> None:
        """In the order of products: 32 rows of 16 bytes to 4 columns, in each quarter of the lanes."""
        to = warp.one(warp.value(operands[0].strip("[]")), active)
        matrix = warp.one(warp.value(operands[1]), active)
        start, stride = (matrix & 0x3FFF) << 4, (matrix >> 32 & 0x3FFF) << 4
        assert matrix >> 61 == 0 and active.sum() == 1 and to + 4 <= self.allocated
        row = np.arange(32)
        at = (start + row // 8 * stride + row % 8 * 16)[:, None] + np.arange(16)

        def copy() -> None:
            words = np.ascontiguousarray(self.shared[at]).view(np.float32)
            self.tensor[:, to : to + 4] = np.tile(words, (4, 1))

        self.queues["mma"].append(copy)

    def multiply(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """In their order: a product of codes times their scales."""
        assert active.sum() == 1
        kind = op.split("kind::")[1].partition(".")[0]
        group = int(op.split(".block")[-1].partition(".")[0])
        to, a, b, described, of_a, of_b = (
            warp.one(warp.value(one.strip("[]")).astype(np.uint64), active) for one in operands[:6]
        )
        add = bool(warp.one(warp.value(operands[6]), active))
        columns = (described >> 17 & 63) * 8
        assert described >> 27 & 3 == 1 and not described >> 13 & 15 and to + columns <= self.allocated
        assert described >> 29 & 3 == of_a >> 30 and described >> 4 & 3 == of_b >> 30, "two first groups"
        types = [described >> 7 & 7, described >> 10 & (7 if kind == "mxf8f6f4" else 3)]
        e8m0 = bool(described >> 23 & 1)

        def product() -> None:
            left = self.numbers(a, 128, kind, types[0]) * self.scales(of_a, 128, kind, group, e8m0)
            right = self.numbers(b, columns, kind, types[1]) * self.scales(of_b, columns, kind, group, e8m0)
            here = self.tensor[:, to : to + columns]
            here[...] = (left @ right.T).numpy() + (here if add else 0)

        self.queues["mma"].append(product)

    def numbers(self, matrix: int, rows: int, kind: str, code: int) -> torch.Tensor:
        """Codes [rows, columns of K] of an operand, as float32."""
        raw = self.operand(matrix, rows)
        if kind != "mxf8f6f4":
            assert code == 1, "not e2m1"
            return numeric.e2m1_decode(numeric.unpack_bits(raw, 4, 64))
        if code == 5:
            packed = raw.view(rows, 2, 16)[:, :, :8].reshape(rows, 16)
            return numeric.e2m1_decode(numeric.unpack_bits(packed, 4, 32))
        assert code == 0, "not e4m3"
        return raw.view(torch.float8_e4m3fn).float()

    def scales(self, place: int, rows: int, kind: str, group: int, e8m0: bool) -> torch.Tensor:
        """Scales [rows, columns of K]: of row r in lane r % 32, in 32 bits of column r // 32, from the byte on that bits 30 and 31 name."""
        count, row = STEPS[kind] // group, np.arange(rows)
        column, first = place & 0xFFFF, place >> 30
        assert first + count <= 4 and column + -(-rows // 32) <= self.allocated
        lanes = np.ascontiguousarray(self.tensor).view(np.uint8).reshape(128, 512, 4)
        taken = torch.from_numpy(lanes[row % 32, column + row // 32, first : first + count].copy())
        decoded = numeric.e8m0_decode(taken) if e8m0 else taken.view(torch.float8_e4m3fn).float()
        return decoded.repeat_interleave(group, 1)


def names_of(operand: str) -> list[str]:
    """The registers of a vector."""
    return operand.strip("{}").replace(" ", "").split(",")
