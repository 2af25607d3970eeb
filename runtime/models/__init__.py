"""Models by architecture: each file reads like its paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from gristmill.runtime.batch import Batch
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.layers.rope import Rope
from gristmill.runtime.loader.config import ModelConfig
from gristmill.runtime.loader.weights import Weights, WeightTable


class Model(Protocol):
    """What the runner asks of a model."""

    config: ModelConfig
    plans: Plans

    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm; writes the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> logits [rows, vocab]."""
        ...


def model_table(config: ModelConfig) -> WeightTable:
    """The declared table of checkpoint tensors of a model."""
    return _MODELS[config.architecture]()[0](config)


def build_model(config: ModelConfig, weights: Weights, plans: Plans) -> Model:
    """The model with its parameters, every tensor of the checkpoint accounted for."""
    model: Model = _MODELS[config.architecture]()[1](config, weights, plans)
    weights.finish()
    return model


def make_layer(config: ModelConfig, weights: Weights, plans: Plans, index: int, rope: Rope) -> Any:
    """One decoder layer alone: called as (x, residual, batch, cache), it returns what the next layer adds to the residual."""
    return _MODELS[config.architecture]()[1].make_layer(config, weights, plans, index, rope)


_Maker = tuple[Callable[[ModelConfig], WeightTable], Any]
"""A model's table, and its class: of (config, weights, plans), with `make_layer`."""


def _llama() -> _Maker:
    from gristmill.runtime.models import llama

    return llama.table, llama.Llama


def _deepseek_v3() -> _Maker:
    from gristmill.runtime.models import deepseek_v3

    return deepseek_v3.table, deepseek_v3.DeepseekV3


def _qwen() -> _Maker:
    from gristmill.runtime.models import llama, qwen

    return qwen.table, llama.Llama


def _mixtral() -> _Maker:
    from gristmill.runtime.models import llama, mixtral

    return mixtral.table, llama.Llama


def _gpt_oss() -> _Maker:
    from gristmill.runtime.models import gpt_oss

    return gpt_oss.table, gpt_oss.GptOss


_MODELS = {
    "LlamaForCausalLM": _llama,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen,
    "Qwen3MoeForCausalLM": _qwen,
    "MixtralForCausalLM": _mixtral,
    "GptOssForCausalLM": _gpt_oss,
}
