"""What of a host's model runs on gristmill's kernels, and why the rest does not."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layer:
    """One layer of the model.

    Attributes:
        kernels: names of kernels by the upper bound of a batch, "" if the host runs it.
        reason: why the host runs it; "" otherwise.
        measured: why gristmill runs it, if times decided.
    """

    name: str
    taken: bool
    scheme: str
    kernels: str
    reason: str
    measured: str = ""


class Report:
    """The layers of a process's models. The first layer of each kind is logged, with the `host` by name."""

    def __init__(self, host: str, logger: logging.Logger) -> None:
        self.host, self.logger = host, logger
        self.layers: dict[str, Layer] = {}

    def take(self, name: str, scheme: str, kernels: str, measured: str = "") -> None:
        """A layer runs on our kernels."""
        self._note(Layer(name, True, scheme, kernels, "", measured))

    def leave(self, name: str, scheme: str, reason: str) -> None:
        """The host runs a layer."""
        self._note(Layer(name, False, scheme, "", reason))

    def _note(self, layer: Layer) -> None:
        if replace(layer, name="") not in {replace(other, name="") for other in self.layers.values()}:
            what = (
                f"runs {layer.scheme} with {layer.kernels}{layer.measured and f': {layer.measured}'}"
                if layer.taken
                else f"is left to {self.host}: {layer.reason}"
            )
            self.logger.info("gristmill: %s, the first of its kind, %s", layer.name, what)
        self.layers[layer.name] = layer

    def explain(self) -> list[dict[str, Any]]:
        """The layers as dicts of `Layer`."""
        return [asdict(layer) for layer in self.layers.values()]
