"""vLLM's linear layers on gristmill's kernels: as a checkpoint stores them, or quantized while they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import WEIGHT_LOADER_V2_SUPPORTED, LinearMethodBase

from gristmill import ops
from gristmill.integrations.vllm import report
from gristmill.integrations.vllm.collect import Collected, load_into
from gristmill.integrations.vllm.layouts import choose_layout
from gristmill.kernel_registry.select import NoKernelError
from gristmill.kernels.linear.weight import LinearWeight, problem_of
from gristmill.quant import QuantTensor, Tensors, concat
from gristmill.quant.formats.contract import owned

Reader = Callable[[Tensors, str, tuple[int, ...]], tuple[QuantTensor, Tensor | None]]
"""The tensors of a module, its name and its shape -> its weight, and what its input is multiplied by, float32 [K], or None."""


LATENTS = "kv_b_proj"
"""The layer whose weight vLLM's latent attention asks back: it reads the device of ``weight``, and multiplies an identity."""


@dataclass(frozen=True)
class Part:
    """One module of a fused layer. module: its name in the checkpoint. shard: vLLM's id. rows: of the whole module; start, count: ours."""

    module: str
    shard: Any
    rows: int
    start: int
    count: int


class Product:
    """One packed weight and its plans, without and with a bias."""

    def __init__(
        self, weight: QuantTensor, pre_scale: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        act_order, self.n = weight.g_idx is not None, weight.n
        self.pre_scale = None if pre_scale is None else pre_scale.to(device, dtype)
        problems = [
            problem_of(weight.scheme, weight.n, weight.k, dtype, bias, act_order=act_order)
            for bias in (False, True)
        ]
        layout = choose_layout("linear", problems[0], device)
        packed = LinearWeight.pack(owned(weight.to(device)), [layout])
        self.tensors = packed.tensors()
        self.plans = [ops.bind("linear", problem, device, layouts=packed.layouts) for problem in problems]
        self.handles = [plan.handle for plan in self.plans]
        self.scheme = str(weight.scheme)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self.pre_scale is not None:
            x = x * self.pre_scale
        out = x.new_empty(x.shape[0], self.n)
        handle = self.handles[bias is not None]
        torch.ops.gristmill.linear.out(x, self.tensors, bias, None, False, self.n, None, handle, out)
        return out

    def kernels(self) -> str:
        """The kernels of small and large batches."""
        names = dict.fromkeys(self.plans[0].entry(size).kernel for size in (1, 16, 256))
        return ", ".join(names)


class GristmillLinearMethod(LinearMethodBase):  # type: ignore[misc]  # vLLM is read without types
    """A linear layer of vLLM's model.

    read: makes a weight of a module's tensors. names: the modules of a fused layer. scheme: of the layer as far as it is known before
    it is loaded, for the question whether a kernel serves it. fallback: vLLM's own method, None where it has none.
    """

    def __init__(
        self, prefix: str, names: Sequence[str], read: Reader, scheme: str | None, fallback: Callable[[], Any]
    ) -> None:
        self.prefix, self.names, self.read = prefix, list(names), read
        self.scheme, self.fallback = scheme, fallback

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
        k, n, device = input_size_per_partition, sum(output_partition_sizes), _device(layer)
        reason = self._unserved(n, k, params_dtype, device)
        if reason is not None:
            report.leave(self.prefix, self.scheme or "", reason)
            method = layer.quant_method = self.fallback()
            if type(method).__name__ in WEIGHT_LOADER_V2_SUPPORTED and hasattr(layer, "weight_loader_v2"):
                extra_weight_attrs["weight_loader"] = layer.weight_loader_v2
            method.create_weights(
                layer, k, output_partition_sizes, input_size, output_size, params_dtype, **extra_weight_attrs
            )
            return
        self.dtype, self.shape, self.whole_k = params_dtype, (n, k), input_size
        self.parts = _parts(layer, self.prefix, self.names, output_partition_sizes)
        self.collected = Collected(layer)
        if not hasattr(layer, "load_weights"):
            layer.load_weights = load_into(layer)

    def _unserved(self, n: int, k: int, dtype: torch.dtype, device: torch.device) -> str | None:
        if self.scheme is None:
            return None
        try:
            choose_layout("linear", problem_of(self.scheme, n, k, dtype), device)
        except (NoKernelError, ValueError) as error:
            return f"no verified kernel: {error}"
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read, cut for this rank, join what fits one matrix, and pack."""
        device = _device(layer)
        read = [self._read(part, layer) for part in self.parts]
        weights: list[tuple[QuantTensor, Tensor | None]] = []
        for weight, pre_scale in read:
            if weights and pre_scale is None and weights[-1][1] is None and _joins(weights[-1][0], weight):
                weights[-1] = (concat([weights[-1][0], weight], 0), None)
            else:
                weights.append((weight, pre_scale))
        self.collected.release(layer)
        self.products = [Product(weight, scale, self.dtype, device) for weight, scale in weights]
        if self.prefix.rpartition(".")[2] == LATENTS:
            layer.register_buffer("weight", torch.empty(0, dtype=self.dtype, device=device), persistent=False)
        schemes = ", ".join(dict.fromkeys(product.scheme for product in self.products))
        report.take(
            self.prefix, schemes, ", ".join(dict.fromkeys(product.kernels() for product in self.products))
        )

    def _read(self, part: Part, layer: Any) -> tuple[QuantTensor, Tensor | None]:
        found = self.collected.parts.get(part.shard)
        module, rows, start = part.module, part.rows, part.start
        if found is None and None in self.collected.parts:  # the checkpoint stores the fused matrix
            found, module = self.collected.parts[None], self.prefix
            before = [other.rows for other in self.parts[: self.parts.index(part)]]
            rows, start = sum(other.rows for other in self.parts), sum(before) + part.start
        if found is None:
            raise ValueError(f"{self.prefix}: the checkpoint has no tensors of {part.module}")
        source = Tensors({f"{module}.{suffix}": tensor for suffix, tensor in found.items()})
        weight, pre_scale = self.read(source, module, (rows, self.whole_k))
        weight = weight.to(_device(layer))
        if part.count != rows:
            weight = weight.narrow(0, start, part.count)
        k = self.shape[1]
        if k != self.whole_k:
            first = layer.tp_rank * k
            weight = weight.narrow(1, first, k)
            pre_scale = None if pre_scale is None else pre_scale[first : first + k]
        return weight, pre_scale

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] -> [..., N]."""
        flat = x.reshape(-1, x.shape[-1])
        if len(self.products) == 1:
            out = self.products[0](flat, bias)
        else:
            biases = [None] * len(self.products) if bias is None else bias.split([p.n for p in self.products])
            out = torch.cat([p(flat, b) for p, b in zip(self.products, biases, strict=True)], -1)
        return out.view(*x.shape[:-1], out.shape[-1])


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


def _joins(first: QuantTensor, second: QuantTensor) -> bool:
    """Whether two weights are rows of one matrix."""
    try:
        concat([first.narrow(0, 0, 1), second.narrow(0, 0, 1)], 0)
    except ValueError:
        return False
    return True


def _device(layer: Any) -> torch.device:
    """Where the layer computes: vLLM makes layers and loads them in the context of its device."""
    return torch.empty(0, dtype=torch.float32).device
