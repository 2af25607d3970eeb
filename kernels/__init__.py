"""Operations and their implementations, one folder per family. Specs are found by walking this package.

What specs and launchers share is offered here; names are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill._lazy import lazy_names

if TYPE_CHECKING:
    from gristmill.kernels.aot import AotCase as AotCase
    from gristmill.kernels.common import FLOATS as FLOATS
    from gristmill.kernels.common import ITEM_BYTES as ITEM_BYTES
    from gristmill.kernels.common import dtype_name as dtype_name
    from gristmill.kernels.common import need as need
    from gristmill.kernels.common import torch_dtype as torch_dtype
    from gristmill.kernels.lazy_triton import constexpr as constexpr
    from gristmill.kernels.lazy_triton import jit as jit
    from gristmill.kernels.lazy_triton import tl as tl
    from gristmill.kernels.linear.weight import LinearWeight as LinearWeight
    from gristmill.kernels.native import check as check
    from gristmill.kernels.native_call import CallEntry as CallEntry
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
