"""Executes the PTX of CTAs for data-centre Blackwell on a CPU: warps, mbarriers, TMA of matrices, tcgen05 and tensor memory.

It models what programs in `kernels/linear/cutedsl_sm100` emit and refuses every other instruction. What is asynchronous happens later, at times
that a generator of random numbers chooses, so that a missing wait shows: copies by TMA and products, each in the order of its queue. Memory that
nothing has written is NaN, and TMA that reads shared memory without a proxy fence after a write raises. Lanes that diverge run in the order of
their program counters.

Sources: PTX ISA 9.0, sections on mbarrier, cp.async.bulk.tensor and tcgen05 (descriptors of matrices and of instructions).
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tests.integrations.cutedsl import ptx_arithmetic
from tests.integrations.cutedsl.ptx_arithmetic import Array

LANES, SHARED_BYTES, SHARED_BASE = 32, 227 << 10, 1024
FORMATS = {"f8f6f4": {0: torch.float8_e4m3fn}, "f16": {0: torch.float16, 1: torch.bfloat16}}
"""Kind of product -> format of an operand in the descriptor of an instruction -> dtype."""


class Instruction(NamedTuple):
    """guard: a predicate, or "". wanted: its value that executes. operands: as text, braces and brackets included."""

    op: str
    operands: tuple[str, ...]
    guard: str = ""
    wanted: bool = True


@dataclass(frozen=True)
class Map:
    """A tensor map: a matrix in global memory, its tensor's first dimension last; boxes of it in shared memory, swizzled within `swizzle` bytes."""

    data: Array
    box: tuple[int, int]
    swizzle: int

    def places(self, address: int) -> Array:
        """Byte addresses [rows, bytes] of a box at an address."""
        rows, columns = self.box
        width = columns * self.data.itemsize
        flat = address + np.arange(rows * width).reshape(rows, width)
        return swizzled(flat, self.swizzle)


