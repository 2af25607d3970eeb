"""A paged cache in memory of the program that embeds the engine, such as a host's own pool of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.models import Model


class ExternalCache(PagedCache):
    """The paged cache of a model in tensors of the caller, who keeps them alive and lets nothing else write the engine's blocks.

    While the engine sleeps it does not use the memory; `wake_up` uses the same tensors again, whatever was written there meanwhile.

    Args:
        model: as `load_model` returns it.
        layers: for each layer, what `PagedCache.layers` holds: (K, V) [blocks, block_size, kv_heads, head_dim], with the scales of tokens if
            the format has them, or one latent tensor in a tuple; for a layer that reads those of another, the same tensors. Any strides with
            contiguous last dimensions; the contents do not matter.

    Raises:
        UsageError: a tensor that does not fit the model, by its layer and place.
    """

    def __init__(self, model: Model, layers: Sequence[Sequence[Tensor]]) -> None:
        plans, self._given = model.plans, [tuple(layer) for layer in layers]
        self.form, self.block_size = plans.cache_format, plans.block_size
        if len(self._given) != model.config.num_layers:
            raise UsageError(
                f"the model has {model.config.num_layers} layers, the cache is given for {len(self._given)}"
            )
        if not self._given[0]:
            raise UsageError("layer 0 of the cache has no tensors")
        self.num_blocks = self._given[0][0].shape[0]
        addresses: dict[int, str] = {}
        for index, layer in enumerate(self._given):
            source = model.config.kv_source(index)
            if source != index:
                if [tensor.data_ptr() for tensor in layer] != [t.data_ptr() for t in self._given[source]]:
                    raise UsageError(
                        f"layer {index} of the cache must have the tensors of layer {source}, whose keys and values it reads"
                    )
                continue
            expected = [*self._expected(model.config.of_layer(index), plans.dtype)]
            if len(layer) != len(expected):
                raise UsageError(
                    f"layer {index} of the cache takes {len(expected)} tensors, got {len(layer)}"
                )
            for place, (tensor, (shape, dtype)) in enumerate(zip(layer, expected, strict=True)):
                name = f"tensor {place} of layer {index} of the cache"
                _check(tensor, name, shape, dtype, plans.device)
                other = addresses.setdefault(tensor.data_ptr(), name)
                if other != name and tensor.numel():
                    raise UsageError(f"{name} begins where {other} does: each needs memory of its own")
        self.allocate()

    def _expected(
        self, config: ModelConfig, activations: torch.dtype
    ) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        blocks, dtype = (self.num_blocks, self.block_size), self.form.dtype(activations)
        if config.mla is not None:
            yield (*blocks, config.mla.latent_dim), dtype
            return
        for _ in range(2):
            yield (*blocks, config.num_kv_heads, config.head_dim), dtype
        if self.form.token_scales:
            for _ in range(2):
                yield (*blocks, config.num_kv_heads), torch.float32

    def allocate(self) -> None:
        """Use the caller's tensors."""
        self.layers = list(self._given)

    def release(self) -> None:
        """Use them no more, until `allocate`."""
        self.layers = []

    @property
    def nbytes(self) -> int:
        """Bytes of the caller's memory that are in use."""
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer)


def _check(
    tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(tensor.shape) != shape:
        raise UsageError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype or tensor.device != device:
        raise UsageError(f"{name} must be {dtype} on {device}, got {tensor.dtype} on {tensor.device}")
    if tensor.stride(-1) != 1:
        raise UsageError(f"{name} must have a contiguous last dimension, got strides {tensor.stride()}")
