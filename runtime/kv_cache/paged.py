"""The tensors of the paged KV cache and their format: one allocation for all layers of a group, and one for scales per token if the format has
them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.kernel_registry.dtypes import canonical_dtype
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.groups import KVGroup


@dataclass(frozen=True)
class CacheFormat:
    """A format of the KV cache.

    Attributes:
        name: a value of the argument kv_dtype.
        kv, kv_scale: the axes of the operations that write and read the cache (`gristmill.kernels.kv_cache.quantized`).
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


class PagedCache:
    """The paged cache of a model.

    Args:
        dtype: the dtype of activations.
        form: how keys and values are stored.
        groups: groups of layers with block tables of their own (`kv_cache.groups`); empty = one group of all layers. The n-th layers of all
            groups share tensors, with one more block: the null block, which stays zero.

    Attributes:
        layers: for each layer (K, V), each [blocks, block_size, kv_heads, head_dim]; with scales of tokens (K, V, k_scale, v_scale), the
            scales float32 [blocks, block_size, kv_heads]; for a latent (MLA) model ([blocks, block_size, latent_dim],).
    """

    groups: tuple[KVGroup, ...] = ()

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        form: CacheFormat = AUTO,
        groups: Sequence[KVGroup] = (),
    ) -> None:
        self.groups = tuple(groups) if len(groups) > 1 else ()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.form = form
        shape = _shape(config, num_blocks + bool(self.groups), block_size)
        if self.groups:
            shape = (max(len(group.layers) for group in self.groups), *shape[1:])
        self._shape, self._dtype, self._device = shape, dtype, device
        self.allocate()

    def allocate(self) -> None:
        """Allocate the cache, with zeros."""
        shape, form, device = self._shape, self.form, self._device
        self.storage = _zeros(shape, form.dtype(self._dtype), device)
        self.scales = _zeros(shape[:-1], torch.float32, device) if form.token_scales else None
        self.layers: list[tuple[Tensor, ...]] = [tuple(layer.unbind(0)) for layer in self.storage.unbind(0)]
        if self.scales is not None:
            of_layers = zip(self.layers, self.scales.unbind(0), strict=True)
            self.layers = [(*layer, *scales.unbind(0)) for layer, scales in of_layers]
        if self.groups:
            places = {layer: place for group in self.groups for place, layer in enumerate(group.layers)}
            self.layers = [self.layers[places[layer]] for layer in sorted(places)]

    def release(self) -> None:
        """Give the memory back, until `allocate`."""
        self.storage, self.scales, self.layers = self.storage.new_empty(0), None, []

    @property
    def windows(self) -> tuple[int, ...]:
        """For each group, the number of keys that a query sees; 0 = all."""
        return tuple(group.window for group in self.groups) or (0,)

    def batches(self, batch: Batch) -> list[Batch]:
        """The step for each layer, with the slots and the block table of its group."""
        batches = [batch] * len(self.layers)
        for group, other in zip(self.groups[1:], batch.others, strict=True):
            for layer in group.layers:
                batches[layer] = other
        return batches

    @property
    def nbytes(self) -> int:
        """Bytes of the allocations."""
        return self.storage.nbytes + (0 if self.scales is None else self.scales.nbytes)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in pages that the system allocates on the first write, so that unused blocks cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def token_bytes(config: ModelConfig, dtype: torch.dtype, form: CacheFormat = AUTO) -> int:
    """Bytes per token in the caches of all layers. `dtype` is that of activations."""
    shape = _shape(config, 1, 1)
    scales = math.prod(shape[:-1]) * 4 if form.token_scales else 0
    return math.prod(shape) * form.dtype(dtype).itemsize + scales


def _shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    if config.mla is not None:
        return (config.num_layers, 1, num_blocks, block_size, config.mla.latent_dim)
    return (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
