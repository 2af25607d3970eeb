"""Arithmetic of PTX on 32 lanes: instructions whose result depends on registers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from tests.integrations.cutedsl.ptx_machine import Warp

Array = npt.NDArray[Any]
BITS: dict[str, Any] = {
    **dict.fromkeys(("b8", "u8"), np.uint8),
    **dict.fromkeys(("b16", "u16", "s16", "bf16", "f16"), np.uint16),
    **dict.fromkeys(("b32", "u32", "s32", "f32"), np.uint32),
    **dict.fromkeys(("b64", "u64", "s64", "f32x2"), np.uint64),
    "pred": bool,
}
"""Type in the name of an instruction -> bits of a register."""
POISON = {"uint16": 0x7FC0, "uint32": 0x7FC00000, "uint64": 0x7FC000007FC00000, "bool": False}


def signed(values: Array) -> Array:
    return values.view({2: np.int16, 4: np.int32, 8: np.int64}[values.itemsize])


def floats(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.float32)


def bits(values: Array) -> Array:
    return np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)


def fma(a: Array, b: Array, c: Array) -> Array:
    return (floats(a).astype(np.float64) * floats(b) + floats(c)).astype(np.float32).view(np.uint32)


def halves(values: Array) -> tuple[Array, Array]:
    return (values & 0xFFFFFFFF).astype(np.uint32), (values >> np.uint64(32)).astype(np.uint32)


def joined(low: Array, high: Array) -> Array:
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)


def rounded(values: Array, dtype: torch.dtype) -> Array:
    """float32 to 16 bits, to nearest even."""
    return torch.from_numpy(floats(values)).to(dtype).view(torch.int16).numpy().view(np.uint16)


def widened(values: Array, dtype: torch.dtype) -> Array:
    """16 bits to float32."""
    return torch.from_numpy(values.view(np.int16)).view(dtype).float().numpy().view(np.uint32)


SIXTEEN = {"bf16": torch.bfloat16, "f16": torch.float16}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
SIGNED = {"min": np.minimum, "max": np.maximum}
TWO: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
    "min": np.minimum,
    "max": np.maximum,
}


def execute(warp: Warp, op: str, operands: tuple[str, ...], active: Array) -> None:
    """Execute an instruction, or refuse it."""
    name, _, kind = op.rpartition(".")
    first = operands[0]
    with np.errstate(all="ignore"):
        if name.startswith("mov"):
            move(warp, kind, operands, active)
        elif op == "elect.sync":
            lane = int(np.flatnonzero(active)[0])
            _, predicate = first.split("|")
            warp.write(predicate, np.arange(len(active)) == lane, active)
        elif op == "vote.sync.all.pred":
            everyone = bool(warp.value(operands[1])[active].all())
            warp.write(first, np.full(len(active), everyone), active)
        elif op == "shfl.sync.idx.b32":
            assert active.all()
            warp.write(first, warp.value(operands[1])[warp.value(operands[2]).astype(np.int64) & 31], active)
        elif op == "shfl.sync.up.b32":
            assert active.all()
            lane = np.arange(len(active))
            below = lane - int(operands[2])
            warp.write(first, warp.value(operands[1])[np.where(below < 0, lane, below)], active)
        elif op == "vote.sync.ballot.b32":
            assert active.all()
            votes = int(np.packbits(warp.value(operands[1]), bitorder="little").view(np.uint32)[0])
            warp.write(first, np.full(len(active), votes, np.uint32), active)
        else:
            warp.write(first, result(op, name, kind, [warp.value(one, kind) for one in operands[1:]]), active)


def move(warp: Warp, kind: str, operands: tuple[str, ...], active: Array) -> None:
    """mov, with the packing and unpacking of pairs."""
    to, source = operands
    if to.startswith("{"):
        value = np.ascontiguousarray(warp.value(source, kind))
        small = value.view(np.uint32 if kind == "b64" else np.uint16).reshape(-1, 2)
        for i, name in enumerate(to.strip("{}").split(",")):
            warp.write(name.strip(), np.ascontiguousarray(small[:, i]), active)
    elif source.startswith("{"):
        pair = [warp.value(one.strip()) for one in source.strip("{}").split(",")]
        whole = (
            joined(*pair)
            if kind == "b64"
            else (joined(*pair) | joined(*pair) >> np.uint64(16)).astype(np.uint32)
        )
        warp.write(to, whole, active)
    else:
        warp.write(to, warp.value(source, kind).astype(BITS[kind]), active)


def result(op: str, name: str, kind: str, values: list[Array]) -> Array:
    """The value of an instruction of its operands' bits."""
    head = op.partition(".")[0]
    if op.startswith("setp"):
        sides = [signed(one) if kind.startswith("s") else one for one in values]
        return COMPARE[op.split(".")[1]](sides[0], sides[1])
    if head == "selp":
        return np.where(values[2].astype(bool), values[0], values[1])
    if op in ("cvta.param.u64", "cvt.u64.u32"):
        return values[0].astype(np.uint64)
    if op == "cvt.s64.s32":
        return signed(values[0]).astype(np.int64).view(np.uint64)
    if op in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        high, low = (rounded(one, SIXTEEN[op.split(".")[2][:-2]]).astype(np.uint32) for one in values)
        return high << np.uint32(16) | low
    if op in ("cvt.rn.bf16.f32", "cvt.rn.f16.f32"):
        return rounded(values[0], SIXTEEN[op.split(".")[2]]).astype(np.uint16)
    if op in ("cvt.f32.bf16", "cvt.f32.f16"):
        return widened(values[0], SIXTEEN[kind])
    if op == "add.rn.f32.bf16":
        return bits(floats(widened(values[0], torch.bfloat16)) + floats(values[1]))
    if op == "fma.rn.f32x2":
        pairs = [halves(one) for one in values]
        return joined(fma(*(pair[0] for pair in pairs)), fma(*(pair[1] for pair in pairs)))
    if kind == "f32":
        return of_floats(op, values)
    if op == "not.pred":
        return ~values[0]
    if op in ("neg.s32", "neg.s64"):
        return TWO["sub"](np.zeros(values[0].shape, values[0].dtype), values[0])
    if op in ("mul.wide.s16", "mul.wide.s32"):
        wide: Array = signed(values[0]).astype(np.int64) * signed(values[1]).astype(np.int64)
        return wide.view(np.uint64) if kind == "s32" else wide.astype(np.int32).view(np.uint32)
    if op == "mul.wide.u32":
        return values[0].astype(np.uint64) * values[1].astype(np.uint64)
    if op == "cvt.u16.u32":
        return values[0].astype(np.uint16)
    if op == "cvt.s32.s16":
        return signed(values[0]).astype(np.int32).view(np.uint32)
    if op == "cvt.u32.u64":
        return values[0].astype(np.uint32)
    if op in ("mad.lo.s32", "mad.lo.s64"):
        return TWO["add"](values[0] * values[1], values[2])
    if head == "shl":
        return TWO["shl"](values[0], values[1].astype(values[0].dtype))
    if head == "shr":
        side = signed(values[0]) if kind.startswith("s") else values[0]
        moved: Array = side >> values[1].astype(side.dtype)
        return moved.view(values[0].dtype)
    if head in ("div", "rem") and kind.startswith("u"):
        return (np.floor_divide if head == "div" else np.remainder)(values[0], np.maximum(values[1], 1))
    if head in ("div", "rem"):
        a, b = (signed(one).astype(np.int64) for one in values)
        quotient = np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1))
        divided: Array = quotient if head == "div" else a - quotient * b
        return divided.astype(signed(values[0]).dtype).view(values[0].dtype)
    if head in SIGNED and kind.startswith("s"):
        return SIGNED[head](signed(values[0]), signed(values[1])).view(values[0].dtype)
    if head == "popc":
        return np.array([int(value).bit_count() for value in values[0]], np.uint32)
    if name in TWO:
        return TWO[name](*values)
    raise AssertionError(f"{op} is not modelled")


def of_floats(op: str, values: list[Array]) -> Array:
    """float32 arithmetic, rounded to nearest; of the approximate functions, the exact ones."""
    numbers = [floats(one) for one in values]
    if op == "mul.f32":
        return bits(numbers[0] * numbers[1])
    if op == "add.f32":
        return bits(numbers[0] + numbers[1])
    if op == "fma.rn.f32":
        return fma(*values)
    if op == "neg.f32":
        return bits(-numbers[0])
    if op in ("min.f32", "max.f32"):
        return bits((np.fmin if op == "min.f32" else np.fmax)(*numbers))
    if op == "div.rn.f32":
        return bits(numbers[0] / numbers[1])
    if op == "ex2.approx.ftz.f32":
        return bits(np.exp2(numbers[0]))
    raise AssertionError(f"{op} is not modelled")
