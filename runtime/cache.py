"""The tensors of the paged KV cache: one allocation for all layers."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from gristmill.runtime.config import ModelConfig


class PagedCache:
    """The paged cache of a model.

    layers: of each layer, (K, V), each [blocks, block_size, kv_heads, head_dim]; of a latent (MLA) model one tensor
    [blocks, block_size, latent_dim], as a tuple of one.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.storage = _zeros(_shape(config, num_blocks, block_size), dtype, device)
        self.layers: list[tuple[Tensor, ...]] = [tuple(layer.unbind(0)) for layer in self.storage.unbind(0)]

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.storage.nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU in pages that the system makes when they are first written, so that unused blocks cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers."""
    return math.prod(_shape(config, 1, 1)) * dtype.itemsize


def _shape(config: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
    if config.mla is not None:
        return (config.num_layers, 1, num_blocks, block_size, config.mla.latent_dim)
    return (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
