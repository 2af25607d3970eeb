"""The header of GGUF files: pairs and tensors against the gguf package's reader, and files whose header is wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.quant.formats import FormatError, gguf_header
from gristmill.quant.formats.gguf_header import ARRAY, BLOCKS, STRING, GgufHeader

U32 = 4
VALUES: dict[str, Any] = {
    "a.text": "naïve ☕",
    "a.empty": "",
    "a.flag": True,
    "a.words": ["", "é", "x" * 300],
    "a.numbers": [1, 2, 1 << 20],
    "a.floats": [0.5, -2.0],
    "a.none": 7,
}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def test_types_are_the_packages() -> None:
    gguf = pytest.importorskip("gguf")
    for number, (name, values, size) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name and gguf.GGML_QUANT_SIZES[kind] == (values, size)


def test_pairs_and_tensors_are_the_packages(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for key, value in VALUES.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    arrays = [np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.arange(7, dtype=np.float16)]
    for i, array in enumerate(arrays):
        writer.add_tensor(f"t{i}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = GgufHeader(path)
    assert {key: header.value(key) for key in VALUES} == VALUES
    assert set(header.keys) == {*VALUES, "general.architecture", "general.alignment"}
    assert not {"a.words", "a.numbers"} & header.metadata.keys()  # arrays are decoded on request
    expected = gguf.GGUFReader(path).tensors
    assert [(t.name, t.start) for t in header.tensors] == [(t.name, t.data_offset) for t in expected]
    for entry, array in zip(header.tensors, arrays, strict=True):
        assert entry.shape == array.shape and entry.nbytes == array.nbytes
        assert header.data[entry.start : entry.start + entry.nbytes] == array.tobytes()


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file([pair(b"k", U32, struct.pack("<I", 5))], [tensor(b"t", (8,))], 32, version=2))
    assert GgufHeader(path).metadata == {"k": 5}


HUGE = struct.pack("<Q", (1 << 64) - 1)
BROKEN: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "is not a GGUF file: it begins with b''"),
    "magic": (lambda: b"GGML" + file([], [])[4:], "is not a GGUF file"),
    "version 1": (lambda: file([], [], version=1), "GGUF version 1 is not read .* known: 2, 3"),
    "version 4": (lambda: file([], [], version=4), "GGUF version 4 is not read"),
    "big-endian": (lambda: b"GGUF" + struct.pack(">I", 3) + bytes(16), "its byte order is big-endian"),
    "magic alone": (lambda: b"GGUF", "ends inside its header"),
    "half a version": (lambda: b"GGUF\3\0", "ends inside its header"),
    "counts": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1),
        "counts 1099511627776 tensors and 1 keys",
    ),
    "keys": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "counts 0 tensors and 1099511627776 keys"),
    "missing pairs": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 9), "ends inside its header"),
    "length of a key": (lambda: file([HUGE], []), "ends inside its header"),
    "key twice": (lambda: file([pair(b"k", 0, b"\1")] * 2, []), "key 'k' is there twice"),
    "key of other text": (lambda: file([pair(b"\xff", 0, b"\1")], []), "a key is not UTF-8"),
    "value of other text": (lambda: file([pair(b"k", STRING, text(b"\xff"))], []), "key 'k' is not UTF-8"),
    "type of a value": (lambda: file([pair(b"k", 13, b"")], []), "key 'k' has type 13"),
    "alignment": (
        lambda: file([pair(b"general.alignment", U32, struct.pack("<I", 24))], []),
        "an alignment of 24",
    ),
    "alignment of 0": (
        lambda: file([pair(b"general.alignment", U32, struct.pack("<I", 0))], []),
        "an alignment of 0",
    ),
    "nested array": (
        lambda: file([pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))], []),
        "key 'k' is an array of type 9",
    ),
    "long array": (
        lambda: file([pair(b"k", ARRAY, struct.pack("<IQ", U32, 1 << 30))], []),
        "key 'k' is an array of 1073741824",
    ),
    "array past the end": (
        lambda: file([pair(b"k", ARRAY, struct.pack("<IQ", U32, 1 << 20))], []),
        "ends inside its header",
    ),
    "strings past the end": (
        lambda: file([pair(b"k", ARRAY, struct.pack("<IQ", STRING, 1 << 20))], []),
        "ends inside the strings of 'k'",
    ),
    "a string past the end": (
        lambda: file([pair(b"k", ARRAY, struct.pack("<IQ", STRING, 1) + HUGE)], []),
        "ends inside the strings of 'k'",
    ),
    "dimensions": (lambda: file([], [tensor(b"t", (1,) * 5)], 32), "tensor 't' has 5 dimensions"),
    "no dimension": (lambda: file([], [tensor(b"t", ())], 32), "tensor 't' has 0 dimensions"),
    "no elements": (lambda: file([], [tensor(b"t", (0, 4))], 32), "tensor 't' has no elements"),
    "not aligned": (lambda: file([], [tensor(b"t", (4,), offset=16)], 64), "its data is not aligned"),
    "type of a tensor": (
        lambda: file([], [tensor(b"t", (4,), kind=99)], 32),
        "type 99, which is not a type of ggml",
    ),
    "part of a block": (lambda: file([], [tensor(b"t", (40,), kind=8)], 64), "rows of 40 in blocks of 32"),
    "tensor twice": (
        lambda: file([], [tensor(b"t", (8,)), tensor(b"t", (8,), offset=32)], 64),
        "tensor 't' is there twice",
    ),
    "overlap": (
        lambda: file([], [tensor(b"t", (16,)), tensor(b"u", (8,), offset=32)], 64),
        "tensor 'u' begins inside another",
    ),
    "past the end": (lambda: file([], [tensor(b"t", (8,), offset=1 << 40)], 32), "but its header describes"),
    "a product past 64 bits": (
        lambda: file([], [tensor(b"t", ((1 << 63) - 1,) * 3)], 32),
        "but its header describes",
    ),
    "truncated": (lambda: file([], [tensor(b"t", (8,))], 31), "but its header describes"),
}


@pytest.fixture(params=["C++", "Python"])
def strings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of strings by the native library, and without it."""
    if request.param == "Python":
        monkeypatch.setattr(gguf_header, "packing_function", lambda *_: None)
    else:
        assert gguf_header.packing_function("gm_gguf_strings", gguf_header.STRINGS) is not None


