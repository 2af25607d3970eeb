"""QuantTensor: one quantized weight in a neutral layout, independent of kernels and checkpoint formats.

    W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] * global_scale[segment of n]      in float32, in that order

with g = k // group_size, or g_idx[k] where the groups are not consecutive runs of group_size (act-order, or a shard cut
inside a group). Integer codes without stored zero points are offset binary: zero = 2**(bits - 1), implicit. Schemes
with minimums (``_min``: GGUF's K-quants) subtract an offset after the product instead: W = code * scale - zero. Codes of
floating point formats are the format's own bits and have no zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Final, NoReturn, Self

import torch
from torch import Tensor

from gristmill.kernel_registry.dtypes import canonical_dtype
from gristmill.kernel_registry.scheme import BLOCK, QuantScheme, cdiv
from gristmill.quant import numeric, sharding

DENSE_DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK: Final = 1 << 18
"""Weights decoded at a time, which limits temporaries to about 6 MB for any matrix."""


@dataclass(frozen=True, eq=False, repr=False)
class QuantTensor:
    """A weight of logical shape [..., N, K] (leading dimensions: experts).

    Attributes:
        codes: uint8 [..., N, ceil(K * bits / 8)], a dense little-endian bit stream along K (low nibble = even k);
            of dense schemes the bytes of the floats.
        scales: [..., N, groups], or [..., block rows, block columns] for block schemes, or None (dense, fp8 per
            tensor). E8M0 is uint8, E4M3 is float8_e4m3fn, others float32, float16 or bfloat16.
        shape: logical shape (..., N, K).
        scheme: a QuantScheme or its name.
        zero: None; or integer codes, uint8 [..., N, groups], 0..2**bits (2**bits happens in GPTQ files); or float
            offsets in code units, of the same shape; of schemes with minimums float offsets in units of the weight.
        global_scale: float32 multipliers [..., segments], or None.
        segments: first row of each run of rows with its own global_scale; the first is 0.
        g_idx: int32 [K], scale column of each k, or None for k // group_size.
        n_idx: int32 [N], scale row of each n, block schemes only, or None for n // 128. It appears when matrices with
            a partial last block are concatenated or a shard starts inside a block.

    Raises:
        ValueError, TypeError: a field contradicts the scheme or the shape; the message names the field, what was
            expected and what was given. Scales must be finite.
    """

    codes: Tensor
    scales: Tensor | None
    shape: tuple[int, ...]
    scheme: QuantScheme
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    segments: tuple[int, ...] = (0,)
    g_idx: Tensor | None = None
    n_idx: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", QuantScheme.parse(self.scheme))
        object.__setattr__(self, "shape", tuple(int(d) for d in self.shape))
        object.__setattr__(self, "segments", tuple(int(s) for s in self.segments))
        self._check_codes()
        self._check_index("g_idx", self.g_idx, self.k, self.scheme.granularity in ("group", "block"), -1)
        self._check_index("n_idx", self.n_idx, self.n, self.scheme.granularity == "block", -2)
        self._check_scales()
        self._check_zero()
        self._check_global()
        self._drop_regular("g_idx", -1)
        self._drop_regular("n_idx", -2)

    @staticmethod
    def from_dense(weight: Tensor) -> QuantTensor:
        """A float32, float16 or bfloat16 weight [..., N, K] as a QuantTensor of the dense scheme of its dtype."""
        for name, dtype in DENSE_DTYPES.items():
            if weight.dtype == dtype:
                scheme = QuantScheme.parse(name)
                return QuantTensor(weight.contiguous().view(torch.uint8), None, tuple(weight.shape), scheme)
        raise TypeError(f"a dense weight is float32, float16 or bfloat16, got {weight.dtype}")

    @property
    def n(self) -> int:
        """Output rows."""
        return self.shape[-2]

    @property
    def k(self) -> int:
        """Input columns."""
        return self.shape[-1]

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading (expert) dimensions."""
        return self.shape[:-2]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def __repr__(self) -> str:
        extra = "".join(f", {name}" for name in ("zero", "g_idx", "n_idx") if getattr(self, name) is not None)
        return (
            f"QuantTensor({self.scheme} {list(self.shape)} on {self.device}, segments={self.segments}{extra})"
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in pairs if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same tensor on another device."""
        return self.with_tensors({name: t.to(device) for name, t in self.tensors().items()}, self.shape)

    def identical(self, other: QuantTensor) -> bool:
        """Whether every field is the same, bit for bit (float8 compared as bytes)."""
        tensors, other_tensors = self.tensors(), other.tensors()
        same = (self.shape, self.scheme, self.segments) == (other.shape, other.scheme, other.segments)
        return (
            same
            and tensors.keys() == other_tensors.keys()
            and all(same_bits(tensors[name], other_tensors[name]) for name in tensors)
        )

    def dense(self) -> Tensor:
        """The [..., N, K] float tensor of a dense scheme, a view of the codes where alignment allows."""
        if not self.scheme.is_dense:
            raise ValueError(f"{self.scheme} is quantized: use dequantize()")
        dtype = DENSE_DTYPES[self.scheme.weight]
        codes = self.codes.contiguous()
        if codes.storage_offset() % dtype.itemsize:
            codes = codes.clone()
        return codes.view(dtype)

    def unpacked(self) -> Tensor:
        """Codes one per byte, uint8 [..., N, K] (quantized schemes)."""
        return numeric.unpack_bits(self.codes, self.scheme.bits, self.k)

    def column_groups(self) -> Tensor:
        """int32 [K]: scale column of each k."""
        if self.g_idx is not None:
            return self.g_idx
        size = self.scheme.group_size or self.k
        return torch.arange(self.k, dtype=torch.int32, device=self.device) // size

    def row_blocks(self) -> Tensor:
        """int32 [N]: scale row of each n (n // 128 for block schemes, n for others)."""
        if self.n_idx is not None:
            return self.n_idx
        rows = torch.arange(self.n, dtype=torch.int32, device=self.device)
        return rows // BLOCK if self.scheme.granularity == "block" else rows

    def row_scale(self) -> Tensor | None:
        """float32 [..., N]: the global multiplier of each row, or None."""
        if self.global_scale is None:
            return None
        if len(self.segments) == 1:
            return self.global_scale.expand(*self.lead, self.n).contiguous()
        ends = (*self.segments[1:], self.n)
        lengths = torch.tensor([e - s for s, e in zip(self.segments, ends, strict=True)], device=self.device)
        return self.global_scale.repeat_interleave(lengths, dim=-1)

    def dequantize(self, dtype: torch.dtype | str = torch.float32) -> Tensor:
        """The weight [..., N, K]: (code - zero) * scale * global in float32, then rounded once to dtype.

        Raises:
            ValueError: the name of a dtype other than float32, float16 and bfloat16.
        """
        if isinstance(dtype, str):
            short = canonical_dtype(dtype)
            if short not in DENSE_DTYPES:
                raise ValueError(f"dequantize rounds to {', '.join(DENSE_DTYPES)}, got {dtype!r}")
            dtype = DENSE_DTYPES[short]
        if self.scheme.is_dense:
            return self.dense().to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        flat = out.view(-1, self.n, self.k)
        for expert, part in enumerate(self.experts()):
            step = max(1, _CHUNK // self.k)
            for start in range(0, self.n, step):
                stop = min(self.n, start + step)
                flat[expert, start:stop] = part._decode(slice(start, stop)).to(dtype)
        return out

    def experts(self) -> Iterator[QuantTensor]:
        """The [N, K] matrices of the leading dimensions, in order; views, not copies."""
        if not self.lead:
            yield self
            return
        count = torch.Size(self.lead).numel()
        shared = {name: t for name, t in self.tensors().items() if name in ("g_idx", "n_idx")}
        per_expert = {
            n: t.reshape(count, *t.shape[len(self.lead) :])
            for n, t in self.tensors().items()
            if n not in shared
        }
        for i in range(count):
            part = {**shared, **{name: t[i] for name, t in per_expert.items()}}
            yield self.with_tensors(part, self.shape[-2:])

    def narrow(self, dim: int, start: int, length: int) -> QuantTensor:
        """Rows, columns or experts [start, start + length) of ``shape[dim]``, exactly, as a copy.

        A cut inside a group or a 128-block gives a tensor with g_idx or n_idx.
        """
        return sharding.narrow(self, dim, start, length)

    def shard(self, dim: int, rank: int, world: int) -> QuantTensor:
        """Part ``rank`` of ``world`` equal parts along ``dim``: ``dequantize()`` of it is that slice, bit for bit.

        Fused matrices (q/k/v, gate/up) are sharded before they are concatenated: this cuts rows in their present order.
        """
        return sharding.shard(self, dim, rank, world)

    def rows(self, index: Tensor) -> QuantTensor:
        """The rows named by an integer tensor [N'], in that order (interleaved gate/up, GGUF's rotary order).

        ValueError when the rows have several global multipliers, or an index is outside 0..N-1.
        """
        return sharding.take_rows(self, index)

    def with_tensors(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, ...], segments: tuple[int, ...] | None = None
    ) -> Self:
        """A QuantTensor of this scheme with other tensors, by field name, and the same segments unless given."""
        return type(self)(
            tensors["codes"],
            tensors.get("scales"),
            shape,
            self.scheme,
            tensors.get("zero"),
            tensors.get("global_scale"),
            self.segments if segments is None else segments,
            tensors.get("g_idx"),
            tensors.get("n_idx"),
        )

    def decode_rows(self, index: Tensor) -> Tensor:
        """float32 [N', K]: the rows `index`, an integer tensor [N'], of an [N, K] matrix, equal to those of `dequantize`."""
        if self.scheme.is_dense:
            return self.dense()[index].to(torch.float32)
        return self._decode(index)

    def _decode(self, index: slice | Tensor) -> Tensor:
        """Some rows of an [N, K] matrix in float32."""
        scheme = self.scheme
        codes = numeric.unpack_bits(self.codes[index], scheme.bits, self.k)
        if scheme.is_integer:
            value = codes.to(torch.float32)
        else:
            value = numeric.e2m1_decode(codes) if scheme.bits == 4 else numeric.e4m3_decode(codes)
        columns = self.column_groups().to(torch.int64)
        rows = self.row_blocks()[index].to(torch.int64)
        offset = None if self.zero is None else self.zero[rows].to(torch.float32)[:, columns]
        if offset is not None and not scheme.minimums:
            value -= offset
        elif scheme.implicit_zero:
            value -= scheme.implicit_zero
        scales = sharding.select(self.scales, -2, rows)
        if scales is not None:
            value *= scales_to_float32(scales)[:, columns]
        if offset is not None and scheme.minimums:
            value -= offset
        row_scale = self.row_scale()
        return value if row_scale is None else value * row_scale[index, None]

    # Validation.

    def _fail(
        self, field: str, expected: str, actual: object, kind: type[Exception] = ValueError
    ) -> NoReturn:
        raise kind(
            f"QuantTensor({self.scheme} {list(self.shape)}).{field}: expected {expected}, got {actual}"
        )

    def _check_codes(self) -> None:
        if len(self.shape) < 2 or min(self.shape) < 1:
            raise ValueError(f"QuantTensor shape is (..., N, K), each at least 1, got {self.shape}")
        if self.codes.dtype != torch.uint8:
            self._fail("codes", "uint8", self.codes.dtype, TypeError)
        expected = [*self.shape[:-1], self.scheme.code_bytes(self.k)]
        if list(self.codes.shape) != expected:
            self._fail("codes", f"shape {expected}", list(self.codes.shape))

    def _check_device(self, field: str, tensor: Tensor) -> None:
        if tensor.device != self.codes.device:
            self._fail(field, f"device {self.codes.device} as the codes", tensor.device)

    def _check_index(
        self, field: str, index: Tensor | None, size: int, allowed: bool, scale_dim: int
    ) -> None:
        if index is None:
            return
        if not allowed:
            self._fail(field, f"none, {self.scheme.granularity} scales have no such index", "a tensor")
        if index.dtype != torch.int32:
            self._fail(field, "int32", index.dtype, TypeError)
        if list(index.shape) != [size]:
            self._fail(field, f"shape [{size}]", list(index.shape))
        self._check_device(field, index)
        if self.scales is None or self.scales.dim() < 2 or index.is_meta:
            return
        limit = self.scales.shape[scale_dim]
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= limit:
            self._fail(field, f"values 0..{limit - 1}, the scales it indexes", f"{low}..{high}")

    def _drop_regular(self, field: str, scale_dim: int) -> None:
        """Remove an index that equals i // size: GPTQ files without act-order have one."""
        index: Tensor | None = getattr(self, field)
        size = BLOCK if field == "n_idx" else self.scheme.group_size
        if index is None or index.is_meta or self.scales is None or not size:
            return
        if self.scales.shape[scale_dim] == cdiv(index.numel(), size):
            object.__setattr__(self, field, sharding.drop_regular(index, size))

    def _check_scales(self) -> None:
        shape = self.scheme.scale_shape(self.n, self.k)
        if shape is None:
            if self.scales is not None:
                self._fail("scales", "none", list(self.scales.shape))
            return
        if self.scales is None:
            self._fail("scales", f"a tensor [..., {shape[0]}, {shape[1]}]", None)
        allowed = {"e8m0": (torch.uint8,), "e4m3": (torch.float8_e4m3fn,)}.get(
            str(self.scheme.scale_dtype), _FLOAT_DTYPES
        )
        if self.scales.dtype not in allowed:
            self._fail("scales", " or ".join(str(d) for d in allowed), self.scales.dtype, TypeError)
        actual_shape = list(self.scales.shape)
        rows = shape[0] if self.n_idx is None or len(actual_shape) < 2 else actual_shape[-2]
        columns = shape[1] if self.g_idx is None or not actual_shape else actual_shape[-1]
        if actual_shape != [*self.lead, rows, columns]:
            self._fail("scales", f"shape {[*self.lead, rows, columns]}", actual_shape)
        self._check_device("scales", self.scales)
        if not self.scales.is_meta and not math.isfinite(largest_scale(self.scales)):
            self._fail("scales", "finite values", "NaN or infinity")

    def _check_zero(self) -> None:
        if self.zero is None:
            if not self.scheme.symmetric:
                self._fail("zero", "zero points" if self.scheme.zero_points else "minimums", None)
            return
        if self.scheme.symmetric or self.scales is None:
            self._fail("zero", "none, the scheme is symmetric", "a tensor")
        allowed = _FLOAT_DTYPES if self.scheme.minimums else (torch.uint8, *_FLOAT_DTYPES)
        if self.zero.dtype not in allowed:
            expected = "float offsets" if self.scheme.minimums else "uint8 codes or float offsets"
            self._fail("zero", expected, self.zero.dtype, TypeError)
        if self.zero.shape != self.scales.shape:
            self._fail("zero", f"shape {list(self.scales.shape)} of the scales", list(self.zero.shape))
        self._check_device("zero", self.zero)
        if self.zero.is_meta:
            return
        if self.zero.dtype == torch.uint8 and int(self.zero.max()) > 1 << self.scheme.bits:
            self._fail("zero", f"integer codes 0..{1 << self.scheme.bits}", int(self.zero.max()))
        if self.zero.dtype != torch.uint8 and not bool(torch.isfinite(self.zero).all()):
            self._fail("zero", "finite offsets", "NaN or infinity")

    def _check_global(self) -> None:
        segments = self.segments
        ordered = all(a < b for a, b in pairwise(segments))
        if not segments or segments[0] != 0 or not ordered or segments[-1] >= self.n:
            self._fail("segments", f"increasing first rows below {self.n}, starting with 0", segments)
        scale = self.global_scale
        if not self.scheme.has_global:
            if scale is not None or segments != (0,):
                self._fail("global_scale", "none and segments (0,)", "global scales or segments")
            return
        if scale is None:
            self._fail("global_scale", "float32 multipliers [..., segments]", None)
        if scale.dtype != torch.float32:
            self._fail("global_scale", "float32", scale.dtype, TypeError)
        if list(scale.shape) != [*self.lead, len(segments)]:
            self._fail("global_scale", f"shape {[*self.lead, len(segments)]}", list(scale.shape))
        self._check_device("global_scale", scale)
        if not scale.is_meta and not bool(torch.isfinite(scale).all()):
            self._fail("global_scale", "finite values", "NaN or infinity")


def scales_to_float32(scales: Tensor) -> Tensor:
    """Scales of any storage dtype as float32: uint8 is E8M0."""
    return numeric.e8m0_decode(scales) if scales.dtype == torch.uint8 else scales.to(torch.float32)


def largest_scale(scales: Tensor) -> float:
    """The largest magnitude among scales of any storage dtype; NaN or infinity if one of them is."""
    if scales.dtype == torch.uint8:
        return float(numeric.e8m0_decode(scales.max().view(1)))
    if scales.dtype == torch.float8_e4m3fn:
        return numeric.e4m3_largest(scales.contiguous().view(torch.uint8))
    low, high = (float(v) for v in scales.aminmax())
    return math.nan if math.isnan(low) or math.isnan(high) else max(-low, high)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bytes."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
