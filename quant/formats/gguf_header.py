"""The header of a GGUF file: key-value pairs, and where each tensor is. Everything is checked against the file before it is used.

The layout (ggml's docs/gguf.md, versions 2 and 3, little-endian): magic, version u32, tensors u64, pairs u64; pairs of a string, a
type u32 and a value; of each tensor a name, dimensions u32, their sizes u64, a type u32, an offset u64; then, aligned, the data. A
string is its length u64 and its bytes; an array is an element type u32, a length u64 and the elements.

The file is mapped once. Arrays are checked with the rest of the header and decoded on request: a vocabulary has some hundred
thousand strings.
"""

from __future__ import annotations

import math
import mmap
import struct
from ctypes import addressof, c_char, c_int64
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant.formats.args import STRINGS
from gristmill.quant.formats.contract import FormatError
from gristmill.quant.native import packing_function

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Value type -> its code in `struct`."""
ALIGNMENT_TYPE: Final = 4  # u32

BLOCKS: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""ggml's number of a tensor type -> its name, and the values and bytes of a block."""

MAX_PAIRS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 20
MAX_ELEMENTS: Final = 1 << 21
"""The most elements of an array: vocabularies and merges have some hundred thousand."""
MAX_DIMENSIONS: Final = 4


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the file.

    Attributes:
        shape: row-major, so that the last dimension is contiguous.
        kind: ggml's name of its type.
        start: the position of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class _ArrayEntry:
    """An array in the header, with the type of its elements, the position of the first one, and the bytes of all of them."""

    element: int
    length: int
    start: int
    size: int


