"""Number formats, QuantTensor, layouts, quantizers and reference dequantization.

Names are resolved when first used, so that specs of layouts and kernels can be listed without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gristmill.quant.activations import QuantAct as QuantAct
    from gristmill.quant.activations import quantize_activation as quantize_activation
    from gristmill.quant.packed import Packed as Packed
    from gristmill.quant.packed import pack as pack
    from gristmill.quant.packed import unpack as unpack
    from gristmill.quant.rtn import quantize as quantize
    from gristmill.quant.sharding import concat as concat
    from gristmill.quant.sharding import stack as stack
    from gristmill.quant.tensor import QuantTensor as QuantTensor

_HOME = {
    "QuantTensor": "tensor",
    "quantize": "rtn",
    "QuantAct": "activations",
    "quantize_activation": "activations",
    "Packed": "packed",
    "pack": "packed",
    "unpack": "packed",
    "concat": "sharding",
    "stack": "sharding",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
