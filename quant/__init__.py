"""Number formats, QuantTensor, checkpoint formats, weight layouts, quantizers and reference dequantization.

Names are imported on first access, so that specs of layouts and kernels can be listed without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.quant.activations import QuantAct as QuantAct
    from gristmill.quant.activations import quantize_activation as quantize_activation
    from gristmill.quant.formats import Format as Format
    from gristmill.quant.formats import FormatError as FormatError
    from gristmill.quant.formats import Tensors as Tensors
    from gristmill.quant.formats import checkpoint_formats as checkpoint_formats
    from gristmill.quant.formats import open_format as open_format
    from gristmill.quant.formats import open_writer as open_writer
    from gristmill.quant.packed import LayoutError as LayoutError
    from gristmill.quant.packed import Packed as Packed
    from gristmill.quant.packed import pack as pack
    from gristmill.quant.packed import unpack as unpack
    from gristmill.quant.rtn import quantize as quantize
    from gristmill.quant.sharding import concat as concat
    from gristmill.quant.sharding import stack as stack
    from gristmill.quant.tensor import QuantTensor as QuantTensor
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
