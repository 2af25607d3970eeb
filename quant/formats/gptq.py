"""GPTQ checkpoints (AutoGPTQ, GPTQModel), versions 1 and 2; 2, 3, 4 and 8 bits; with and without act-order.

Of a module NAME with K inputs, N outputs, b bits and groups of G:

- ``NAME.qweight`` int32 [K*b/32, N], codes packed densely along K;
- ``NAME.qzeros`` int32 [ceil(K/G), N*b/32], zero points packed densely along N. Version 1 (``checkpoint_format`` absent or
  ``gptq``) stores them minus one, modulo 2^b; ``gptq_v2`` as they are;
- ``NAME.scales`` float16 or bfloat16 [ceil(K/G), N];
- ``NAME.g_idx`` int32 [K], the group of each input: k // G, or anything with ``desc_act``. Rows are not reordered on disk.

W[n, k] = (q[k, n] - z[g, n]) * s[g, n], g = g_idx[k]. Zero points that are all 2^(b-1) are left implicit when the
configuration says ``sym``. Their tensors determine which modules are quantized: lists are often absent. ``dynamic``
overrides bits and group size by regular expressions, ``-:`` ones name modules that are not quantized.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant import numeric
from gristmill.quant.formats import words
from gristmill.quant.formats.contract import (
    Fields,
    Format,
    FormatError,
    FormatSpec,
    Place,
    Source,
    StoredWeight,
    make,
    need,
    new_codes,
    zero_biases,
)
from gristmill.quant.formats.expressions import expression
from gristmill.quant.formats.writers import SchemeWriter, field, zero_codes
from gristmill.quant.tensor import QuantTensor

BITS = (2, 3, 4, 8)
SCALES = (torch.float16, torch.bfloat16, torch.float32)


class Gptq(Format):
    """A checkpoint of ``quant_method: gptq``."""

    name = "gptq"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        fields = Fields(config, where)
        self.origin = where
        self.bits = _bits(fields)
        self.group = fields.get("group_size", int, 128)
        self.symmetric = fields.get("sym", bool, True)
        self.ordered = fields.get("desc_act", bool, False)
        if fields.get("is_marlin_format", bool, False):
            raise FormatError(
                f"{where}: is_marlin_format: weights in Marlin's order are not read; known: gptq, gptq_v2"
            )
        version = fields.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        self.zero_offset = 1 if version == "gptq" else 0
        self.dynamic: list[tuple[re.Pattern[str], tuple[int, int, bool] | None]] = []
        for pattern, override in fields.get("dynamic", Mapping, {}).items():
            sign, text = (pattern[:1], pattern[2:]) if pattern[:2] in ("+:", "-:") else ("+", pattern)
            rule = (
                None if sign == "-" else self._rule(Fields(override or {}, f"{where}.dynamic[{pattern!r}]"))
            )
            self.dynamic.append((expression(text, f"{where}.dynamic"), rule))

    def rule(self, module: str) -> tuple[int, int, bool] | None:
        """(bits, group size, symmetric) of a module, None when a rule excludes it from quantization."""
        for pattern, rule in self.dynamic:
            if pattern.match(module):
                return rule
        return self.bits, self.group, self.symmetric

    def _rule(self, override: Fields) -> tuple[int, int, bool]:
        bits = _bits(override) if "bits" in override.data else self.bits
        return bits, override.get("group_size", int, self.group), override.get("sym", bool, self.symmetric)

    def scheme_of(self, module: str) -> QuantScheme | None:
        """The scheme by the rules; its zero points may turn out to be implicit."""
        rule = self.rule(module)
        if rule is None:
            return None
        bits, group, symmetric = rule
        return QuantScheme.integer(bits, None if group == -1 else group, zero_points=not symmetric)

    def beside(self, source: Source, read: Collection[str]) -> set[str]:
        """Biases of 0."""
        return zero_biases(source, read, ".qweight")

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, None where it is stored in floats."""
        rule = self.rule(module)
        if f"{module}.qweight" not in source:
            return None
        if rule is None:
            raise FormatError(
                f"{module}: {self.origin}.dynamic says it is not quantized, but there is {module}.qweight"
            )
        if len(shape) != 2:
            raise FormatError(f"{module}: GPTQ stores matrices [N, K], not {list(shape)}")
        bits, group, symmetric = rule
        n, k = shape
        need(source, module, (".qzeros", ".scales"), "GPTQ")
        size = k if group in (-1, k) else group
        if size < 1 or k * bits % 32 or n * bits % 32:
            raise FormatError(
                f"{module}: {bits} bits in groups of {group} need N and K such that a row of codes fills int32 words, "
                f"got [{n}, {k}]"
            )
        groups = cdiv(k, size)
        codes = source.read(f"{module}.qweight", (k * bits // 32, n), dtypes=(torch.int32,))
        packed = source.read(f"{module}.qzeros", (groups, n * bits // 32), dtypes=(torch.int32,))
        scales = (
            source.read(f"{module}.scales", (groups, n), dtypes=SCALES)
            .t()
            .clone(memory_format=torch.contiguous_format)
        )
        middle = torch.full(
            (n,), ((1 << (bits - 1)) - self.zero_offset) & ((1 << bits) - 1), dtype=torch.uint8
        )
        implicit = symmetric and bool(
            (packed == words.to_words(numeric.pack_bits(middle, bits), packed.shape[1])).all()
        )
        zeros = None if implicit else self._zeros(words.codes(packed, bits, n), bits).t().contiguous()
        g_idx, names = None, [f"{module}.{part}" for part in ("qweight", "qzeros", "scales")]
        if f"{module}.g_idx" in source:
            names.append(f"{module}.g_idx")
            g_idx = self._g_idx(source, names[-1], k, groups)
        elif self.ordered and groups > 1:
            raise FormatError(
                f"{module}: {self.origin}.desc_act says that columns are in an order, and there is no {module}.g_idx"
            )
        if groups == 1:
            g_idx = None
        # A group size equal to K stays in the scheme: matrices of experts with another K have the same scheme.
        scheme = QuantScheme.integer(
            bits, None if group == -1 or size > k else size, zero_points=not implicit
        )
        # a column of words is a row's bit stream
        stream = words.stream(codes.t(), bits, k, place)
        return StoredWeight(make(module, stream, scales, shape, scheme, zeros, g_idx=g_idx), tuple(names))

    def _zeros(self, stored: Tensor, bits: int) -> Tensor:
        return (stored + self.zero_offset) & ((1 << bits) - 1)

    def _g_idx(self, source: Source, name: str, k: int, groups: int) -> Tensor:
        g_idx = source.read(name, (k,), dtypes=(torch.int32, torch.int64))
        low, high = (int(v) for v in g_idx.aminmax())
        if low < 0 or high >= groups:
            raise FormatError(f"tensor {name} must name groups 0..{groups - 1}, got {low}..{high}")
        return g_idx.to(torch.int32, copy=True)


def _bits(fields: Fields) -> int:
    bits = fields.get("bits", int)
    if bits not in BITS:
        raise FormatError(f"{fields.origin}: bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    return int(bits)


class GptqWriter(SchemeWriter):
    """GPTQ version 2."""

    name = "gptq"

    def holds(self, scheme: QuantScheme) -> bool:
        return scheme.is_integer and scheme.bits in BITS and not scheme.minimums and scheme.activation is None

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        bits, n, k = self.scheme.bits, weight.n, weight.k
        if n * bits % 32 or k * bits % 32:
            raise FormatError(
                f"GPTQ packs {bits}-bit rows and columns into whole int32 words, which [{n}, {k}] does not fill"
            )
        scales = field(weight.scales)
        half = scales.to(torch.float16)
        zero = (
            torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
            if weight.zero is None
            else zero_codes(weight.zero, bits)
        )
        return {
            "qweight": words.to_words(weight.codes, k * bits // 32).t().contiguous(),
            "qzeros": words.to_words(numeric.pack_bits(zero.t().contiguous(), bits), n * bits // 32),
            # other readers expect float16: what it does not hold exactly stays as it is
            "scales": (half if torch.equal(half.to(scales.dtype), scales) else scales).t().contiguous(),
            "g_idx": weight.column_groups().clone(),
        }

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": self.scheme.bits,
            "group_size": self.scheme.group_size or -1,
            "desc_act": False,
            "sym": self.scheme.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq_v2",
        }


FORMAT = FormatSpec("gptq", Gptq, GptqWriter, sidecar="quantize_config.json")
