"""The tensors of the paged KV cache and their format: one allocation for all layers of a group, and one for scales per token if the format has
them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.kernel_registry.dtypes import canonical_dtype
from gristmill.runtime.batch import Batch
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache import host_memory
from gristmill.runtime.kv_cache.groups import KVGroup
from gristmill.runtime.kv_cache.places import Places


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
        groups: groups of layers with block tables of their own (`kv_cache.groups`); empty = one group of all layers. They share memory
            (`kv_cache.places`), with one more block: the null block, which stays zero.

    Attributes:
        layers: for each layer (K, V), each [blocks, block_size, kv_heads, head_dim]; with scales of tokens (K, V, k_scale, v_scale), the
            scales float32 [blocks, block_size, kv_heads]; for a latent (MLA) model ([blocks, block_size, latent_dim],). Layers that are
            narrower than others have strides between blocks. A layer that reads the keys and values of another has its tensors.
        storage, scales: the memory, [places, parts, blocks, block_size, width], parts being K and V, or the latent; None = no scales.
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
        self._config, self._places = config, Places(config, self.groups)
        self._dtype, self._device = dtype, device
        self.allocate()

    def allocate(self) -> None:
        """Allocate the cache, with zeros."""
        c, places, form = self._config, self._places, self.form
        shape = (places.count, _parts(c), self.num_blocks + bool(self.groups), self.block_size)
        self.storage = _zeros((*shape, places.width), form.dtype(self._dtype), self._device)
        self.scales = None
        if form.token_scales:
            self.scales = _zeros((*shape, places.heads), torch.float32, self._device)
        self.layers: list[tuple[Tensor, ...]] = [
            self._tensors(c.kv_source(layer)) for layer in range(c.num_layers)
        ]

    def _tensors(self, layer: int) -> tuple[Tensor, ...]:
        """The tensors of a layer with keys and values of its own."""
        own, (number, part) = self._config.of_layer(layer), self._places.of[layer]
        row: tuple[int, ...] = (own.num_kv_heads, own.head_dim)
        if own.mla is not None:
            row = (own.mla.latent_dim,)
        memory = [(self.storage, row)] + ([] if self.scales is None else [(self.scales, row[:1])])
        found = []
        for tensor, entry in memory:
            size = self.block_size * math.prod(entry)
            of_block = tensor[number].flatten(2)[..., part * size : (part + 1) * size]
            found += of_block.unflatten(2, (self.block_size, *entry)).unbind(0)
        return tuple(found)

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
    """Zeros; on a CPU unused blocks cost nothing, and other processes can map them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return host_memory.zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def token_bytes(
    config: ModelConfig, dtype: torch.dtype, form: CacheFormat = AUTO, groups: Sequence[KVGroup] = ()
) -> int:
    """Bytes per token in the caches of all layers, or of those of one of the `groups`. `dtype` is that of activations."""
    places = Places(config, groups)
    scales = places.heads * 4 if form.token_scales else 0
    return places.count * _parts(config) * (places.width * form.dtype(dtype).itemsize + scales)


def _parts(config: ModelConfig) -> int:
    """The tensors of a layer: K and V, or the latent."""
    return 2 if config.mla is None else 1
