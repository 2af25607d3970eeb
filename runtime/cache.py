"""The tensors of the paged KV cache: one allocation for all layers, and one for scales per token if the format has them."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from gristmill.runtime.cache_format import AUTO, CacheFormat
from gristmill.runtime.config import ModelConfig


class PagedCache:
    """The paged cache of a model. dtype: of activations; form: how keys and values are stored.

    layers: of each layer, (K, V), each [blocks, block_size, kv_heads, head_dim]; with scales of tokens (K, V, k_scale, v_scale),
    the scales float32 [blocks, block_size, kv_heads]; of a latent (MLA) model one tensor [blocks, block_size, latent_dim], as a
    tuple of one.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        form: CacheFormat = AUTO,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.form = form
        self._shape, self._dtype, self._device = _shape(config, num_blocks, block_size), dtype, device
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

    def release(self) -> None:
        """Give the memory back, until `allocate`."""
        self.storage, self.scales, self.layers = self.storage.new_empty(0), None, []

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
    """Bytes per token in the caches of all layers. dtype: of activations."""
    shape = _shape(config, 1, 1)
    scales = math.prod(shape[:-1]) * 4 if form.token_scales else 0
    return math.prod(shape) * form.dtype(dtype).itemsize + scales


def _shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    if config.mla is not None:
        return (config.num_layers, 1, num_blocks, block_size, config.mla.latent_dim)
    return (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
