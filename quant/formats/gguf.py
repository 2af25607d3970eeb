"""GGUF files (ggml) through the `gguf` package: tensors by the names that Hugging Face gives them, types by `gguf_blocks`.

A file holds its configuration in key-value pairs and its tensors under names of its own; the tables of the package map
them. Converters of the architecture "llama" reorder the rows of q and k for a rotation of neighbouring pairs; the original
order is restored here. Experts of a layer are one tensor in the file, ``blk.0.ffn_gate_exps``, and as many here, each a part of its
memory. ``rope_freqs`` belongs to the configuration, and is no tensor here: `GgufFile.rope_factors`. Big-endian files, split files
(``-00001-of-00003.gguf``) and importance-matrix types (IQ*) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.quant.formats.contract import (
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    new_codes,
)
from gristmill.quant.formats.gguf_blocks import read_blocks
from gristmill.quant.formats.gguf_check import check

DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAGIC = b"GGUF"


def no_entries(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """No entries besides those that all architectures share."""
    return {}


@dataclass(frozen=True)
class GgufArchitecture:
    """One of ggml's architectures, with experts or without: how a model family reads such files.

    name: its ``general.architecture``. model: the architecture as config.json has it. modules: those of a layer as Hugging Face
    calls them, ``{expert}`` in those of experts. experts: for files with ``expert_count`` above 0. paired: converters reorder rows
    of q and k for a rotation of neighbouring pairs. config: what keys (without their prefix) add to the entries of config.json.
    """

    name: str
    model: str
    modules: tuple[str, ...]
    experts: bool = False
    paired: bool = False
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = no_entries

    def __str__(self) -> str:
        return f"{self.name} with experts" if self.experts else self.name


class GgufFile:
    """The tensors of a GGUF file, a `Source`: floats as they are, quantized ones as their blocks, uint8.

    architectures: those that are known; `architecture` is the file's own. metadata: the key-value pairs, arrays of tokenizers
    left out. names: Hugging Face's name -> the file's own. kinds: Hugging Face's name -> ggml's type.

    Raises:
        FormatError: not a GGUF file, truncated or damaged; a byte order, a tensor or an architecture that is not read.
        ImportError: the `gguf` package is not installed.
    """

    def __init__(self, path: str | Path, architectures: Collection[GgufArchitecture]) -> None:
        self.path = Path(path)
        self._reader, self.metadata = _open(self.path)
        name = str(self.metadata.get("general.architecture"))
        has_experts = bool(self.metadata.get(f"{name}.expert_count"))
        known = next((a for a in architectures if (a.name, a.experts) == (name, has_experts)), None)
        if known is None:
            raise FormatError(
                f"{self.path}: architecture {name!r}{' with experts' * has_experts} is not read; known: "
                f"{', '.join(sorted(map(str, architectures)))}"
            )
        self.architecture = known
        self._heads: dict[str, int] = {}
        if known.paired:
            heads = self._count("attention.head_count")
            self._heads = {"q_proj": heads, "k_proj": self._count("attention.head_count_kv", heads)}
        layers = self._count("block_count")
        experts = self._count("expert_count") if known.experts else 0
        if layers > len(self._reader.tensors):
            raise FormatError(
                f"{self.path} says it has {layers} layers, and has {len(self._reader.tensors)} tensors"
            )
        translate = _translation(known, layers)
        self.rope_factors: tuple[float, ...] = ()
        self.names: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._data: dict[str, Any] = {}
        for tensor in self._reader.tensors:
            base, dot, suffix = tensor.name.rpartition(".")
            shape = tuple(int(d) for d in reversed(tensor.shape))
            if tensor.name == "rope_freqs.weight":
                self.rope_factors = self._factors(tensor)
                continue
            module = translate.get(base)
            if not dot or module is None:
                raise FormatError(
                    f"{self.path}: tensor {tensor.name} of architecture {known.name} is not read"
                )
            if "{expert}" not in module:
                self._add(f"{module}.{suffix}", tensor, shape, tensor.data)
                continue
            if len(shape) != 3 or shape[0] != experts or experts > MOST_EXPERTS:
                raise FormatError(
                    f"{self.path}: tensor {tensor.name} must have shape [{experts}, N, K], got {list(shape)}"
                )
            for expert, data in enumerate(tensor.data):
                self._add(f"{module.format(expert=expert)}.{suffix}", tensor, shape[1:], data)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a tensor."""
        self._check(name)
        return self._shapes[name]

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape as stored: of blocks, uint8 and rows of bytes."""
        self._check(name)
        dtype = DENSE.get(self.kinds[name])
        return (torch.uint8, tuple(self._data[name].shape)) if dtype is None else (dtype, self._shapes[name])

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """The tensor as `spec` says, rows in the order of Hugging Face."""
        dtype, stored_shape = self.spec(name)
        if dtypes is not None and dtype not in dtypes:
            raise FormatError(
                f"{self.path}: tensor {self.names[name]} must be {_listed(dtypes)}, got {self.kinds[name]}"
            )
        if shape is not None and stored_shape != shape:
            raise FormatError(
                f"{self.path}: tensor {self.names[name]} must have shape {list(shape)}, got {list(stored_shape)}"
            )
        tensor = torch.from_numpy(self._data[name])
        if dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint8).view(torch.bfloat16)
        return self._in_order(name, tensor.view(stored_shape))

    def tokenizer_fields(self) -> Mapping[str, Any]:
        """The key-value pairs ``tokenizer.*``, arrays as lists; FormatError for text that is none."""
        values = {}
        for key, field in self._reader.fields.items():
            if key.startswith("tokenizer."):
                try:
                    values[key] = field.contents()
                except (ValueError, IndexError) as error:  # UnicodeDecodeError among them
                    raise FormatError(f"{self.path} is truncated or corrupt: {key}: {error}") from error
        return values

    def _add(self, name: str, tensor: Any, shape: tuple[int, ...], data: Any) -> None:
        self.names[name] = tensor.name
        self.kinds[name] = tensor.tensor_type.name
        self._shapes[name] = shape
        self._data[name] = data

    def _factors(self, tensor: Any) -> tuple[float, ...]:
        """The divisors of the frequencies of the rotary embedding."""
        values = tensor.data.tolist() if tensor.tensor_type.name == "F32" else []
        if not values or len(tensor.shape) != 1 or not all(math.isfinite(v) and v > 0 for v in values):
            raise FormatError(f"{self.path}: rope_freqs.weight must be positive float32 numbers in a row")
        return tuple(values)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Rows of q and k, weights and biases, as before the conversion: per head, halves instead of pairs."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return rows
        if rows.shape[0] % (2 * heads):
            raise FormatError(
                f"{self.path}: {self.names[name]} has {rows.shape[0]} rows, not those of {heads} heads"
            )
        order = torch.arange(rows.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)
        return rows.view(torch.uint8).view(rows.shape[0], -1)[order].view(rows.dtype).view(rows.shape)

    def _count(self, key: str, default: int | None = None) -> int:
        name = f"{self.architecture.name}.{key}"
        value = self.metadata.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 20:
            raise FormatError(f"{self.path}: {name} must be a positive number, got {value!r}")
        return value

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise FormatError(f"{self.path} has no tensor {name}")


class Gguf(Format):
    """The format of a `GgufFile`'s weights; reads from no other source."""

    name = "gguf"

    def __init__(self, config: Mapping[str, Any] | None = None, where: str = "") -> None:
        """There is no configuration: a file contains the type of each tensor."""

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, None where it is stored in floats or not at all."""
        name = f"{module}.weight"
        if not isinstance(source, GgufFile):
            raise FormatError(
                f"{module}: GGUF blocks are read from a GGUF file, not from {type(source).__name__}"
            )
        if name not in source or source.kinds[name] in DENSE:
            return None
        if source.shape(name) != shape:
            own = source.names[name]
            raise FormatError(
                f"{source.path}: tensor {own} must have shape {list(shape)}, got {list(source.shape(name))}"
            )
        return StoredWeight(
            read_blocks(source.names[name], source.kinds[name], source.read(name), shape, place), (name,)
        )


def _open(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The package's reader of a file whose structure is sound, and the key-value pairs."""
    try:
        with path.open("rb") as stream:
            magic = stream.read(8)
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
    if magic[:4] != MAGIC:
        raise FormatError(f"{path} is not a GGUF file: it begins with {magic[:4]!r}")
    version = int.from_bytes(magic[4:8], "little")
    if version not in (2, 3):
        raise FormatError(
            f"{path}: GGUF version {version} is not read (or its byte order is big-endian); known: 2, 3"
        )
    check(path, lambda what: FormatError(f"{path} is truncated or corrupt: {what}"))
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "reading GGUF files needs the gguf package: pip install 'gristmill[gguf]'"
        ) from error
    try:
        reader = gguf.GGUFReader(
            path, "c"
        )  # mapped copy-on-write, so that torch does not warn of read-only memory
        return reader, _metadata(reader)
    except FormatError:
        raise
    except Exception as error:
        # On damaged files the package raises various exceptions, from IndexError to UnicodeDecodeError.
        raise FormatError(f"{path} is truncated or corrupt: {type(error).__name__}: {error}") from error


def _metadata(reader: Any) -> Mapping[str, Any]:
    """Key-value pairs as Python values."""
    values: dict[str, Any] = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or (key.startswith("tokenizer.") and not key.endswith("_token_id")):
            continue
        value = field.contents()
        values[key] = value.item() if hasattr(value, "item") else value
    if values.get("split.count", 0) > 1:
        raise FormatError("a GGUF file in several parts is not read; join it with llama-gguf-split --merge")
    return values


def _translation(architecture: GgufArchitecture, layers: int) -> dict[str, str]:
    """The file's name of a module -> Hugging Face's, by the package's tables; ``{expert}`` stands in that of experts."""
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture.name], layers)
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    modules += [f"model.layers.{i}.{module}" for i in range(layers) for module in architecture.modules]
    translation = {}
    for module in modules:
        file_name = table.get_name(module.replace(".{expert}", ""))
        if file_name is not None:
            translation[file_name] = module
    return translation


MOST_EXPERTS = 4096


def _listed(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


FORMAT = FormatSpec("gguf", Gguf)