def swizzled(addresses: Array, span: int) -> Array:
    """Addresses whose pieces of 16 bytes are exchanged within `span` bytes (0: none), by the bits from 128 bytes on."""
    exchanged: Array = addresses ^ ((addresses >> 7 & max(span // 16 - 1, 0)) << 4)
    return exchanged


@dataclass
class Barrier:
    """An mbarrier: arrivals of a phase, those that are missing, bytes that are missing, phases that are over."""

    count: int
    missing: int
    bytes: int = 0
    over: int = 0

    def settle(self) -> None:
        """Begin the next phase if this one is complete."""
        if self.missing < 0:
            raise AssertionError("more arrivals than a phase has")
        if not self.missing and not self.bytes:
            self.over, self.missing = self.over + 1, self.count


@dataclass
class Program:
    """Parsed PTX: instructions, the instruction that a label is at, and offsets of parameters in a space of their own."""

    instructions: list[Instruction]
    labels: dict[str, int]
    parameters: list[str]


def parse(text: str) -> Program:
    """The one kernel of a PTX file."""
    program = Program([], {}, re.findall(r"\.param .*?\.(?:b8|u32|f32) (\w+)", text))
    body = text[text.index("\n{") + 2 :]
    for line in body.splitlines():
        line = line.partition("//")[0].strip()
        if match := re.fullmatch(r"(\$\w+):", line):
            program.labels[match[1]] = len(program.instructions)
        if (
            not line.endswith(";")
            or line.startswith((".reg", ".pragma"))
            or re.search(r"LAB_WAIT|DONE", line)
        ):
            continue
        guard = re.match(r"@(!?)(%p\d+)\s+", line)
        line = line[guard.end() :] if guard else line
        op, _, rest = line[:-1].partition(" ") if " " in line else line[:-1].partition("\t")
        op, *tail = op.split("\t")
        rest = " ".join([*tail, rest])
        operands = tuple(
            one.strip() for one in re.findall(r"(?:[^,\[{]|\[[^\]]*\]|\{[^}]*\})+", rest) if one.strip()
        )
        instruction = Instruction(op.strip(), operands, guard[2] if guard else "", not (guard and guard[1]))
        program.instructions.append(instruction)
    return program


class Warp:
    """Registers and program counters of 32 lanes."""

    def __init__(self, cta: Cta, index: int):
        self.cta, self.index = cta, index
        self.registers: dict[str, Array] = {}
        self.counters = np.zeros(LANES, np.int64)
        self.stores: list[bool] = []
        self.at_barrier = self.done = False

    def value(self, operand: str, dtype: str = "b32") -> Array:
        """An operand as bits: a register, a number, the address of a parameter or of shared memory."""
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("%"):
            named = {
                "%laneid": np.arange(LANES),
                "%tid.x": self.index * LANES + np.arange(LANES),
                "%ctaid.x": np.full(LANES, self.cta.index),
                "%nctaid.x": np.full(LANES, self.cta.grid),
            }
            if operand not in named:
                raise AssertionError(f"{operand} is read before it is written")
            return named[operand].astype(np.uint32)
        if operand.startswith("0f"):
            return np.full(LANES, int(operand[2:], 16), np.uint32)
        wide = ptx_arithmetic.BITS[dtype]
        if operand == "__dynamic_shmem__0":
            return np.full(LANES, SHARED_BASE, wide)
        name, _, offset = operand.partition("+")
        if name in self.cta.program.parameters:
            return np.full(
                LANES, (self.cta.program.parameters.index(name) + 1 << 32) + int(offset or 0), np.uint64
            )
        if dtype == "pred":
            return np.full(LANES, operand != "0")
        return np.full(LANES, int(operand, 0) & int(np.iinfo(wide).max), wide)

    def write(self, name: str, value: Array, active: Array) -> None:
        """Write a register of the active lanes."""
        if name == "_":
            return
        if not active.all():
            before = self.registers.get(name)
            before = (
                np.full_like(value, ptx_arithmetic.POISON[value.dtype.name]) if before is None else before
            )
            value = np.where(active, value, before)
        self.registers[name] = value

    def address(self, operand: str) -> Array:
        """The addresses of a memory operand, ``[%r1+16]``."""
        base, _, offset = operand.strip("[]").partition("+")
        return self.value(base, "b64").astype(np.int64) + int(offset or 0)

    def one(self, values: Array, active: Array) -> int:
        """The value of the only active lane, or of all, if they agree."""
        chosen = np.unique(values[active])
        if len(chosen) != 1:
            raise AssertionError(f"lanes do not agree: {chosen}")
        return int(chosen[0])

    def advance(self) -> bool:
        """Run until it waits or ends, 200 instructions at most; whether it executed anything."""
        began = False
        for _ in range(200):
            if self.done:
                break
            counter = int(self.counters.min())
            active = self.counters == counter
            instruction = self.cta.program.instructions[counter]
            chosen = active
            if instruction.guard:
                chosen = active & (self.registers[instruction.guard] == instruction.wanted)
            if instruction.op in ("bra", "bra.uni"):
                self.counters[active] = counter + 1
                self.counters[chosen] = self.cta.program.labels[instruction.operands[-1]]
            elif instruction.op == "ret":
                self.done = True
            else:
                if chosen.any() and self.cta.execute(self, instruction, chosen) is False:
                    return began
                self.counters[active] = counter + 1
            began = True
        return began


@dataclass
class Cta:
    """A CTA: its memories, and what it has begun and not finished."""

    program: Program
    parameters: Sequence[bytes | Map]
    memory: Array
    index: int
    grid: int
    warps_count: int
    chance: random.Random
    shared: Array = field(default_factory=lambda: np.full(SHARED_BASE + SHARED_BYTES, 0xFF, np.uint8))
    unfenced: Array = field(default_factory=lambda: np.full(SHARED_BASE + SHARED_BYTES, -1, np.int16))
    tensor: Array = field(default_factory=lambda: np.full((128, 512), np.nan, np.float32))
    allocated: int = 0
    barriers: dict[int, Barrier] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.warps = [Warp(self, index) for index in range(self.warps_count)]
        self.queues: dict[str, deque[Callable[[], None]]] = {
            name: deque() for name in ("load", "store", "mma")
        }

    def run(self) -> None:
        """Run to the end, warps and queues at speeds that change now and then. AssertionError if nothing can go on."""
        parts: list[Callable[[], bool]] = [warp.advance for warp in self.warps]
        parts += [partial(self.finish_one, queue) for queue in self.queues.values()]
        turn = idle = 0
        while not all(warp.done for warp in self.warps):
            if turn % 60 == 0:
                speeds = [50 ** self.chance.random() for _ in parts]
            moved = self.chance.choices(parts, speeds)[0]()
            if not moved and idle > 30:
                moved = sum(part() for part in parts) > 0 or self.meet()  # every one
                if not moved:
                    stuck = [warp.index for warp in self.warps if not warp.done]
                    raise AssertionError(f"no warp can go on: {stuck}")
            turn, idle = turn + 1, 0 if moved else idle + 1
        if any(self.queues.values()) or self.allocated:
            raise AssertionError("it ended before its copies, or with tensor memory")

    def meet(self) -> bool:
        """Let the warps pass a barrier that all have reached; whether they have."""
        waiting = [warp for warp in self.warps if not warp.done]
        met = bool(waiting) and all(warp.at_barrier for warp in waiting)
        for warp in waiting if met else ():
            warp.at_barrier, warp.counters = False, warp.counters + 1
        return met

    @staticmethod
    def finish_one(queue: deque[Callable[[], None]]) -> bool:
        """Do what is first in a queue; whether anything was."""
        if queue:
            queue.popleft()()
            return True
        return False

    def execute(self, warp: Warp, instruction: Instruction, active: Array) -> bool | None:
        """Execute an instruction; False if the warp has to wait."""
        op, operands, _, _ = instruction
        if method := next((name for prefix, name in METHODS.items() if op.startswith(prefix)), ""):
            result: bool | None = getattr(self, method)(warp, op, operands, active)
            return result
        ptx_arithmetic.execute(warp, op, operands, active)
        return None

    def nothing(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Hints, and what the order of this machine makes superfluous."""

    def bar(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> bool:
        warp.at_barrier = True
        return False

    def fence(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Makes what this warp has written visible to TMA."""
        self.unfenced[self.unfenced == warp.index] = -1

    def load(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """ld.param, ld.global, ld.shared: one element, or a vector of them."""
        names = operands[0].strip("{}").replace(" ", "").split(",")
        kind = ptx_arithmetic.BITS[op.rpartition(".")[2]]
        addresses, size = warp.address(operands[1]), np.dtype(kind).itemsize
        for i, name in enumerate(names):
            at = addresses + i * size
            if op.startswith("ld.param"):
                parameter = self.parameters[int(at[0] >> 32) - 1]
                assert isinstance(parameter, bytes)
                memory, at = np.frombuffer(parameter, np.uint8), at & 0xFFFFFFFF
            else:
                memory = self.memory if op.startswith("ld.global") else self.shared
            at = np.where(active, at, 0)
            raw = memory[at[:, None] + np.arange(size)]
            wide = kind if size > 1 else np.dtype(np.uint16)
            value = raw.copy().view(kind)[:, 0].astype(wide)
            warp.write(name, value, active)

    def store(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """st.shared of a vector of 32 bits."""
        values = np.stack(
            [warp.value(name) for name in operands[1].strip("{}").replace(" ", "").split(",")], 1
        )
        at = warp.address(operands[0])[:, None] + np.arange(4 * values.shape[1])
        assert not (at[active, 0] % (4 * values.shape[1])).any()
        self.shared[at[active]] = np.ascontiguousarray(values).view(np.uint8)[active]
        self.unfenced[at[active]] = warp.index

    def mbarrier(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> bool | None:
        at = warp.one(warp.address(next(one for one in operands if one.startswith("["))), active)
        if op.startswith("mbarrier.init"):
            count = warp.one(warp.value(operands[-1]), active)
            self.barriers[at] = Barrier(count, count)
            return None
        barrier = self.barriers[at]
        if op.startswith("mbarrier.try_wait"):
            return None if barrier.over & 1 != warp.one(warp.value(operands[2]), active) else False
        if op.startswith("mbarrier.arrive.expect_tx"):
            barrier.bytes += warp.one(warp.value(operands[-1]), active)
        assert active.sum() == 1
        barrier.missing -= 1
        barrier.settle()
        return None

    def map_of(self, warp: Warp, operand: str, active: Array) -> tuple[Map, list[int]]:
        """The tensor map and the coordinates of ``[%rd1, {%r1, %r2}]``."""
        base, coordinates = operand.strip("[]").split(",", 1)
        found = self.parameters[(warp.one(warp.value(base), active) >> 32) - 1]
        assert isinstance(found, Map)
        names = coordinates.strip(" {}").replace(" ", "").split(",")
        return found, [warp.one(warp.value(name).astype(np.int32), active) for name in names]

    def bulk_load(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Later: a box to shared memory, zeros where it is outside the matrix."""
        assert active.sum() == 1
        tensor, (x, y) = self.map_of(warp, operands[1], active)
        to, at = warp.one(warp.address(operands[0]), active), warp.one(warp.address(operands[2]), active)
        rows, columns = tensor.box
        assert not to % (8 * tensor.swizzle or 128) and x * tensor.data.itemsize % 16 == 0

        def copy() -> None:
            box = np.zeros(tensor.box, tensor.data.dtype)
            inside = tensor.data[max(y, 0) : y + rows, max(x, 0) : x + columns]
            box[: inside.shape[0], : inside.shape[1]] = inside
            self.shared[tensor.places(to)] = box.view(np.uint8).reshape(rows, -1)
            self.barriers[at].bytes -= box.nbytes
            self.barriers[at].settle()

        self.queues["load"].append(copy)

    def bulk_store(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Later: a box of shared memory to a matrix, as far as it is inside. CuTe DSL lets all lanes store the same."""
        tensor, (x, y) = self.map_of(warp, operands[0], active)
        places = tensor.places(warp.one(warp.address(operands[1]), active))
        assert (self.unfenced[places] == -1).all(), "TMA reads what no fence has made visible"
        warp.stores.append(False)
        which = len(warp.stores) - 1

        def copy() -> None:
            box = self.shared[places].view(tensor.data.dtype)
            inside = tensor.data[y : y + tensor.box[0], x : x + tensor.box[1]]
            inside[...] = box[: inside.shape[0], : inside.shape[1]]
            warp.stores[which] = True

        self.queues["store"].append(copy)

    def bulk_wait(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> bool | None:
        """Until all but so many stores have read shared memory; each is a group of its own."""
        left = int(operands[0])
        return None if all(warp.stores[: len(warp.stores) - left]) else False

    def allocate(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """tcgen05.alloc writes the address, tcgen05.dealloc takes the same columns back."""
        columns = warp.one(warp.value(operands[1]), active)
        if op.startswith("tcgen05.dealloc"):
            assert columns == self.allocated
            self.allocated = 0
            return
        assert not self.allocated and columns in (32, 64, 128, 256, 512)
        self.allocated, at = columns, warp.one(warp.address(operands[0]), active)
        self.shared[at : at + 4] = 0

    def multiply(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Later: the product of two matrices in shared memory to tensor memory, or added to it."""
        assert active.sum() == 1
        kind = op.split("kind::")[1].partition(".")[0]
        to, a, b, description = (
            warp.one(warp.value(operands[i].strip("[]")).astype(np.uint64), active) for i in range(4)
        )
        add = bool(warp.one(warp.value(operands[-1]), active))
        for name in operands[4].strip("{}").replace(" ", "").split(","):
            assert not warp.one(warp.value(name), active), "lanes of the output are left out"
        rows, columns = (description >> 24 & 31) * 16, (description >> 17 & 63) * 8
        assert description >> 4 & 3 == 1 and not description >> 13 & 15, (
            "not float32, or negated or transposed"
        )
        formats = [FORMATS[kind][description >> shift & 7] for shift in (7, 10)]
        assert rows == 128 and to >> 16 == 0 and (to & 0xFFFF) + columns <= self.allocated

        def product() -> None:
            left, right = (
                self.operand(matrix, height).view(dtype).float()
                for matrix, height, dtype in zip((a, b), (rows, columns), formats, strict=True)
            )
            here = self.tensor[:, to & 0xFFFF : (to & 0xFFFF) + columns]
            here[...] = (left @ right.T).numpy() + (here if add else 0)

        self.queues["mma"].append(product)

    def operand(self, matrix: int, rows: int) -> torch.Tensor:
        """Bytes [rows, 32] of a matrix that a descriptor names: rows of 128 bytes, swizzled, eight of them in a piece."""
        assert matrix >> 61 == 2 and matrix >> 46 & 3 == 1, "not swizzled within 128 bytes"
        start, stride = (matrix & 0x3FFF) << 4, (matrix >> 32 & 0x3FFF) << 4
        row = np.arange(rows)
        at = start + (row // 8 * stride + row % 8 * 128)[:, None] + np.arange(32)
        return torch.from_numpy(self.shared[swizzled(at, 128)])

    def commit(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """Later, when the products before it are done: an arrival."""
        assert active.sum() == 1
        barrier = self.barriers[warp.one(warp.address(operands[0]), active)]

        def arrive() -> None:
            barrier.missing -= 1
            barrier.settle()

        self.queues["mma"].append(arrive)

    def read_tensor(self, warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
        """tcgen05.ld: columns of a warp's lanes. Not later: the compiler copies the registers before tcgen05.wait, and ptxas waits for them."""
        names = operands[0].strip("{}").replace(" ", "").split(",")
        at = warp.one(warp.address(operands[1]), active)
        lane, column = at >> 16, at & 0xFFFF
        assert active.all() and lane == warp.index % 4 * 32 and column + len(names) <= self.allocated
        for i, name in enumerate(names):
            warp.registers[name] = np.ascontiguousarray(self.tensor[lane : lane + 32, column + i]).view(
                np.uint32
            )


METHODS = {
    "bar.warp": "nothing",
    "prefetch": "nothing",
    "setmaxnreg": "nothing",
    "fence.mbarrier_init": "nothing",
    "cp.async.bulk.commit_group": "nothing",
    "tcgen05.relinquish": "nothing",
    "tcgen05.wait::ld": "nothing",
    "bar.sync": "bar",
    "fence.proxy.async.shared": "fence",
    "ld.": "load",
    "st.shared": "store",
    "mbarrier.": "mbarrier",
    "cp.async.bulk.tensor.2d.shared::cta.global": "bulk_load",
    "cp.async.bulk.tensor.2d.global.shared::cta": "bulk_store",
    "cp.async.bulk.wait_group.read": "bulk_wait",
    "tcgen05.alloc": "allocate",
    "tcgen05.dealloc": "allocate",
    "tcgen05.mma": "multiply",
    "tcgen05.commit": "commit",
    "tcgen05.ld": "read_tensor",
}
"""Beginnings of instructions -> methods of `Cta`."""


def execute(
    text: str,
    parameters: Sequence[bytes | Map],
    memory: Array,
    grid: int,
    seed: int,
    machine: type[Cta] = Cta,
) -> None:
    """Execute a kernel: `grid` CTAs, one after another. memory: what addresses of global memory mean, bytes."""
    program = parse(text)
    threads = re.search(r"\.reqntid (\d+)", text)
    assert threads and len(program.parameters) == len(parameters)
    chance = random.Random(seed)
    for index in range(grid):
        machine(program, parameters, memory, index, grid, int(threads[1]) // LANES, chance).run()
