"""How the paged KV cache stores keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gristmill.kernel_registry.dtypes import canonical_dtype
from gristmill.runtime.errors import UsageError


@dataclass(frozen=True)
class CacheFormat:
    """A format of the KV cache.

    name: a value of the argument kv_dtype. kv, kv_scale: the axes of the operations that write and read the cache
    (`gristmill.kernels.kv_cache.quantized`).
    """

    name: str
    kv: str = "x"
    kv_scale: str = "none"

    @property
    def quantized(self) -> bool:
        """Whether the cache holds codes and scales instead of keys and values in the activations' dtype."""
        return self.kv != "x"

    @property
    def token_scales(self) -> bool:
        """Whether the cache holds a scale per token and head."""
        return self.kv_scale == "token"

    def dtype(self, activations: torch.dtype) -> torch.dtype:
        """The dtype of the cache tensors."""
        return torch.float8_e4m3fn if self.quantized else activations


AUTO = CacheFormat("auto")
FORMATS = {
    form.name: form
    for form in (AUTO, CacheFormat("fp8", "fp8", "head"), CacheFormat("fp8_token_head", "fp8", "token"))
}


def parse_cache_format(kv_dtype: str | torch.dtype) -> CacheFormat:
    """The format of a name, or of torch.float8_e4m3fn; UsageError lists the known names."""
    if kv_dtype in FORMATS:
        return FORMATS[str(kv_dtype)]
    try:
        name = canonical_dtype(kv_dtype)
    except (TypeError, ValueError):
        name = ""
    if name not in FORMATS:
        raise UsageError(f"unknown kv_dtype {kv_dtype!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]
