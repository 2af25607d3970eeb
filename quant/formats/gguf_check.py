"""The structure of a GGUF file, checked before anything is built from it: counts and lengths within the file, tensors apart.

The layout (ggml's docs/gguf.md, little-endian): magic, version u32, tensors u64, pairs u64; pairs of a string, a type u32 and
a value; of each tensor a name, dimensions u32, their sizes u64, a type u32, an offset u64; then, aligned, the data. A string is
its length u64 and its bytes; an array is an element type u32, a length u64 and the elements.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from gristmill.kernel_registry.scheme import cdiv

STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Value type -> bytes; 7 is bool."""
BLOCKS: Final = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    9: (32, 36),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    15: (256, 292),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    30: (1, 2),
    39: (32, 17),
}
"""ggml's number of a type -> values and bytes of a block; others are not read anyway."""
MOST_PAIRS: Final = 1 << 16
MOST_TENSORS: Final = 1 << 20
MOST_ELEMENTS: Final = 1 << 21
"""Of an array: vocabularies and merges have some hundred thousand."""


def check(path: Path, wrong: Callable[[str], Exception]) -> None:
    """Raises wrong(what) for a file whose header contradicts itself or the file's size."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        _Header(stream, size, wrong).check()


class _Header:
    def __init__(self, stream: BinaryIO, size: int, wrong: Callable[[str], Exception]) -> None:
        self.stream = stream
        self.size = size
        self.wrong = wrong
        self.alignment = 32

    def check(self) -> None:
        self._take(8)
        tensors, pairs = self._number(8), self._number(8)
        if tensors > MOST_TENSORS or pairs > MOST_PAIRS:
            raise self.wrong(f"it counts {tensors} tensors and {pairs} keys")
        keys: set[bytes] = set()
        for _ in range(pairs):
            key = self._string()
            if key in keys:
                raise self.wrong(f"key {key!r} is there twice")
            keys.add(key)
            self._value(key)
        names: set[bytes] = set()
        spans = []
        for _ in range(tensors):
            name = self._string()
            if name in names:
                raise self.wrong(f"tensor {name!r} is there twice")
            names.add(name)
            spans.append((*self._tensor(name), name))
        data = cdiv(self.stream.tell(), self.alignment) * self.alignment
        end = 0
        for start, stop, name in sorted(spans):
            if start < end:
                raise self.wrong(f"tensor {name!r} begins inside another")
            end = stop
        if data + end > self.size:
            raise self.wrong(f"{self.size} bytes, but its header describes {data + end}")

    def _tensor(self, name: bytes) -> tuple[int, int]:
        rank = self._number(4)
        if not 1 <= rank <= 4:
            raise self.wrong(f"tensor {name!r} has {rank} dimensions")
        count = 1
        first = 0
        for i in range(rank):
            dimension = self._number(8)
            first = dimension if i == 0 else first
            count *= dimension
        kind, offset = self._number(4), self._number(8)
        if count == 0 or offset % self.alignment:
            raise self.wrong(f"tensor {name!r} has no elements or its data is not aligned")
        block = BLOCKS.get(kind)
        if block is None:
            return offset, offset + 1  # refused by name later
        if first % block[0]:
            raise self.wrong(f"tensor {name!r} has rows of {first} in blocks of {block[0]}")
        return offset, offset + count // block[0] * block[1]

    def _value(self, key: bytes) -> None:
        kind = self._number(4)
        if kind in SCALARS:
            raw = self._take(SCALARS[kind])
            if key == b"general.alignment":
                self.alignment = int.from_bytes(raw, "little")
                if kind != 4 or not 8 <= self.alignment <= 1 << 16 or self.alignment & (self.alignment - 1):
                    raise self.wrong(f"an alignment of {self.alignment}")
        elif kind == STRING:
            self._string()
        elif kind == ARRAY:
            element, length = self._number(4), self._number(8)
            if length > MOST_ELEMENTS:
                raise self.wrong(f"key {key!r} is an array of {length}")
            if element in SCALARS:
                self._skip(SCALARS[element] * length)
            elif element == STRING:
                for _ in range(length):
                    self._string()
            else:
                raise self.wrong(f"key {key!r} is an array of type {element}")
        else:
            raise self.wrong(f"key {key!r} has type {kind}")

    def _string(self) -> bytes:
        return self._take(self._number(8))

    def _number(self, size: int) -> int:
        return int(struct.unpack("<I" if size == 4 else "<Q", self._take(size))[0])

    def _take(self, count: int) -> bytes:
        if count > self.size - self.stream.tell():
            raise self.wrong(f"it ends where {count} more bytes are expected")
        return self.stream.read(count)

    def _skip(self, count: int) -> None:
        if count > self.size - self.stream.tell():
            raise self.wrong(f"it ends where {count} more bytes are expected")
        self.stream.seek(count, 1)
