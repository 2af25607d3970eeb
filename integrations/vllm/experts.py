"""vLLM's routed experts on gristmill's kernels. Routing, shared experts and the sum over ranks stay vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from gristmill import ops
from gristmill.autotune.operators import writer
from gristmill.integrations.collect import Collected
from gristmill.integrations.layouts import choose_layout
from gristmill.integrations.product import Reader
from gristmill.integrations.vllm.report import REPORT
from gristmill.integrations.vllm.step_sizes import step_sizes
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.select import NoKernelError
from gristmill.kernels.common import dtype_name
from gristmill.quant import QuantTensor, Tensors, concat, pack, stack
from gristmill.quant.formats.contract import owned

MOE = writer(default_registry().op("moe"), "x", "weights", "ids", "w13", "w2", "inter")


def unserved_experts(moe: Any, scheme: str | None, device: torch.device) -> str | None:
    """Why vLLM keeps the experts of a `FusedMoEConfig`, None if they are served."""
    if moe.activation.value != "silu":
        return f"activation {moe.activation.value}"
    if moe.has_bias or moe.swiglu_limit is not None or moe.swiglu_alpha is not None:
        return "experts with biases or a clamped activation"
    if moe.moe_parallel_config.use_ep:
        return "expert parallelism"
    if scheme is None:
        return "the configuration does not say how experts are stored"
    try:
        choose_layout("moe", problem_of(moe, scheme), device)
    except (NoKernelError, ValueError) as error:
        return f"no verified kernel: {error}"
    return None


def problem_of(moe: Any, scheme: str) -> str:
    """The static problem of the experts of a `FusedMoEConfig`, for this rank."""
    return (
        f"top_k={moe.experts_per_token},e={moe.num_local_experts},h={moe.hidden_dim},"
        f"i={moe.intermediate_size_per_partition},x={dtype_name(moe.in_dtype)},w={scheme}"
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
    """The routed experts of a layer. `read` makes a weight from the tensors of one expert's matrix."""

    def __init__(self, moe: Any, prefix: str, read: Reader) -> None:
        super().__init__(moe)
        self.prefix, self.read = prefix, read

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
        problem = problem_of(self.moe, str(w2[0].scheme))
        layout = choose_layout("moe", problem, device)
        self.w13 = pack(owned(stack(w13)), layout).tensors
        self.w2 = pack(owned(stack(w2)), layout).tensors
        self.plan = ops.bind("moe", problem, device, layouts=frozenset({layout})).prepare(self.sizes)
        self.handle = self.plan.handle
        kernels = dict.fromkeys(self.plan.entry(size).kernel for size in (1, 16, 256))
        REPORT.take(self.prefix, str(w2[0].scheme), ", ".join(kernels))

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
        out = torch.empty_like(x)
        MOE(x, topk_weights, topk_ids, self.w13, self.w2, self.inner, self.handle, out)
        return out
