"""Functions shared by the writers of checkpoint formats: schemes, tensor names, checks of QuantTensor fields."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.formats.contract import FormatError
from gristmill.quant.rtn import quantize
from gristmill.quant.tensor import QuantTensor

E4M3 = torch.float8_e4m3fn


class SchemeWriter(ABC):
    """A Writer of one scheme, which is checked when the writer is made."""

    name = ""
    stacked = False

    def __init__(self, scheme: QuantScheme | str) -> None:
        self.scheme = QuantScheme.parse(scheme)
        if not self.holds(self.scheme):
            raise FormatError(
                f"{self.name} checkpoints do not hold {self.scheme}; see {type(self).__module__}"
            )

    @abstractmethod
    def holds(self, scheme: QuantScheme) -> bool:
        """Whether the format has a form for weights of `scheme`."""

    def quantize(self, weight: Tensor) -> QuantTensor:
        """The weight rounded to nearest."""
        return quantize(weight, self.scheme)


def stored_name(module: str, suffix: str) -> str:
    """The tensor of a module: ``NAME.scales``, and of stacked experts ``NAME_scales``."""
    return f"{module}{suffix}" if suffix.startswith("_") else f"{module}.{suffix}"


def field(tensor: Tensor | None) -> Tensor:
    """A field that the scheme has, contiguous; FormatError when it is missing."""
    if tensor is None:
        raise FormatError("a quantized weight lacks the scales of its scheme")
    return tensor.contiguous()


def zero_codes(zero: Tensor, bits: int) -> Tensor:
    """Zero points as codes of the width; FormatError where they are none (offsets of GGUF, 2**bits)."""
    if zero.dtype != torch.uint8 or int(zero.max()) >= 1 << bits:
        raise FormatError(
            f"zero points must be integers below {1 << bits} to be packed, got {zero.dtype} up to {float(zero.max())}"
        )
    return zero
