"""The interface of a checkpoint format: rules from a configuration, and QuantTensors from the tensors of a module.

A format does not depend on kernels, models or files. It reads tensors by name from a `Source`, one module
at a time, and returns None for a module that is not quantized (its ``.weight`` is read as in any checkpoint), or a `StoredWeight`.
Anything that is not supported raises a `FormatError` that names the module, what was expected and what was found.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import memory, numeric
from gristmill.quant.tensor import QuantTensor, largest_scale

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of integer and fp8 scales, and of weights that are not quantized."""


_LARGEST: Final = {
    "fp8": numeric.E4M3_MAX,
    "mxfp8": numeric.E4M3_MAX,
    "mxfp4": numeric.E2M1_MAX,
    "nvfp4": numeric.E2M1_MAX,
}
"""Largest magnitude of a code."""


class FormatError(ValueError):
    """A configuration or tensors that contradict their format, or a variant of it that is not read."""


class Source(Protocol):
    """Tensors by name. `read` raises, with file and tensor, if there is no such tensor or it is not as expected."""

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Stored dtype and shape, from the header alone."""
        ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """The tensor as stored, which must have this shape and one of these dtypes. Its memory may belong to a mapped file."""
        ...


class Tensors:
    """A Source of tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape; FormatError if there is no such tensor."""
        if name not in self.tensors:
            raise FormatError(f"there is no tensor {name}")
        return self.tensors[name].dtype, tuple(self.tensors[name].shape)

    def read(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        dtypes: Collection[torch.dtype] | None = None,
    ) -> Tensor:
        """The tensor; FormatError when it is not there or not as expected."""
        dtype, stored_shape = self.spec(name)
        if shape is not None and stored_shape != shape:
            raise FormatError(f"tensor {name} must have shape {list(shape)}, got {list(stored_shape)}")
        if dtypes is not None and dtype not in dtypes:
            raise FormatError(f"tensor {name} must be {' or '.join(map(str, dtypes))}, got {dtype}")
        return self.tensors[name]


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """One module's weight as a checkpoint stores it.

    Tensors that need no rearranging are those of the source, so that nothing is copied unnecessarily; `owned` copies those in a
    mapped file.

    Attributes:
        weight: [..., N, K], its scheme without activations.
        names: the tensors it is made of.
        activation: the activation format that the checkpoint declares, for information; None = activations in their own dtype.
        input_scale: float32 [1], a static scale of those activations as a multiplier (value = code * input_scale), or None.
        pre_scale: float32 [K] by which x is multiplied before the product (AWQ-style scaling that was not folded into a previous layer), or
            None.
    """

    weight: QuantTensor
    names: tuple[str, ...]
    activation: str | None = None
    input_scale: Tensor | None = None
    pre_scale: Tensor | None = None


Place = Callable[[tuple[int, ...]], Tensor]
"""The shape of codes -> uint8 memory for them."""


def new_codes(shape: tuple[int, ...]) -> Tensor:
    """Newly allocated memory."""
    return memory.empty(shape, torch.uint8)


class Format(ABC):
    """A checkpoint format with a parsed configuration.

    Attributes:
        name: its ``quant_method``.
        ordered: whether columns may belong to groups in any order (act-order).
        kv_cache: the number format of its KV cache scales, such as ``fp8``; None = not in the configuration.
    """

    name: str
    ordered: bool = False
    kv_cache: str | None = None

    @abstractmethod
    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, of logical shape (..., N, K); None if it is not quantized.

        Args:
            place: allocates memory for codes that the reader has to rearrange; other codes are those of the source.

        Raises:
            FormatError: the module's tensors are missing, of the wrong shape or dtype, or a variant that is not read.
        """

    def scheme_of(self, module: str) -> QuantScheme | None:
        """The scheme of a module by the configuration alone, None when it is not quantized.

        Raises:
            FormatError: the tensors determine it, not the configuration.
        """
        raise FormatError(f"quantization_config: {self.name} does not say how every layer is stored")

    def beside(self, source: Source, read: Collection[str]) -> set[str]:
        """Unread tensors, apart from those in `read`, that belong to no parameter and have no effect; FormatError if one has an effect."""
        return set()


