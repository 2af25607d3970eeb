"""Routed experts of vLLM's model a second time, with vLLM's own method and arbitrary weights: what `gristmill.integrations.measured` times.

It is made while vLLM asks for the method of the layer: a method rounds the sizes, and vLLM passes some methods further arguments by their
name, before weights are created, so that vLLM's method cannot take the layer over later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gristmill.integrations.measured import SIZES, Call
from gristmill.integrations.vllm.trial import NoMethodError, UntimedError, fill, method_of, text_of, twin_of


def name_of_experts(layer: Any, fallback: Callable[[Any], Any]) -> str:
    """What vLLM computes the experts with, by name: its method, and the kernels that the method chose."""
    method = _modular(method_of(_experts_twin(layer), fallback))
    kernels = getattr(method, "experts_cls", None)
    return type(method).__name__ + ("" if kernels is None else f" {kernels.__name__}")


def product_of_experts(layer: Any, fallback: Callable[[Any], Any]) -> Call:
    """vLLM's own product with weights of arbitrary numbers: x [T, H], weights float32 and ids int32 [T, K] -> [T, H].

    Raises:
        UntimedError: vLLM's method chooses experts itself, or exchanges tokens between ranks.
    """
    twin = _experts_twin(layer)
    moe = twin.moe_config
    hidden, top_k = moe.hidden_dim, moe.experts_per_token
    with _assertions_refuse():
        method = _make(layer, twin, fallback)
        missing = 0 if method.skip_forward_padding else twin.hidden_size - hidden
        dtype = method.topk_indices_dtype or torch.int32

        def product(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            out: Tensor = twin.forward_modular(pad(x, (0, missing)) if missing else x, weights, ids.to(dtype))
            return out

        one = torch.ones(1, top_k, dtype=torch.float32)
        ids = torch.arange(top_k, dtype=torch.int32)[None]
        product(torch.zeros(1, hidden, dtype=moe.in_dtype), one, ids)
    return product


def _make(layer: Any, twin: Any, fallback: Callable[[Any], Any]) -> Any:
    """Give the twin a method with weights, as the constructor of the layer and the loader do. The method."""
    moe = twin.moe_config
    method = twin.quant_method = method_of(twin, fallback)
    sizes = method.maybe_roundup_sizes(
        moe.hidden_dim, moe.intermediate_size_per_partition, moe.in_dtype, moe.moe_parallel_config
    )
    twin.hidden_size, twin.intermediate_size_per_partition = sizes
    moe.hidden_dim, moe.intermediate_size_per_partition = sizes
    method.create_weights(layer=twin, **_attributes(layer, twin, method))
    fill(layer, twin, sizes[::-1])
    with torch.device("cpu"):  # vLLM has left the context of the layer's device when it has loaded weights
        method.process_weights_after_loading(twin)
    twin._ensure_moe_quant_config_init()  # the runner does it before every call
    return _modular(method)


def _experts_twin(layer: Any) -> Any:
    """A copy of the layer with sizes of its own: methods round them, and may hold memory for the largest step."""
    if layer.moe_config.moe_parallel_config.dp_size > 1:
        raise UntimedError("with data parallelism it exchanges tokens between ranks")
    twin = twin_of(layer)
    twin.moe_config = copy.copy(layer.moe_config)
    twin.moe_config.max_num_tokens = max(layer.moe_config.max_num_tokens, *SIZES)
    return twin


def _modular(method: Any) -> Any:
    if method.is_monolithic:
        raise UntimedError("it chooses the experts itself")
    return method


@contextmanager
def _assertions_refuse() -> Iterator[None]:
    """Methods of experts assert what they serve, also in their first call: NoMethodError."""
    try:
        yield
    except AssertionError as error:
        raise NoMethodError(f"{type(error).__name__}: {text_of(error)}") from error


def _attributes(layer: Any, twin: Any, method: Any) -> dict[str, Any]:
    """What vLLM passes to `create_weights` of a method."""
    moe = twin.moe_config
    attributes = {
        "num_experts": moe.num_local_experts,
        "hidden_size": twin.hidden_size,
        "unpadded_hidden_size": moe.hidden_dim_unpadded,
        "intermediate_size_per_partition": twin.intermediate_size_per_partition,
        "params_dtype": twin.params_dtype,
        # The layer's: a parameter that refers to the twin would keep it alive until the next garbage collection.
        "weight_loader": layer.weight_loader,
        "global_num_experts": moe.num_experts,
    }
    if hasattr(twin, "_needs_intermediate_size_param") and twin._needs_intermediate_size_param(method):
        attributes["intermediate_size_full"] = moe.intermediate_size  # of vLLM 0.24
    return attributes
