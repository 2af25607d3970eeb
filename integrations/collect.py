"""Collecting the tensors of a layer as the checkpoint stores them, whole, in place of the host's loading by parameter and shard.

For vLLM and SGLang, which load alike.

A format of `gristmill.quant.formats` reads a module's tensors together and a `QuantTensor` is cut exactly or not at all, so the
layers take the tensors of whole modules from the host's loader, and cut them for their tensor-parallel rank after reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

SUFFIXES = (
    "codes",
    "g_idx",
    "global_scale",
    "input_global_scale",
    "input_scale",
    "pre_quant_scale",
    "qweight",
    "qzeros",
    "scales",
    "weight",
    "weight_g_idx",
    "weight_global_scale",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_shape",
    "weight_zero_point",
    "zero",
)
"""What formats call the tensors of a module: the host loads a tensor only into a parameter of its name."""


class Collected:
    """The tensors of a layer by part and suffix. A part is the host's shard id: ``q``, 0, (expert, ``w1``), or None for a whole layer.

    Made while the host makes the layer, in the context of the layer's device. The tensors may lie elsewhere, and the host may leave the
    context before it asks for the weights to be processed.
    """

    def __init__(self, layer: Any, prefixes: Iterable[str] = ("",)) -> None:
        self.parts: dict[Any, dict[str, Tensor]] = {}
        self.device = torch.empty(0, dtype=torch.float32).device
        self.names = [f"{prefix}{suffix}" for prefix in prefixes for suffix in SUFFIXES]
        for name in self.names:
            parameter = Parameter(torch.empty(0, dtype=torch.float32), requires_grad=False)
            parameter.weight_loader = self._loader(name.removeprefix("w13_").removeprefix("w2_"))  # type: ignore[attr-defined]  # the host's
            layer.register_parameter(name, parameter)

    def _loader(self, suffix: str) -> Any:
        def load(
            param: Parameter,
            loaded_weight: Tensor,
            third: Any = None,
            shard_id: Any = None,
            expert_id: int | None = None,
            **_: Any,
        ) -> bool:
            # The third argument is the shard id of a linear layer, but the parameter's name of an expert.
            part = (third if shard_id is None else shard_id) if expert_id is None else (expert_id, shard_id)
            self.parts.setdefault(part, {})[suffix] = loaded_weight
            return True

        return load

    def release(self, layer: Any) -> None:
        """Take the parameters from the layer, and drop the tensors."""
        for name in self.names:
            delattr(layer, name)
        self.parts.clear()


def load_into(layer: Any) -> Any:
    """A ``load_weights`` for a layer without one of its own, which vLLM's loader calls with names and tensors."""

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        for name, tensor in weights:
            parameter = getattr(layer, name, None)
            if parameter is not None:
                shard = getattr(tensor, "shard_id", None)
                parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))
                yield name

    return load_weights
