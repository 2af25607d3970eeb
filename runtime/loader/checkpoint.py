"""A directory of safetensors files: everything checked before anything is mapped, then one tensor at a time.

The format (huggingface/safetensors): 8 bytes of little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, the data. Pickle files are never opened.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gristmill.runtime.errors import CheckpointError
from gristmill.runtime.loader.config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100 << 20
"""The format's own bound on a header's bytes."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What weights that are not quantized may be stored in."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor is and what it is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a model directory, by name.

    Raises:
        CheckpointError: no safetensors files, a shard that the index names and nobody has, a file that is truncated or
            corrupt, a tensor that the index names and its shard lacks, or that two shards have.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, Entry] = {}
        expected = self._index()
        for file in sorted(set(expected.values())):
            for name, entry in read_header(self.directory / file).items():
                if name in self.entries:
                    raise CheckpointError(
                        f"tensor {name} is both in {self.entries[name].file.name} and in {file}"
                    )
                self.entries[name] = entry
        for name, file in expected.items():
            if name and (name not in self.entries or self.entries[name].file.name != file):
                raise CheckpointError(
                    f"{self.directory / file} lacks tensor {name}, which {INDEX} says it holds"
                )
        self._open: tuple[Path, Any] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Stored dtype and shape; CheckpointError when there is none of that name."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """A tensor, in its stored dtype, on the CPU; its memory is the file's mapping: copy what is to be kept.

        Raises:
            CheckpointError: there is none of that name, its shape is not `shape`, its dtype none of `dtypes`.
        """
        entry = self._entry(name)
        if dtypes is not None and entry.dtype not in dtypes:
            *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            expected = f"{', '.join(others)} or {last}" if others else last
            raise CheckpointError(f"{entry.file}: tensor {name} must be {expected}, got {entry.dtype}")
        if shape is not None and entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name} must have shape {list(shape)}, got {list(entry.shape)}"
            )
        if self._open is None or self._open[0] != entry.file:
            try:
                self._open = (entry.file, safe_open(entry.file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{entry.file} cannot be opened: {error}") from error
        tensor: Tensor = self._open[1].get_tensor(name)
        return tensor

    def _entry(self, name: str) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory} has no tensor {name}")
        return entry

    def _index(self) -> dict[str, str]:
        """Tensor -> file; of a single file, "" -> file."""
        index = self.directory / INDEX
        if not index.is_file():
            if (self.directory / SINGLE).is_file():
                return {"": SINGLE}
            pickled = any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pt*"))
            hint = "; pickled weights are never read: convert them to safetensors" if pickled else ""
            raise CheckpointError(f"{self.directory} has neither {SINGLE} nor {INDEX}{hint}")
        expected = read_json(index).get("weight_map")
        if (
            not isinstance(expected, dict)
            or not expected
            or not all(isinstance(f, str) for f in expected.values())
        ):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        for name, file in expected.items():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index}: {file!r} is no safetensors file of this folder")
            if not (self.directory / file).is_file():
                count = sum(f == file for f in expected.values())
                raise CheckpointError(
                    f"missing shard {self.directory / file}: {INDEX} puts {count} tensors there, {name} among them"
                )
        return dict(expected)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file, every size checked against the file's; CheckpointError names file and fault."""

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{file} is truncated or corrupt: {what}")

    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            if len(first) < 8:
                raise wrong(f"{size} bytes, shorter than a header's length")
            length = struct.unpack("<Q", first)[0]
            if length > min(MAX_HEADER, size - 8):
                raise wrong(f"a header of {length} bytes in a file of {size}")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong("its header is not JSON") from error
    if not isinstance(header, dict):
        raise wrong("its header is no JSON object")
    header.pop("__metadata__", None)
    found = {name: _entry(file, name, value, wrong) for name, value in header.items()}
    end = 0
    for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = value["data_offsets"]
        if start != end:
            raise wrong(f"tensor {name} begins at byte {start} of the data, expected {end}")
        end = stop
    if size != 8 + length + end:
        raise wrong(f"{size} bytes, but its header describes {8 + length + end}")
    return found


def _entry(file: Path, name: str, value: Any, wrong: Any) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype = DTYPES.get(str(fields.get("dtype")))
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if dtype is None:
        raise wrong(f"tensor {name} has dtype {fields.get('dtype')!r}")
    for numbers, what in ((shape, "shape"), (offsets, "data_offsets")):
        good = isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        if not good or (what == "data_offsets" and len(numbers) != 2):
            raise wrong(f"tensor {name} has {what} {numbers!r}")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise wrong(f"tensor {name} of {dtype} {shape} has {offsets[1] - offsets[0]} bytes")
    return Entry(file, dtype, tuple(shape))
