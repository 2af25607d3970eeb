"""GGUF files (ggml): tensors by the names that Hugging Face gives them, types by `gguf_blocks`, the header by `gguf_header`.

A file holds its configuration in key-value pairs and its tensors under names of its own; model families declare which module
of Hugging Face each is. Converters of the architecture "llama" reorder the rows of q and k for a rotation of neighbouring pairs; the original
order is restored here. Experts of a layer are one tensor in the file, ``blk.0.ffn_gate_exps``, and as many here, each a part of its
memory; so are their biases. A matrix of one row may be stored as a vector. ``rope_freqs`` and ``rope_factors_*`` belong to the
configuration, and are no tensors here: `GgufFile.rope_factors`, `long_factors`. The two halves of a latent
projection, ``attn_k_b`` (transposed) and ``attn_v_b``, are one tensor here, in floats. Big-endian files, split files
(``-00001-of-00003.gguf``) and importance-matrix types (IQ*) are refused.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant.formats.contract import (
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    new_codes,
)
from gristmill.quant.formats.gguf_blocks import TYPES, read_blocks
from gristmill.quant.formats.gguf_header import GgufHeader, TensorEntry

ACTIVATION = "int8_g32"
"""ggml multiplies every quantized type with activations of 8 bits: Q8_0's blocks of 32, of K-quants Q8_K's of 256, which are coarser."""
MADV_POPULATE_READ = 22
"""Read and map pages at once, not one fault at a time (Linux 5.14)."""
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def no_entries(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """No entries besides those that all architectures share."""
    return {}


@dataclass(frozen=True)
class GgufArchitecture:
    """One of ggml's architectures, with experts or without: how a model family reads such files.

    Attributes:
        name: its ``general.architecture``.
        model: the architecture as config.json has it.
        modules: the modules of a layer: Hugging Face's name, with ``{expert}`` in those of experts, -> ggml's after ``blk.<layer>.``; a tensor that
            is no weight or bias of a module has its whole name.
        experts: whether it is for files with ``expert_count`` above 0.
        outside: likewise, the modules outside layers that others have not.
        paired: whether converters reorder rows of q and k for a rotation of neighbouring pairs.
        routed: whether `config` reads the keys about choosing experts; else files in which they are not usual are refused.
        config: what keys (without their prefix) add to the entries of config.json. ``q_bias`` and ``q_norm`` among them
            say whether q has a bias and a norm, ``fused_qkv`` whether q, k and v are one tensor; ``rope_scaling`` is what the keys say of
            frequencies, {} if nothing; ``file`` is the file itself. A list of one value for each layer is that value where all are equal.
    """

    name: str
    model: str
    modules: Mapping[str, str]
    experts: bool = False
    outside: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    routed: bool = False
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = no_entries

    def __str__(self) -> str:
        return f"{self.name} with experts" if self.experts else self.name


class GgufFile:
    """The tensors of a GGUF file, a `Source`: floats as they are, quantized ones as their blocks, uint8.

    Args:
        architectures: the known architectures.

    Attributes:
        architecture: the file's own.
        metadata: the key-value pairs without arrays.
        names: Hugging Face's name -> the file's own.
        kinds: Hugging Face's name -> ggml's type.

    Raises:
        FormatError: not a GGUF file, truncated or damaged; a byte order, a tensor, a type or an architecture that is not read.
    """

    def __init__(self, path: str | Path, architectures: Collection[GgufArchitecture]) -> None:
        self.path = Path(path)
        self._present: tuple[int, int] | None = None
        self._header = GgufHeader(self.path)
        self.metadata = self._header.metadata
        if self._count_or("split.count", 0) > 1:
            raise FormatError(
                f"{self.path}: a GGUF file in several parts is not read; join it with llama-gguf-split --merge"
            )
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
        tensors = self._header.tensors
        if layers > len(tensors):
            raise FormatError(f"{self.path} says it has {layers} layers, and has {len(tensors)} tensors")
        translate = _translation(known, layers)
        self.rope_factors: tuple[float, ...] = ()
        self.long_factors: dict[str, tuple[float, ...]] = {}
        self.names: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self._tensors: dict[str, TensorEntry] = {}
        for tensor in tensors:
            base, dot, suffix = tensor.name.rpartition(".")
            if tensor.name == "rope_freqs.weight":
                self.rope_factors = self._factors(tensor)
                continue
            if tensor.name in LONG_FACTORS:
                self.long_factors[LONG_FACTORS[tensor.name]] = self._factors(tensor)
                continue
            if tensor.name in translate:
                self._add(translate[tensor.name], tensor)
                continue
            module = translate.get(base)
            if not dot or module is None:
                raise FormatError(
                    f"{self.path}: tensor {tensor.name} of architecture {known.name} is not read"
                )
            if tensor.kind not in DENSE and tensor.kind not in TYPES:
                raise FormatError(
                    f"{self.path}: tensor {tensor.name} has ggml type {tensor.kind}, which is not read; known: "
                    f"{', '.join((*DENSE, *TYPES))}"
                )
            if "{expert}" not in module:
                self._add(f"{module}.{suffix}", tensor)
                continue
            sizes = ["N"] if suffix == "bias" else ["N", "K"]
            if len(tensor.shape) != 1 + len(sizes) or tensor.shape[0] != experts or experts > MOST_EXPERTS:
                raise FormatError(
                    f"{self.path}: tensor {tensor.name} must have shape [{experts}, {', '.join(sizes)}], got {list(tensor.shape)}"
                )
            size = tensor.nbytes // experts
            for expert in range(experts):
                part = replace(
                    tensor, shape=tensor.shape[1:], start=tensor.start + expert * size, nbytes=size
                )
                self._add(f"{module.format(expert=expert)}.{suffix}", part)
        self._joined = dict(self._join_halves())

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a tensor."""
        if name in self._joined:
            keys, values = (self._tensors[half] for half in self._joined[name])
            heads, rank, width = keys.shape
            return heads * (width + values.shape[1]), rank
        return self._entry(name).shape

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape as stored: of blocks, uint8 and rows of bytes."""
        if name in self._joined:
            return torch.float32, self.shape(name)
        tensor = self._entry(name)
        dtype = DENSE.get(tensor.kind)
        if dtype is not None:
            return dtype, tensor.shape
        return torch.uint8, (*tensor.shape[:-1], tensor.nbytes // math.prod(tensor.shape[:-1]))

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """The tensor as `spec` says, rows in the order of Hugging Face. Its memory is the mapped file unless rows are reordered."""
        dtype, stored_shape = self.spec(name)
        if dtypes is not None and dtype not in dtypes:
            raise FormatError(
                f"{self.path}: tensor {self.names[name]} must be {_listed(dtypes)}, got {self.kinds[name]}"
            )
        if shape is not None and shape not in (stored_shape, (1, *stored_shape)):
            raise FormatError(
                f"{self.path}: tensor {self.names[name]} must have shape {list(shape)}, got {list(stored_shape)}"
            )
        if name in self._joined:
            keys, values = map(self._floats, self._joined[name])
            return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        return self._in_order(name, self._mapped(self._tensors[name]).view(dtype).view(shape or stored_shape))

    def tokenizer_fields(self) -> Mapping[str, Any]:
        """The key-value pairs ``tokenizer.*``, arrays as lists; FormatError for text that is none."""
        return self.fields("tokenizer.")

    def fields(self, prefix: str) -> Mapping[str, Any]:
        """The key-value pairs whose keys begin so, arrays as lists; FormatError for text that is none."""
        return {key: self._header.value(key) for key in self._header.keys if key.startswith(prefix)}

    def _join_halves(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """(name of a latent projection, names of its halves) of the layers whose projection is in two; the halves are no tensors of their own."""
        for keys in [name for name in self.names if name.endswith(".k_b_proj.weight")]:
            values = keys.replace(".k_b_proj", ".v_b_proj")
            shapes = [self._tensors[half].shape for half in (keys, values) if half in self._tensors]
            heads, rank = shapes[0][:1], shapes[0][1:2]
            if len(shapes) != 2 or {len(shape) for shape in shapes} != {3} or shapes[1][::2] != heads + rank:
                raise FormatError(
                    f"{self.path}: {self.names[keys]} must be [heads, rank, N] beside values [heads, V, rank], got {[*map(list, shapes)]}"
                )
            name = keys.replace(".k_b_proj", ".kv_b_proj")
            yield name, (keys, values)
            self.names[name], self.kinds[name] = self.names[keys], "F32"
            del self.names[keys], self.names[values]

    def _floats(self, name: str) -> Tensor:
        """A tensor of several matrices, in float32."""
        tensor = self._tensors[name]
        data, rows = self._mapped(tensor), math.prod(tensor.shape[:-1])
        if tensor.kind in DENSE:
            return data.view(DENSE[tensor.kind]).float().view(tensor.shape)
        blocks = data.view(rows, -1)
        weight = read_blocks(tensor.name, tensor.kind, blocks, (rows, tensor.shape[-1]), new_codes)
        return weight.dequantize().float().view(tensor.shape)

    def _add(self, name: str, tensor: TensorEntry) -> None:
        self.names[name] = tensor.name
        self.kinds[name] = tensor.kind
        self._tensors[name] = tensor

    def _mapped(self, tensor: TensorEntry) -> Tensor:
        """The bytes of a tensor in the mapped file, uint8; the pages of the one before are given back, they are read again on use."""
        before, self._present = self._present, (tensor.start, tensor.nbytes)
        if before is not None:
            self._advise(mmap.MADV_DONTNEED, *before)
        self._advise(MADV_POPULATE_READ, *self._present)
        return torch.frombuffer(
            self._header.data, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.start
        )

    def _advise(self, advice: int, start: int, size: int) -> None:
        """Advice about the whole pages of a part of the file. Systems that do not know it go without."""
        first = cdiv(start, mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            with contextlib.suppress(
                OSError
            ):  # EINVAL before Linux 5.14; what is not populated is read when it is touched
                self._header.data.madvise(advice, first, length)

    def _factors(self, tensor: TensorEntry) -> tuple[float, ...]:
        """The divisors of the frequencies of the rotary embedding."""
        values = self._mapped(tensor).view(torch.float32).tolist() if tensor.kind == "F32" else []
        if not values or len(tensor.shape) != 1 or not all(math.isfinite(v) and v > 0 for v in values):
            raise FormatError(f"{self.path}: {tensor.name} must be positive float32 numbers in a row")
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
        return self._count_or(f"{self.architecture.name}.{key}", default, least=1)

    def _count_or(self, name: str, default: int | None, least: int = 0) -> int:
        value = self.metadata.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 20:
            raise FormatError(f"{self.path}: {name} must be a positive number, got {value!r}")
        return value

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._tensors:
            raise FormatError(f"{self.path} has no tensor {name}")
        return self._tensors[name]


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
        blocks = source.read(name)
        return StoredWeight(
            read_blocks(source.names[name], source.kinds[name], blocks, shape, place), (name,), ACTIVATION
        )


LONG_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
"""The tensors of longrope's divisors -> their entries in a rope_scaling."""
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
"""Hugging Face's name of a module outside layers -> ggml's."""


def _translation(architecture: GgufArchitecture, layers: int) -> dict[str, str]:
    """The file's name of a module, or of a tensor, -> Hugging Face's; ``{expert}`` stands in that of experts."""
    translation = {own: module for module, own in (*MODULES.items(), *architecture.outside.items())}
    for i in range(layers):
        for module, own in architecture.modules.items():
            translation[f"blk.{i}.{own}"] = f"model.layers.{i}.{module}"
    return translation


MOST_EXPERTS = 4096


def _listed(dtypes: Collection[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


FORMAT = FormatSpec("gguf", Gguf)