class GgufHeader:
    """The header of a file, and its mapping.

    Attributes:
        data: the file, copy-on-write, so that tensors over it are writable to torch and the file is not.
        tensors: the tensors in the order of the file.
        metadata: the pairs with scalars and strings; arrays are returned by `array`.

    Raises:
        FormatError: the file cannot be read, is no GGUF file of a known version, or its header contradicts itself or the file's size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = _mapped(path)
        self._position = 8
        self._arrays: dict[str, _ArrayEntry] = {}
        self._alignment = 32
        tensors, pairs = self._number("Q"), self._number("Q")
        if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
            raise self._corrupt(f"it counts {tensors} tensors and {pairs} keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            self._read_pair()
        entries = [self._read_tensor() for _ in range(tensors)]
        data = cdiv(self._position, self._alignment) * self._alignment
        self.tensors: tuple[TensorEntry, ...] = self._placed(entries, data)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of all pairs."""
        return (*self.metadata, *self._arrays)

    def value(self, key: str) -> Any:
        """The value of a key, arrays as lists.

        Raises:
            KeyError: there is no such key. FormatError: strings of an array are not UTF-8.
        """
        return self._decoded(key, self._arrays[key]) if key in self._arrays else self.metadata[key]

    def _decoded(self, key: str, entry: _ArrayEntry) -> list[Any]:
        if entry.element != STRING:
            return list(
                struct.unpack_from(f"<{entry.length}{SCALARS[entry.element]}", self.data, entry.start)
            )
        try:
            return self._strings(entry)
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{key}: {error}") from error

    def _strings(self, entry: _ArrayEntry) -> list[str]:
        """The strings of an array: decoded as one text with a 0 between them, or singly if one of them has a 0."""
        walk = packing_function("gm_gguf_strings", STRINGS)
        if walk is not None and entry.length:
            text = bytearray(entry.size - 7 * entry.length)
            out, end = (c_char * len(text)).from_buffer(text), c_int64()
            walk(
                data=self._address(),
                size=len(self.data),
                start=entry.start,
                count=entry.length,
                out=addressof(out),
                end=addressof(end),
            )
            values = text[:-1].decode().split("\0")
            if len(values) == entry.length:
                return values
        data, position, lengths = self.data, entry.start, struct.Struct("<Q")
        values = []
        for _ in range(entry.length):
            begin = position + 8
            position = begin + lengths.unpack_from(data, position)[0]
            values.append(data[begin:position].decode())
        return values

    def _address(self) -> int:
        """The address of the first byte of the file in memory."""
        return torch.frombuffer(self.data, dtype=torch.uint8).data_ptr()

    def _read_pair(self) -> None:
        key = self._text("a key")
        if key in self.metadata or key in self._arrays:
            raise self._corrupt(f"key {key!r} is there twice")
        kind = self._number("I")
        if kind in SCALARS:
            value = self._number(SCALARS[kind])
            if key == "general.alignment":
                if kind != ALIGNMENT_TYPE or not 8 <= value <= 1 << 16 or value & (value - 1):
                    raise self._corrupt(f"an alignment of {value}")
                self._alignment = value
            self.metadata[key] = value
        elif kind == STRING:
            self.metadata[key] = self._text(f"key {key!r}")
        elif kind == ARRAY:
            self._arrays[key] = self._read_array(key)
        else:
            raise self._corrupt(f"key {key!r} has type {kind}")

    def _read_array(self, key: str) -> _ArrayEntry:
        """The place of an array, whose elements are passed over."""
        element, length = self._number("I"), self._number("Q")
        if length > MAX_ELEMENTS:
            raise self._corrupt(f"key {key!r} is an array of {length}")
        start = self._position
        if element in SCALARS:
            self._skip(struct.calcsize(f"<{SCALARS[element]}") * length)
        elif element == STRING:
            self._skip_strings(key, length)
        else:
            raise self._corrupt(f"key {key!r} is an array of type {element}")
        return _ArrayEntry(element, length, start, self._position - start)

    def _skip_strings(self, key: str, count: int) -> None:
        data, position, size = self.data, self._position, len(self.data)
        walk = packing_function("gm_gguf_strings", STRINGS)
        if walk is not None:
            end = c_int64()
            try:
                walk(
                    data=self._address(), size=size, start=position, count=count, out=None, end=addressof(end)
                )
            except ValueError as error:
                raise self._corrupt(f"it ends inside the strings of {key!r}") from error
            self._position = end.value
            return
        lengths = struct.Struct("<Q")
        for _ in range(count):
            if position + 8 > size:
                raise self._corrupt(f"it ends inside the strings of {key!r}")
            position += 8 + lengths.unpack_from(data, position)[0]
        if position > size:
            raise self._corrupt(f"it ends inside the strings of {key!r}")
        self._position = position

    def _read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type, and offset in the data."""
        name, rank = self._text("a tensor's name"), self._number("I")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], data: int
    ) -> tuple[TensorEntry, ...]:
        """The tensors, each within the file and apart from the others. Their data begin at byte `data`."""
        tensors = []
        for name, shape, kind, offset in entries:
            if kind not in BLOCKS:
                raise self._corrupt(f"tensor {name!r} has type {kind}, which is not a type of ggml")
            kind_name, values, size = BLOCKS[kind]
            count = math.prod(shape)
            if count == 0 or offset % self._alignment:
                raise self._corrupt(f"tensor {name!r} has no elements or its data is not aligned")
            if shape[-1] % values:
                raise self._corrupt(f"tensor {name!r} has rows of {shape[-1]} in blocks of {values}")
            tensors.append(TensorEntry(name, shape, kind_name, data + offset, count // values * size))
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names:
                raise self._corrupt(f"tensor {tensor.name!r} is there twice")
            names.add(tensor.name)
        end = data
        for tensor in sorted(tensors, key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise self._corrupt(f"tensor {tensor.name!r} begins inside another")
            end = tensor.start + tensor.nbytes
        if end > len(self.data):
            raise self._corrupt(f"{len(self.data)} bytes, but its header describes {end}")
        return tuple(tensors)

    def _text(self, what: str) -> str:
        length = self._number("Q")
        self._need(length)
        start, self._position = self._position, self._position + length
        try:
            return self.data[start : self._position].decode()
        except UnicodeDecodeError as error:
            raise self._corrupt(f"{what} is not UTF-8: {error}") from error

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        self._need(size)
        value = struct.unpack_from(f"<{code}", self.data, self._position)[0]
        self._position += size
        return value

    def _skip(self, count: int) -> None:
        self._need(count)
        self._position += count

    def _need(self, count: int) -> None:
        if count > len(self.data) - self._position:
            raise self._corrupt("it ends inside its header")

    def _corrupt(self, what: str) -> FormatError:
        return FormatError(f"{self.path} is truncated or corrupt: {what}")


def _mapped(path: Path) -> mmap.mmap:
    """The mapping of a file with the magic and version of a GGUF file."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(8)
            if magic[:4] != MAGIC:
                raise FormatError(f"{path} is not a GGUF file: it begins with {magic[:4]!r}")
            version = int.from_bytes(magic[4:8], "little")
            if len(magic) == 8 and version not in VERSIONS:
                known = ", ".join(map(str, VERSIONS))
                raise FormatError(
                    f"{path}: GGUF version {version} is not read (or its byte order is big-endian); known: {known}"
                )
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
