"""Runs PTX of straight-line kernels on the CPU, all threads at once: what a decoder of weights needs, and no more.

Each register is an array of one unsigned integer per thread. Threads share one memory, `ld.global` and `ld.shared` alike, and may not diverge.
An instruction that is not known is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
OUT = 1 << 40
"""The address from which a kernel writes."""
_STATEMENT = re.compile(r"(?:(@!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_ACCESS = re.compile(r"(?:v([24])\.)?[a-z](\d+)")


def kernels(ptx: str) -> dict[str, str]:
    """The bodies of the kernels of a module, by name."""
    return dict(re.findall(r"\.entry (\w+)\([^)]*\)[^{]*\n\{(.*?\n\tret;)\n\n\}", ptx, re.DOTALL))


def run(body: str, parameters: Mapping[int, int], memory: bytes, threads: int, out_bytes: int) -> bytes:
    """Runs a kernel's body; `parameters` by their places. Returns the bytes from `OUT` on.

    Raises:
        ValueError: an unknown instruction, threads that diverge, or an access outside of the memory.
    """
    return _Threads(parameters, memory, threads, out_bytes).run(body)


class _Threads:
    def __init__(self, parameters: Mapping[int, int], memory: bytes, threads: int, out_bytes: int) -> None:
        self.parameters, self.threads = parameters, threads
        self.memory, self.out = np.frombuffer(memory, np.uint8), np.zeros(out_bytes, np.uint8)
        self.registers: dict[str, Words] = {}

    def run(self, body: str) -> bytes:
        statements, labels = list(_statements(body)), {}
        for at, text in enumerate(statements):
            if text.endswith(":"):
                labels[text[:-1]] = at
        at = 0
        while at < len(statements):
            text, at = statements[at], at + 1
            match = _STATEMENT.fullmatch(text)
            if match is None or text.endswith(":"):
                continue
            guard, name, rest = match.groups()
            operands = _OPERAND.findall(rest)
            if guard is not None:
                taken = self.registers[guard.strip("@!")].astype(bool) != guard.startswith("@!")
                if bool(taken.any()) != bool(taken.all()):
                    raise ValueError(f"threads diverge: {text}")
                if not taken.any():
                    continue
            if name == "ret":
                break
            if name.startswith("bra"):
                at = labels[operands[0]]
            else:
                self.execute(name, operands, text)
        return self.out.tobytes()

    def value(self, operand: str) -> Words:
        if operand.startswith("{"):  # two halves of a word
            low, high = (self.value(part) for part in _OPERAND.findall(operand[1:-1]))
            return low | high << np.uint64(16)
        if operand == "%tid.x":
            return np.arange(self.threads, dtype=np.uint64)
        if operand in self.registers:
            return self.registers[operand]
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand.rstrip("U"), 0)
        return np.full(self.threads, number % 2**64, np.uint64)

    def execute(self, name: str, operands: list[str], text: str) -> None:
        operation, *kinds = name.split(".")
        if operation in ("ld", "st") and kinds[0] != "param":
            self.access(operation, name, operands)
            return
        if operation == "ld":
            place = int(operands[1].strip("[]").rpartition("_")[2])
            self.registers[operands[0]] = np.full(self.threads, self.parameters[place], np.uint64)
            return
        given = [self.value(operand) for operand in operands[1:]]
        known = _EXACT.get(name) or _INTEGER.get(operation)
        if known is None or (name not in _EXACT and operation in _ROUNDED and "f" in kinds[-1]):
            raise ValueError(f"unknown instruction: {text}")
        with np.errstate(over="ignore", under="ignore"):
            result = known(_extended(given, kinds[-1]) if kinds[-1].startswith("s") else given)
        wide = "wide" in kinds or (kinds[-2] if operation == "cvt" else kinds[-1]).endswith("64")
        result = result.astype(np.uint64) & np.uint64(2**64 - 1 if wide else 2**32 - 1)
        if operands[0].startswith("{"):
            low, high = _OPERAND.findall(operands[0][1:-1])
            self.registers[low], self.registers[high] = result & np.uint64(0xFFFF), result >> np.uint64(16)
        else:
            self.registers[operands[0]] = result

    def access(self, operation: str, name: str, operands: list[str]) -> None:
        match = _ACCESS.fullmatch(name.split(".", 2)[2])
        assert match is not None, name
        count, size = int(match[1] or 1), int(match[2]) // 8
        place, others = (operands[1], operands[0]) if operation == "ld" else (operands[0], operands[1])
        base, _, offset = place.strip("[]").partition("+")
        address = self.value(base).astype(np.int64) + int(offset or 0)
        for i, register in enumerate(_OPERAND.findall(others.strip("{}"))[:count]):
            octets = address[:, None] + i * size + np.arange(size)
            if operation == "ld":
                if octets.min() < 0 or octets.max() >= self.memory.size or (address % (count * size)).any():
                    raise ValueError(f"an access outside of the memory, or unaligned: {name} {operands}")
                wide = np.zeros((self.threads, 8), np.uint8)
                wide[:, :size] = self.memory[octets]
                self.registers[register] = wide.view(np.uint64)[:, 0]
            else:
                self.out[octets - OUT] = self.value(register)[:, None].view(np.uint8)[:, :size]


def _statements(body: str) -> Iterator[str]:
    """Statements and labels; the braces of inline assembly are left out, its registers are not declared."""
    text = re.sub(r"//[^\n]*", "", body)
    text = re.sub(r"\n(\$\w+):", r"\n;\1:;", text)
    for part in text.split(";"):
        part = re.sub(r"^[\s{}]*", "", part).rstrip()
        if part and not part.startswith("."):
            yield part


def _extended(given: list[Words], kind: str) -> list[Words]:
    """Signed integers of a width, sign-extended."""
    width = np.uint64(64 - int(kind[1:]))
    return [(one << width).view(np.int64) >> width.astype(np.int64) for one in given]  # type: ignore[misc]


def _lop3(given: list[Words]) -> Words:
    a, b, c, table = given
    result = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _prmt(given: list[Words]) -> Words:
    both, result = given[0] | given[1] << np.uint64(32), np.zeros_like(given[0])
    for i in range(4):
        chosen = given[2] >> np.uint64(4 * i)
        octet = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = (octet >> np.uint64(7)) * np.uint64(255)  # in all of its bits
        result |= np.where(chosen & np.uint64(8), sign, octet) << np.uint64(8 * i)
    return result


def _to_float(bits: Words, kind: str) -> npt.NDArray[np.float64]:
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return (
        (bits.astype(np.uint32) << np.uint32(16 if kind == "bf16" else 0)).view(np.float32).astype(np.float64)
    )


def _rounded(value: npt.NDArray[np.float64], kind: str) -> Words:
    """The bits of the nearest number of a kind, of those at equal distance the even one."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16).astype(np.uint64)
    single = value.astype(np.float32)
    if kind == "f32":
        return single.view(np.uint32).astype(np.uint64)
    if (single.astype(np.float64) != value).any():
        raise ValueError("a result that float32 cannot hold would be rounded twice")
    bits = single.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)).astype(
        np.uint64
    )


