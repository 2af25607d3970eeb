"""gristmill's own directories: in place of ``NAME.weight`` the fields of a QuantTensor.

``NAME.codes`` (uint8 [N, ceil(K*bits/8)], a dense little-endian bit stream along K), and, where the scheme has them,
``NAME.scales``, ``NAME.zero`` and ``NAME.global_scale``, as `gristmill.quant.tensor` describes them; E8M0 scales are U8, E4M3
scales F8_E4M3. config.json says {"quant_method": "gristmill", "version": 1, "scheme": "int4_g128"}.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
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
)
from gristmill.quant.formats.writers import SchemeWriter
from gristmill.quant.tensor import QuantTensor

FIELDS = ("codes", "scales", "zero", "global_scale")


class Gristmill(Format):
    """A checkpoint of ``quant_method: gristmill``: every linear weight is in its one scheme."""

    name = "gristmill"

    def __init__(self, config: Mapping[str, Any], where: str = "quantization_config") -> None:
        fields = Fields(config, where)
        version = fields.get("version", int, 1)
        if version != 1:
            raise FormatError(
                f"{where}: version {version} was written by a newer gristmill; this one reads 1"
            )
        try:
            self.scheme = QuantScheme.parse(fields.get("scheme", str))
        except ValueError as error:
            raise FormatError(f"{where}: {error}") from error

    def scheme_of(self, module: str) -> QuantScheme:
        """The one scheme."""
        return self.scheme

    def read(
        self, source: Source, module: str, shape: tuple[int, ...], place: Place = new_codes
    ) -> StoredWeight | None:
        """The weight of a module; only matrices are stored so, experts one by one."""
        need(source, module, (".codes",), f"{self.scheme} by gristmill")
        names = {field: f"{module}.{field}" for field in FIELDS if f"{module}.{field}" in source}
        tensors = {field: source.read(name) for field, name in names.items()}
        weight = make(
            module,
            tensors["codes"],
            tensors.get("scales"),
            shape,
            self.scheme,
            tensors.get("zero"),
            tensors.get("global_scale"),
        )
        return StoredWeight(weight, tuple(names.values()))


class GristmillWriter(SchemeWriter):
    """gristmill's own fields."""

    name = "gristmill"

    def holds(self, scheme: QuantScheme) -> bool:
        return not scheme.is_dense

    def tensors(self, weight: QuantTensor) -> dict[str, Tensor]:
        return weight.tensors()

    def config(self, kept: Collection[str]) -> dict[str, Any]:
        return {"quant_method": "gristmill", "version": 1, "scheme": str(self.scheme)}


FORMAT = FormatSpec("gristmill", Gristmill, GristmillWriter)