class Writer(Protocol):
    """A format to write in one scheme. If it cannot hold a weight exactly, FormatError is raised before anything is written.

    If `stacked`, it holds experts [E, N, K] in one tensor, and no other weights; otherwise it holds only matrices.
    """

    name: str
    stacked: bool

    def quantize(self, weight: Tensor) -> QuantTensor:
        """A weight rounded to nearest so that the format holds the result exactly."""
        ...

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        """Suffix (`stored_name`) -> what is stored in place of ``NAME.weight``, of stacked experts in place of ``NAME``."""
        ...

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        """The ``quantization_config``, with the modules in `kept` as those whose matrices stay in floats."""
        ...


def by_name(config: Mapping[str, Any]) -> bool:
    """Claims no configuration except those whose ``quant_method`` is the format's name."""
    return False


@dataclass(frozen=True)
class FormatSpec:
    """A checkpoint format as its module declares it, under the attribute `FORMAT`.

    Attributes:
        name: the ``quant_method`` of config.json.
        read: creates the format from a configuration and its name in messages.
        write: creates the writer of a scheme; None if the format is only read.
        claims: whether a configuration of another ``quant_method``, or of none, is of this format.
        entry: another entry of config.json than ``quantization_config`` that holds one.
        sidecar: a file next to config.json that holds one.
    """

    name: str
    read: Callable[[Mapping[str, Any], str], Format]
    write: Callable[[QuantScheme | str], Writer] | None = None
    claims: Callable[[Mapping[str, Any]], bool] = by_name
    entry: str | None = None
    sidecar: str | None = None


