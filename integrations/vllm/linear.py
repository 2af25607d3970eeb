"""vLLM's linear layers on gristmill's kernels: as a checkpoint stores them, or quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearMethodBase

from gristmill.integrations.collect import Collected, load_into
from gristmill.integrations.measured_linear import LinearCase
from gristmill.integrations.product import Part, Product, Reader, Shard, joined, multiply, unserved
from gristmill.integrations.vllm.choice import choose
from gristmill.integrations.vllm.report import REPORT
from gristmill.integrations.vllm.step_sizes import step_sizes
from gristmill.integrations.vllm.trial import name_of, product_of

LATENTS = "kv_b_proj"
"""The layer whose weight vLLM's latent attention asks back: it reads the device of ``weight``, and multiplies an identity."""


class GristmillLinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM is read without types
    """A linear layer of vLLM's model.

    Args:
        read: makes a weight from a module's tensors.
        names: the modules of a fused layer.
        scheme: the scheme of the layer as far as it is known before it is loaded, to ask whether a kernel serves it.
        fallback: vLLM's own method of a layer.
        measured: whether to take the layer only if times on this device say so.
    """

    def __init__(
        self,
        prefix: str,
        names: Sequence[str],
        read: Reader,
        scheme: str | None,
        fallback: Callable[[Any], Any],
        *,
        measured: bool = False,
    ) -> None:
        self.prefix, self.names, self.read = prefix, list(names), read
        self.scheme, self.fallback, self.measured, self.times = scheme, fallback, measured, ""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters that collect what the checkpoint has; or vLLM's own method's, where no kernel serves the layer."""
        k, n, device = input_size_per_partition, sum(output_partition_sizes), _device()
        reason = unserved(self.scheme, n, k, params_dtype, device)
        if reason is None and self.measured and self.scheme is not None:
            whole = (output_size, input_size)
            reason = self._slower(layer, output_partition_sizes, whole, k, params_dtype, extra_weight_attrs)
        if reason is not None:
            REPORT.leave(self.prefix, self.scheme or "", reason)
            method = layer.quant_method = self.fallback(layer)
            if type(method).__name__ in WEIGHT_LOADER_V2_SUPPORTED and hasattr(layer, "weight_loader_v2"):
                extra_weight_attrs["weight_loader"] = layer.weight_loader_v2
            method.create_weights(
                layer, k, output_partition_sizes, input_size, output_size, params_dtype, **extra_weight_attrs
            )
            return
        self.dtype, self.shape, self.whole_k = params_dtype, (n, k), input_size
        self.parts = _parts(layer, self.prefix, self.names, output_partition_sizes)
        self.sizes = step_sizes()
        self.collected = Collected(layer)
        if not hasattr(layer, "load_weights"):
            layer.load_weights = load_into(layer)

    def _slower(
        self,
        layer: Any,
        sizes: Sequence[int],
        whole: tuple[int, int],
        k: int,
        dtype: torch.dtype,
        attributes: dict[str, Any],
    ) -> str | None:
        """Times that say that vLLM's own method is the faster one; None if ours is, or if vLLM has none that works."""
        scheme, n = str(self.scheme), sum(sizes)
        choice = choose(
            self.prefix,
            f"{scheme} {n}x{k}",
            lambda: name_of(layer, self.fallback),
            lambda method: LinearCase("vllm", method, scheme, n, k, dtype),
            lambda: product_of(layer, self.fallback, sizes, whole, k, dtype, attributes),
            _device(),
        )
        self.times = choice.times
        return choice.reason

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read, cut for this rank, join what fits one matrix, pack, and verify the kernels, so that no request waits for it."""
        device = self.collected.device
        shard = Shard(self.prefix, self.parts, self.shape, self.whole_k, layer.tp_rank)
        weights = joined(shard.read(self.collected, self.read, device))
        self.collected.release(layer)
        self.products = [Product(weight, scale, self.dtype, device) for weight, scale in weights]
        for product in self.products:
            product.prepare(self.sizes, bias=getattr(layer, "bias", None) is not None)
        if self.prefix.rpartition(".")[2] == LATENTS:
            layer.register_buffer("weight", torch.empty(0, dtype=self.dtype, device=device), persistent=False)
        schemes = ", ".join(dict.fromkeys(product.scheme for product in self.products))
        REPORT.take(
            self.prefix,
            schemes,
            ", ".join(dict.fromkeys(product.kernels() for product in self.products)),
            self.times,
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        return multiply(self.products, x, bias)


def _parts(layer: Any, prefix: str, names: Sequence[str], counts: Sequence[int]) -> list[Part]:
    """The modules of a layer, and which of their rows are this rank's."""
    parent = prefix.rpartition(".")[0]
    modules = (
        [f"{parent}.{name}" if parent else name for name in names] if len(names) == len(counts) else [prefix]
    )
    rank, size = layer.tp_rank, layer.tp_size
    shards: list[Any]
    if hasattr(layer, "total_num_kv_heads"):  # q, k and v; ranks may share heads of k and v
        heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
        widths = (layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size))
        rows = [count * width for count, width in zip(heads, widths, strict=True)]
        ranks, shards = [rank, *[rank // layer.num_kv_head_replicas] * 2], ["q", "k", "v"]
    elif len(counts) > 1:
        rows = list(layer.output_sizes)
        ranks, shards = [rank] * len(counts), [*range(len(counts))]
    else:
        rows = [layer.output_size]
        ranks, shards = [rank], [None]
    return [
        Part(module, shard, whole, 0 if whole == count or size == 1 else index * count, count)
        for module, shard, whole, index, count in zip(modules, shards, rows, ranks, counts, strict=True)
    ]


def _device() -> torch.device:
    """Where the layer computes: vLLM makes layers in the context of its device."""
    return torch.empty(0, dtype=torch.float32).device
