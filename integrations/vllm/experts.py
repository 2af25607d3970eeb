"""vLLM's routed experts on gristmill's kernels. Routing, shared experts and the sum over ranks stay vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from gristmill.integrations.collect import Collected
from gristmill.integrations.experts import Experts, problem_of
from gristmill.integrations.layouts import choose_layout
from gristmill.integrations.measured_experts import ExpertsCase
from gristmill.integrations.product import Reader
from gristmill.integrations.vllm.choice import Choice, choose
from gristmill.integrations.vllm.experts_trial import name_of_experts, product_of_experts
from gristmill.integrations.vllm.report import REPORT
from gristmill.integrations.vllm.step_sizes import step_sizes
from gristmill.kernel_registry.select import NoKernelError
from gristmill.quant import QuantTensor, Tensors, concat


def unserved_experts(layer: Any, scheme: str | None, device: torch.device) -> str | None:
    """Why vLLM keeps the experts of a layer, None if they are served."""
    moe = layer.moe_config
    if layer.apply_router_weight_on_input:
        return "the router's weights multiply the inputs of experts"
    if moe.activation.value != "silu":
        return f"activation {moe.activation.value}"
    if moe.has_bias or moe.swiglu_limit is not None or moe.swiglu_alpha is not None:
        return "experts with biases or a clamped activation"
    if moe.moe_parallel_config.use_ep:
        return "expert parallelism"
    if scheme is None:
        return "the configuration does not say how experts are stored"
    try:
        choose_layout("moe", problem_of(scheme, *_sizes(moe), moe.in_dtype), device)
    except (NoKernelError, ValueError) as error:
        return f"no verified kernel: {error}"
    return None


def faster_experts(
    layer: Any, prefix: str, scheme: str, fallback: Callable[[Any], Any], device: torch.device
) -> Choice:
    """Whether times on this device take the experts of a layer that is being made. `fallback` makes vLLM's own method of it."""
    sizes, dtype = _sizes(layer.moe_config), layer.moe_config.in_dtype
    experts, top_k, hidden, inner = sizes
    with set_forward_context(
        None, get_current_vllm_config()
    ):  # kernels may ask it how many tokens ranks have
        return choose(
            prefix,
            f"{scheme} {experts}x{inner}x{hidden} top {top_k}",
            lambda: name_of_experts(layer, fallback),
            lambda method: ExpertsCase("vllm", method, scheme, *sizes, dtype),
            lambda: product_of_experts(layer, fallback),
            device,
        )


def _sizes(moe: Any) -> tuple[int, int, int, int]:
    """Of a `FusedMoEConfig`, for this rank: experts, top_k, H, I."""
    return (
        moe.num_local_experts,
        moe.experts_per_token,
        moe.hidden_dim,
        moe.intermediate_size_per_partition,
    )


def stored_names(layer: Any, prefix: str) -> dict[str, str]:
    """What the checkpoint calls the matrices of an expert, by vLLM's ids of their shards: gate ``w1``, down ``w2``, up ``w3``.

    Layers of vLLM 0.24 do not say it: only their model knows, which tells its loader. There the names follow from what the model's block is
    called, as Transformers names both. They decide which rule of a format a matrix falls under, and what messages call it.
    """
    if hasattr(layer, "ckpt_gate_proj_name"):
        stored = (layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name)
    elif prefix.endswith("block_sparse_moe.experts"):
        stored = ("w1", "w2", "w3")
    else:
        stored = ("gate_proj", "down_proj", "up_proj")
    return dict(zip(("w1", "w2", "w3"), stored, strict=True))


class GristmillExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vLLM is read without types
    """The routed experts of a layer.

    Args:
        read: makes a weight from the tensors of one expert's matrix.
        times: why the layer is taken, if times decided.
    """

    def __init__(self, moe: Any, prefix: str, read: Reader, times: str = "") -> None:
        super().__init__(moe)
        self.prefix, self.read, self.times = prefix, read, times

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype of the expert ids that vLLM's router makes."""
        return torch.int32

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: it describes only vLLM's own kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """Parameters that collect what the checkpoint has of each expert."""
        self.experts, self.hidden, self.inner = num_experts, hidden_size, intermediate_size_per_partition
        self.sizes = step_sizes()
        self.collected = Collected(layer, ("w13_", "w2_"))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read expert after expert, cut for this rank, pack, and verify the kernels."""
        device = self.collected.device
        names = stored_names(layer, self.prefix)
        w13 = [
            concat([self._read(expert, shard, names[shard]).to(device) for shard in ("w1", "w3")], 0)
            for expert in range(self.experts)
        ]
        w2 = [self._read(expert, "w2", names["w2"]).to(device) for expert in range(self.experts)]
        self.collected.release(layer)
        self.packed = Experts(w13, w2, self.moe.experts_per_token, self.moe.in_dtype, device)
        self.packed.prepare(self.sizes)
        REPORT.take(self.prefix, self.packed.scheme, self.packed.kernels(), self.times)

    def _read(self, expert: int, shard: str, name: str) -> QuantTensor:
        module = f"{self.prefix}.{expert}.{name}"
        found = self.collected.parts.get((expert, shard))
        if found is None:
            raise ValueError(f"{self.prefix}: the checkpoint has no tensors of {module}")
        parallel = self.moe.moe_parallel_config
        whole = self.inner * parallel.tp_size
        shape = (self.hidden, whole) if shard == "w2" else (whole, self.hidden)
        source = Tensors({f"{module}.{suffix}": tensor for suffix, tensor in found.items()})
        weight, pre_scale = self.read(source, module, shape)
        if pre_scale is not None:
            raise ValueError(f"{module}: experts whose input is scaled are not served")
        return weight.shard(1 if shard == "w2" else 0, parallel.tp_rank, parallel.tp_size)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [T, H], weights float32 and ids int32 [T, K] -> [T, H]."""
        return self.packed(x, topk_weights, topk_ids)
