"""A Hugging Face directory: config.json, a tokenizer, safetensors files. All headers are checked before a file is mapped; then
tensors are read one at a time.

The format (huggingface/safetensors): 8 bytes of little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, the data. Pickle files are never opened.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gristmill.quant.checkpoints import tekken
from gristmill.quant.checkpoints.chat_files import ChatFiles, directory_chat_files
from gristmill.quant.checkpoints.checkpoint import NoTokenizerError, read_tokenizer
from gristmill.quant.checkpoints.files import lfs_hint, read_json
from gristmill.quant.errors import CheckpointError, ConfigError
from gristmill.quant.formats import checkpoint_formats

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
MAX_HEADER = 100 << 20
"""The maximum size of a header in the format, in bytes."""

MAX_NAME = 255
"""The maximum size of a file's name on Linux, in bytes."""

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
MAX_DIMENSIONS = 64
"""The most dimensions of a tensor of torch."""
MAX_SIZE = 1 << 63
"""Sizes and offsets are below it. The product of sizes without a bound would take a time that grows with the square of their number."""
UNUSED_DTYPES = ("U16", "U32", "U64", "C64", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2FNUZ")
"""Dtypes of the format that no weight read here has."""


@dataclass(frozen=True)
class Entry:
    """The location, dtype and shape of a tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class SafetensorsCheckpoint:
    """A model directory, a `Checkpoint`. `entries` has its tensors by name, read from the headers on first use.

    Raises, on the first access to tensors:
        CheckpointError: no safetensors files, a missing shard, a truncated or corrupt file, a tensor that the index names
            and its shard lacks, or one that two shards have.
    """

    index, single = INDEX, SINGLE

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: tuple[Path, Any] | None = None

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor is and what it is."""
        tensors: dict[str, Entry] = {}
        expected = self._index()
        for file in sorted(set(expected.values())):
            for name, entry in read_header(self.path / file).items():
                if name in tensors:
                    raise CheckpointError(f"tensor {name} is both in {tensors[name].file.name} and in {file}")
                tensors[name] = entry
        for name, file in expected.items():
            if name and name[0] != "/" and (name not in tensors or tensors[name].file.name != file):
                raise CheckpointError(
                    f"{self.path / file} lacks tensor {name}, which {self.index} says it holds"
                )
        return tensors

    def config(self) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
        """The contents of config.json and generation_config.json; ``quantization_config`` may be in another file or entry."""
        if not self.path.is_dir():
            raise ConfigError(
                f"no model directory {self.path}: expected a folder with config.json and safetensors files"
            )
        file = self.path / "config.json"
        if not file.is_file():
            raise ConfigError(
                f"{self.path} has no config.json: not a Hugging Face model directory{self._adapter()}"
            )
        data, generation = read_json(file), self.path / "generation_config.json"
        data = {**data, "quantization_config": self._quantization(data, file)}
        return data, read_json(generation) if generation.is_file() else {}, str(file)

    def tokenizer(self) -> Any:
        """The tokenizer of tokenizer.json, else of Mistral's tekken.json; read once."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        file, own = self.path / "tokenizer.json", self.path / tekken.FILE
        if not file.is_file() and own.is_file():
            return tekken.tekken_tokenizer(own)
        if not file.is_file():
            raise NoTokenizerError(
                f"{self.path} has no tokenizer.json and no {tekken.FILE}: pass prompts as lists of token ids"
            )
        return read_tokenizer(file)

    def chat_files(self) -> ChatFiles:
        """As `directory_chat_files`, with the special tokens of a tekken.json, which other files need not name."""
        found = directory_chat_files(self.path)
        named = (self.path / tekken.FILE).is_file()
        return replace(found, tokens={**tekken.TOKENS, **found.tokens}) if named else found

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Stored dtype and shape; CheckpointError if there is no tensor of that name."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """A tensor in its stored dtype, on the CPU. Its memory is the mapped file, so copy it to keep it.

        Raises:
            CheckpointError: there is no such tensor, its shape is not `shape`, or its dtype is not in `dtypes`.
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
        tensor: Tensor = self._open[1].get_tensor(self._stored_name(name))
        return tensor

    def _stored_name(self, name: str) -> str:
        """The name of a tensor in its file."""
        return name

    def _entry(self, name: str) -> Entry:
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name}")
        return entry

    def _quantization(self, data: Mapping[str, Any], file: Path) -> Mapping[str, Any] | None:
        """The quantization entry of config.json or of a file next to it, under the names that formats declare."""
        known = checkpoint_formats().values()
        for entry, method in [("quantization_config", None), *((f.entry, f.name) for f in known if f.entry)]:
            given = data.get(entry)
            if given:
                if not isinstance(given, dict):
                    raise ConfigError(f"{file}: entry {entry!r} must be an object, got {given!r}")
                return given if method is None else {"quant_method": method, **given}
        beside = [f for f in known if f.sidecar is not None and (self.path / f.sidecar).is_file()]
        if len(beside) > 1:
            raise ConfigError(
                f"{self.path} has both {' and '.join(str(f.sidecar) for f in beside)}: config.json must say how its "
                "weights are quantized"
            )
        if beside:
            return {"quant_method": beside[0].name, **read_json(self.path / str(beside[0].sidecar))}
        return None

    def _adapter(self) -> str:
        """What is to be said of a directory that holds an adapter of PEFT instead of a model; else \"\"."""
        if not (self.path / ADAPTER).is_file():
            return ""
        return f"; its {ADAPTER} is of an adapter (LoRA), which is not loaded: merge it into its base model (merge_and_unload of peft)"

    def _index(self) -> dict[str, str]:
        """Tensor -> file; of files that no index describes, "" or "/..." -> file."""
        index = self.path / self.index
        if not index.is_file():
            if (self.path / self.single).is_file():
                return {"": self.single}
            pickled = any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*"))
            hint = "; pickled weights are never read: convert them to safetensors" if pickled else ""
            raise CheckpointError(
                f"{self.path} has neither {self.single} nor {self.index}{hint}{self._adapter()}"
            )
        expected = read_json(index).get("weight_map")
        if (
            not isinstance(expected, dict)
            or not expected
            or not all(isinstance(f, str) for f in expected.values())
        ):
            raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
        for name, file in expected.items():
            if (
                Path(file).name != file
                or not file.endswith(".safetensors")
                or not file.isprintable()
                or len(file.encode()) > MAX_NAME
            ):
                raise CheckpointError(f"{index}: {file[:300]!r} is not a safetensors file of this folder")
            if not (self.path / file).is_file():
                count = sum(f == file for f in expected.values())
                raise CheckpointError(
                    f"missing shard {self.path / file}: {self.index} puts {count} tensors there, {name} among them"
                )
        return dict(expected)


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file, with sizes checked against the file; CheckpointError with the file and the fault."""

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
                raise wrong(f"a header of {length} bytes in a file of {size}{lfs_hint(file)}")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong("its header is not JSON") from error
    if not isinstance(header, dict):
        raise wrong("its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, wrong) for name, value in header.items()}
    end = 0
    for name, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = value["data_offsets"]
        if start != end:
            raise wrong(f"tensor {name} begins at byte {start} of the data, expected {end}")
        end = stop
    if size != 8 + length + end:
        raise wrong(f"{size} bytes, but its header describes {8 + length + end}")
    return entries


def _entry(file: Path, name: str, value: Any, wrong: Any) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype = DTYPES.get(str(fields.get("dtype")))
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if fields.get("dtype") in UNUSED_DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name} has dtype {fields['dtype']}, which is not read; known: {', '.join(DTYPES)}"
        )
    if dtype is None:
        raise wrong(f"tensor {name} has dtype {fields.get('dtype')!r}")
    for numbers, what in ((shape, "shape"), (offsets, "data_offsets")):
        good = isinstance(numbers, list) and all(type(n) is int and 0 <= n < MAX_SIZE for n in numbers)
        most = MAX_DIMENSIONS if what == "shape" else 2
        if not good or len(numbers) > most or (what == "data_offsets" and len(numbers) != 2):
            raise wrong(f"tensor {name} has {what} {str(numbers)[:200]}")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise wrong(f"tensor {name} of {dtype} {shape} has {offsets[1] - offsets[0]} bytes")
    return Entry(file, dtype, tuple(shape))
