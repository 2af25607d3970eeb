"""AWQ checkpoints of version "gemm" (AutoAWQ): 4 bits, groups along K, zero points.

``NAME.qweight`` int32 [K, N/8] and ``NAME.qzeros`` int32 [K/G, N/8] are packed along N, nibble i of word c holding column
8c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; ``NAME.scales`` float16 [K/G, N]. W[n, k] = (q - z) * s with q and z unsigned: nothing is
added to z. Where qzeros are absent (``zero_point: false``) z is 8. The other versions (gemv, gemv_fast, marlin, exllama, ipex ...) order their
words otherwise and are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant.formats import words
from gristmill.quant.formats.args import AWQ
from gristmill.quant.formats.contract import (
    FLOATS,
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
from gristmill.quant.native import packing_function

COLUMN = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, within its eight, that nibble i of a word holds."""
NIBBLE = tuple(COLUMN.index(j) for j in range(8))
"""Nibble that holds column j."""
_LOW = 0x0F0F0F0F
_CHUNK = 512
"""Values of k rearranged at a time, an even number: their words stay in a core's cache."""


class Awq(Format):
    """A checkpoint of ``quant_method: awq``."""

    name = "awq"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        fields = Fields(config, where)
        version = fields.get("version", str, "gemm").lower()
        if version != "gemm":
            raise FormatError(
                f"{where}: AWQ version {version!r} is not read; known: gemm (convert it with AutoAWQ)"
            )
        bits = fields.get("bits", int, None) or fields.get("w_bit", int, 4)
        if bits != 4:
            raise FormatError(f"{where}: AWQ has 4 bits, got {bits}")
        self.group = fields.get("group_size", int, None) or fields.get("q_group_size", int, 128)
        self.zero_point = fields.get("zero_point", bool, True)

    def scheme_of(self, module: str) -> QuantScheme:
        """One for all; a module that is not quantized has other tensors."""
        return QuantScheme.integer(4, None if self.group == -1 else self.group, zero_points=self.zero_point)

    def beside(self, source: Source, read: Collection[str]) -> set[str]:
        """Biases of 0."""
        return zero_biases(source, read, ".qweight")

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module, None where it is stored in floats."""
        if f"{module}.qweight" not in source:
            return None
        if len(shape) != 2:
            raise FormatError(f"{module}: AWQ stores matrices [N, K], not {list(shape)}")
        n, k = shape
        group = k if self.group in (-1, k) else self.group
        if n % 8 or group < 1 or k % group:
            raise FormatError(
                f"{module}: AWQ needs N a multiple of 8 and K of its groups of {group}, got [{n}, {k}]"
            )
        names = [f"{module}.qweight", f"{module}.scales"]
        need(source, module, (".scales", ".qzeros") if self.zero_point else (".scales",), "AWQ")
        packed = rows(source.read(names[0], (k, n // 8), dtypes=(torch.int32,)), place)
        scales = (
            source.read(names[1], (k // group, n), dtypes=FLOATS)
            .t()
            .clone(memory_format=torch.contiguous_format)
        )
        zeros = None
        if f"{module}.qzeros" in source:
            names.append(f"{module}.qzeros")
            zeros = (
                natural(source.read(names[2], (k // group, n // 8), dtypes=(torch.int32,))).t().contiguous()
            )
            if not self.zero_point and bool((zeros == 8).all()):
                zeros = None
        scheme = QuantScheme.integer(4, None if group == k else group, zero_points=zeros is not None)
        return StoredWeight(make(module, packed, scales, shape, scheme, zeros), tuple(names))


def rows(packed: Tensor, place: Place = new_codes) -> Tensor:
    """int32 [K, N/8] in AWQ's order -> a bit stream along K, uint8 [N, ceil(K/2)].

    Words of k and k + 1 become two words: of their even nibbles, and of their odd ones, each byte a row's pair of codes.
    """
    k, columns = packed.shape
    codes = place((columns * 8, cdiv(k, 2)))
    native = packing_function("gm_awq_rows", AWQ) if k % 8 == 0 else None
    if native is not None and packed.device.type == "cpu" and codes.is_contiguous():
        packed = packed.contiguous()
        native(words=packed.data_ptr(), k=k, columns=columns, codes=codes.data_ptr())
        return codes
    out: Tensor = codes.unflatten(0, (columns, 8))
    for start in range(0, k, _CHUNK):
        words_of = packed[start : start + _CHUNK].t().contiguous()
        if words_of.shape[1] % 2:
            words_of = torch.nn.functional.pad(words_of, (0, 1))
        even_words, odd_words = words_of[:, 0::2], words_of[:, 1::2]
        pairs = (
            (even_words & _LOW) | ((odd_words & _LOW) << 4),
            ((even_words >> 4) & _LOW) | (odd_words & ~_LOW),
        )
        for odd, word in enumerate(pairs):
            octets = word.view(torch.uint8).unflatten(1, (-1, 4))
            for i in range(4):
                out[:, COLUMN[2 * i + odd], start // 2 : (start + _CHUNK) // 2] = octets[..., i]
    return out.flatten(0, 1)  # a view


def natural(packed: Tensor) -> Tensor:
    """int32 [R, N/8] in AWQ's order -> uint8 [R, N], columns in order."""
    codes = words.codes(packed, 4, packed.shape[-1] * 8)
    return codes.view(*packed.shape, 8)[..., list(NIBBLE)].flatten(-2)


FORMAT = FormatSpec("awq", Awq, sidecar="quant_config.json")