class Fields:
    """A JSON object with typed access; errors state the place, the expected and the actual value."""

    error: type[ValueError] = FormatError

    def __init__(self, data: Any, origin: str) -> None:
        if not isinstance(data, Mapping):
            raise self.error(f"{origin} must be an object, got {data!r}")
        self.data = data
        self.origin = origin

    def get(
        self, name: str, kind: type | tuple[type, ...], default: Any = ..., least: float | None = None
    ) -> Any:
        """The entry; `default` if it is absent or null. An error if there is no default, or the entry has another type."""
        value = self.data.get(name)
        if value is None:
            if default is ...:
                raise self.error(f"{self.origin}: entry {name!r} is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise self.error(f"{self.origin}: entry {name!r} must be {expected}, got {value!r}")
        if least is not None and isinstance(value, int | float) and value < least:
            raise self.error(f"{self.origin}: entry {name!r} must be at least {least}, got {value!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of strings, () when absent."""
        values = self.get(name, (list, tuple), ())
        if not all(isinstance(v, str) for v in values):
            raise FormatError(f"{self.origin}: entry {name!r} must be a list of strings, got {values!r}")
        return tuple(values)

    def section(self, name: str) -> Fields:
        """An entry that is an object."""
        return Fields(self.get(name, Mapping), f"{self.origin}.{name}")

    def one_of(self, name: str, choices: Collection[Any], default: Any = ...) -> Any:
        """An entry that is one of the choices."""
        value = self.data.get(name)
        value = default if value is None and default is not ... else value
        if value not in choices:
            listed = ", ".join(repr(c) for c in choices)
            raise FormatError(f"{self.origin}: entry {name!r} must be one of {listed}, got {value!r}")
        return value


def listed(module: str, names: Collection[str]) -> bool:
    """Whether a module is in a list of names as transformers writes them: itself, a parent, or the last parts of its name.

    ``lm_head``, ``model.layers.0`` and ``mlp.gate`` list ``lm_head``, ``model.layers.0.mlp.up_proj`` and
    ``model.layers.3.mlp.gate``, and not ``model.layers.3.mlp.gate_proj``.
    """
    dotted = f".{module}."
    return any(dotted.startswith(f".{name}.") or dotted.endswith(f".{name}.") for name in names)


def one_number(source: Source, name: str) -> Tensor:
    """A scale of one number, stored as [] or [1], as float32 [1]. FormatError when it is not finite and positive."""
    shape = source.spec(name)[1]
    if shape not in ((), (1,), (1, 1)):
        raise FormatError(f"tensor {name} must be one number, got shape {list(shape)}")
    value = source.read(name, shape, dtypes=FLOATS).reshape(1).to(torch.float32).clone()
    if not bool(torch.isfinite(value).all()) or float(value) <= 0:
        raise FormatError(f"tensor {name} must be finite and positive, got {float(value)}")
    return value


def zero_biases(source: Source, read: Collection[str], weight: str) -> set[str]:
    """Biases of modules whose tensor `weight` was read and whose bias was not: packers write zeros for layers without one.

    FormatError where one is not zero.
    """
    names = set()
    for name in source:
        module = name.removesuffix(".bias")
        if module != name and name not in read and f"{module}{weight}" in read:
            if bool(source.read(name, dtypes=(*FLOATS, torch.float64)).count_nonzero()):
                raise FormatError(f"{name} is not 0, and the model has no such bias")
            names.add(name)
    return names


def need(source: Source, module: str, suffixes: Collection[str], form: str) -> None:
    """FormatError unless the module has all these tensors."""
    missing = [f"{module}{suffix}" for suffix in suffixes if f"{module}{suffix}" not in source]
    if missing:
        present = sorted(
            n
            for n in source
            if n.startswith((f"{module}.", f"{module}_")) and n.count(".") <= module.count(".") + 1
        )
        raise FormatError(
            f"{module} is stored as {form}, which needs tensor {missing[0]}; found {', '.join(present) or 'none of it'}"
        )


def make(module: str, *fields: Any, **named: Any) -> QuantTensor:
    """A QuantTensor; errors of its fields become a FormatError with the module's name.

    Codes of float formats must be finite, and scales must be so that every value is finite in float32.
    """
    try:
        weight = QuantTensor(*fields, **named)
    except (ValueError, TypeError) as error:
        raise FormatError(f"{module}: {error}") from error
    if weight.scheme.weight in ("fp8", "mxfp8") and math.isnan(numeric.e4m3_largest(weight.codes)):
        raise FormatError(f"{module}: {weight.scheme} weights hold NaN")
    largest = _LARGEST.get(weight.scheme.weight, float(1 << weight.scheme.bits))
    if weight.scales is not None:
        largest *= largest_scale(weight.scales)
    if weight.global_scale is not None:
        largest *= float(weight.global_scale.abs().max())
    if largest > torch.finfo(torch.float32).max:
        raise FormatError(
            f"{module}: {weight.scheme} scales are so large that weights may pass float32: up to {largest:.2g}"
        )
    return weight


def as_bytes(weight: Tensor) -> Tensor:
    """A tensor of bytes (fp8, int8, uint8) as uint8; the same memory where it is contiguous."""
    return weight.contiguous().view(torch.uint8)


def owned(weight: QuantTensor) -> QuantTensor:
    """The weight with a copy of each tensor whose memory torch does not own, that is, of mapped files."""
    tensors = weight.tensors()
    mapped = {name: memory.copy_of(t) for name, t in tensors.items() if not t.untyped_storage().resizable()}
    return weight.with_tensors({**tensors, **mapped}, weight.shape) if mapped else weight


def as_float32(scales: Tensor) -> Tensor:
    """Scales of a float or E8M0 dtype as an exact float32 copy."""
    if scales.dtype == torch.float8_e8m0fnu:
        return numeric.e8m0_decode(scales.contiguous().view(torch.uint8))
    return scales.to(torch.float32, copy=True).contiguous()


def deinterleaved(weight: QuantTensor) -> QuantTensor:
    """Rows g0 u0 g1 u1 ... -> g0 g1 ... u0 u1 ..., as every other model orders gate and up."""
    if weight.n % 2:
        raise FormatError(f"interleaved gate and up rows are even in number, got {weight}")
    return weight.rows(torch.arange(weight.n).view(-1, 2).t().reshape(-1))