@pytest.mark.usefixtures("strings")
@pytest.mark.parametrize(
    "words", [[], [""], ["", "", ""], ["a"], ["\0", "é\0", ""], ["☕" * 99, "", "x\n"] * 257], ids=range(6)
)
def test_arrays_of_strings(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    data = b"".join(text(word.encode()) for word in words)
    after = pair(b"after", U32, struct.pack("<I", 5))
    path.write_bytes(file([pair(b"words", ARRAY, struct.pack("<IQ", STRING, len(words)) + data), after], []))
    header = GgufHeader(path)
    assert header.value("words") == words and header.value("after") == 5


@pytest.mark.usefixtures("strings")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers(name: str, tmp_path: Path) -> None:
    make, message = BROKEN[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(make())
    with pytest.raises(FormatError, match=message) as raised:
        GgufHeader(path)
    assert str(path) in str(raised.value)


@pytest.mark.usefixtures("strings")
def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = file(
        [pair(b"words", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"a") + text(b"bc"))],
        [tensor(b"t", (8,)), tensor(b"u", (32,), 8, 32)],
        32 + 34,
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    assert GgufHeader(path).value("words") == ["a", "bc"]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            GgufHeader(path)


@pytest.mark.usefixtures("strings")
def test_strings_that_are_not_text(tmp_path: Path) -> None:
    """They are found when the array is decoded."""
    path = tmp_path / "m.gguf"
    path.write_bytes(file([pair(b"words", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff"))], []))
    with pytest.raises(FormatError, match="truncated or corrupt: words: .* invalid start byte"):
        GgufHeader(path).value("words")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(FormatError, match="cannot read"):
            GgufHeader(path)