def _fma(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], c: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """a b + c; ValueError if float64 cannot hold it. Products of two 16-bit numbers are exact."""
    product = a * b
    total = product + c
    from_c = total - product
    if ((product - (total - from_c)) + (c - from_c)).any():
        raise ValueError("a sum that float64 cannot hold would be rounded twice")
    return total


def _pairs(kind: str, operation: Callable[..., npt.NDArray[np.float64]]) -> Callable[[list[Words]], Words]:
    def both(given: list[Words]) -> Words:
        low, high = (
            _rounded(
                operation(*(_to_float(one >> np.uint64(shift) & np.uint64(0xFFFF), kind) for one in given)),
                kind,
            )
            for shift in (0, 16)
        )
        return low | high << np.uint64(16)

    return both


def _singles(operation: Callable[..., npt.NDArray[np.float64]]) -> Callable[[list[Words]], Words]:
    return lambda given: _rounded(operation(*(_to_float(one, "f32") for one in given)), "f32")


_ROUNDED = ("add", "sub", "mul", "mad")
"""Operations that another function does for floats than for integers."""
_INTEGER: dict[str, Callable[[list[Words]], Words]] = {
    "add": lambda g: g[0] + g[1],
    "and": lambda g: g[0] & g[1],
    "or": lambda g: g[0] | g[1],
    "xor": lambda g: g[0] ^ g[1],
    "shl": lambda g: g[0] << g[1],
    "shr": lambda g: g[0] >> g[1],
    "mul": lambda g: g[0] * g[1],
    "mad": lambda g: g[0] * g[1] + g[2],
    "mov": lambda g: g[0],
    "cvta": lambda g: g[0],
    "cvt": lambda g: g[0],
    "lop3": _lop3,
    "prmt": _prmt,
}
_EXACT: dict[str, Callable[[list[Words]], Words]] = {
    "setp.eq.s32": lambda g: (g[0] == g[1]).astype(np.uint64),
    "shf.l.wrap.b32": lambda g: (g[1] << np.uint64(32) | g[0]) << (g[2] & np.uint64(31)) >> np.uint64(32),
    "fma.rn.bf16x2": _pairs("bf16", _fma),
    "fma.rn.f16x2": _pairs("f16", _fma),
    "mul.f16x2": _pairs("f16", lambda a, b: a * b),
    "mul.rn.f16x2": _pairs("f16", lambda a, b: a * b),
    "sub.rn.f16x2": _pairs("f16", lambda a, b: a - b),
    "add.f32": _singles(lambda a, b: a + b),
    "neg.f32": lambda g: g[0] ^ np.uint64(1 << 31),
    "mul.f32": _singles(lambda a, b: a * b),
    "fma.rn.f32": _singles(_fma),
    "sub.f32": _singles(lambda a, b: a - b),
    "cvt.f32.f16": lambda g: _rounded(_to_float(g[0] & np.uint64(0xFFFF), "f16"), "f32"),
    "cvt.rn.bf16x2.f32": lambda g: (
        _rounded(_to_float(g[1], "f32"), "bf16") | _rounded(_to_float(g[0], "f32"), "bf16") << np.uint64(16)
    ),
    "cvt.rn.f16x2.f32": lambda g: (
        _rounded(_to_float(g[1], "f32"), "f16") | _rounded(_to_float(g[0], "f32"), "f16") << np.uint64(16)
    ),
}
"""By the whole name, before those by the operation."""
