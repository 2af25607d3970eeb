"""What of vLLM's model runs on gristmill's kernels, and why the rest does not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class Layer:
    """One layer of the model. kernels: by the upper bound of a batch, "" where vLLM runs it. reason: why vLLM runs it, "" otherwise."""

    name: str
    taken: bool
    scheme: str
    kernels: str
    reason: str


_layers: dict[str, Layer] = {}


def take(name: str, scheme: str, kernels: str) -> None:
    """A layer runs on our kernels."""
    _note(Layer(name, True, scheme, kernels, ""))


def leave(name: str, scheme: str, reason: str) -> None:
    """vLLM runs a layer."""
    _note(Layer(name, False, scheme, "", reason))


def _note(layer: Layer) -> None:
    said = {(other.taken, other.scheme, other.kernels, other.reason) for other in _layers.values()}
    if (layer.taken, layer.scheme, layer.kernels, layer.reason) not in said:
        what = (
            f"runs {layer.scheme} with {layer.kernels}" if layer.taken else f"is left to vLLM: {layer.reason}"
        )
        logger.info("gristmill: %s, the first of its kind, %s", layer.name, what)
    _layers[layer.name] = layer


def explain() -> list[dict[str, Any]]:
    """The layers of this process's models, as dicts of `Layer`."""
    return [asdict(layer) for layer in _layers.values()]


class Explain:
    """A mixin for vLLM's worker: ``--worker-extension-cls gristmill.integrations.vllm.Explain``, then ``collective_rpc("gristmill_explain")``."""

    def gristmill_explain(self) -> list[dict[str, Any]]:
        """`explain` in the worker's process."""
        return explain()
