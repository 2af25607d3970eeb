"""SGLang's linear layers on gristmill's kernels: as a checkpoint stores them, or quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor

from gristmill.integrations.collect import Collected
from gristmill.integrations.product import Part, Product, Reader, Shard, joined, multiply, unserved
from gristmill.integrations.report import Report
from gristmill.runtime.errors import UsageError


class GristmillLinearMethod(LinearMethodBase):  # type: ignore[misc]  # SGLang is read without types
    """A linear layer of SGLang's model.

    Args:
        modules: the modules of the checkpoint that it is made of.
        read: makes a weight from a module's tensors.
        scheme: the scheme of the layer as far as it is known before it is loaded.
        floats: whether the checkpoint is in floats; SGLang itself then multiplies layers that no kernel serves.
    """

    def __init__(
        self,
        prefix: str,
        modules: Sequence[str],
        read: Reader,
        scheme: str | None,
        report: Report,
        floats: bool,
    ) -> None:
        self.prefix, self.modules, self.read = prefix, list(modules), read
        self.scheme, self.report, self.floats = scheme, report, floats

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
        """Parameters that collect what the checkpoint has.

        Raises:
            UsageError: no kernel serves the layer of a quantized checkpoint; or the checkpoint is sharded already.
        """
        if getattr(layer, "use_presharded_weights", False):
            raise UsageError(
                f"--quantization gristmill does not serve checkpoints that are sharded ({self.prefix})"
            )
        k, n = input_size_per_partition, sum(output_partition_sizes)
        reason = unserved(self.scheme, n, k, params_dtype, _device())
        if reason is not None:
            if not self.floats:
                raise UsageError(f"{self.prefix}: {reason}")
            self.report.leave(self.prefix, self.scheme or "", reason)
            method = layer.quant_method = UnquantizedLinearMethod()
            method.create_weights(
                layer,
                k,
                output_partition_sizes,
                input_size,
                output_size,
                params_dtype,
                **extra_weight_attrs,
            )
            return
        self.dtype = params_dtype
        rank = get_group_rank_size(layer.tp_group)[0] if k != input_size else 0
        parts = _parts(layer, self.prefix, self.modules, output_partition_sizes)
        self.shard = Shard(self.prefix, parts, (n, k), input_size, rank)
        self.collected = Collected(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read, cut for this rank, join what fits one matrix, and pack."""
        device = self.collected.device
        weights = joined(self.shard.read(self.collected, self.read, device))
        self.collected.release(layer)
        self.products = [Product(weight, scale, self.dtype, device) for weight, scale in weights]
        schemes = ", ".join(dict.fromkeys(product.scheme for product in self.products))
        kernels = ", ".join(dict.fromkeys(product.kernels() for product in self.products))
        self.report.take(self.prefix, schemes, kernels)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """UsageError: packed weights cannot be loaded again."""
        raise UsageError("--quantization gristmill does not serve new weights: restart SGLang")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        return multiply(self.products, x, bias)


def _parts(layer: Any, prefix: str, modules: Sequence[str], counts: Sequence[int]) -> list[Part]:
    """The modules of a layer, and which of their rows are this rank's."""
    rank, size = get_group_rank_size(layer.tp_group)
    names = modules if len(modules) == len(counts) else [prefix]
    shards: list[Any]
    if hasattr(layer, "total_num_kv_heads"):  # q, k and v; ranks may share heads of k and v
        heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
        widths = (layer.head_size, layer.head_size, layer.v_head_size)
        rows = [count * width for count, width in zip(heads, widths, strict=True)]
        of_kv = get_group_rank_size(layer.kv_tp_group)[0] // layer.num_kv_head_replicas
        ranks, shards = [rank, of_kv, of_kv], ["q", "k", "v"]
    elif len(counts) > 1:
        rows, ranks, shards = list(layer.output_sizes), [rank] * len(counts), [*range(len(counts))]
    else:
        rows, ranks, shards = [layer.output_size], [rank], [None]
    return [
        Part(module, shard, whole, 0 if whole == count or size == 1 else index * count, count)
        for module, shard, whole, index, count in zip(names, shards, rows, ranks, counts, strict=True)
    ]


def _device() -> torch.device:
    """Where the layer computes: SGLang makes layers in the context of its device."""
    return torch.empty(0, dtype=torch.float32).device
