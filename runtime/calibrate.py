"""What a model's linear layers see: second moments of their inputs over windows of tokens, for GPTQ.

The float model runs in float32; every linear weight of its table gets H = Σ x xᵀ over the tokens that reach it, parts of a fused
matrix the same one, experts those of the tokens that are routed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.quant import QuantTensor
from gristmill.quant.gptq import gptq, search_scales
from gristmill.runtime.errors import UsageError
from gristmill.runtime.evaluate import window_logits
from gristmill.runtime.layers.linear import Linear, SplitLinear
from gristmill.runtime.layers.moe import MixtureOfExperts
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.checkpoint import FLOATS, Checkpoint
from gristmill.runtime.loader.weights import Weight
from gristmill.runtime.models import model_table


class Calibration:
    """Second moments by the checkpoint's module names."""

    def __init__(self) -> None:
        self.moments: dict[str, Tensor] = {}

    def add(self, modules: Sequence[str], x: Tensor) -> None:
        """Count rows x [tokens, K] as inputs of all the modules; they share one sum."""
        if not x.shape[0]:
            return
        wide = x.reshape(-1, x.shape[-1]).float()
        total = self.moments.get(modules[0])
        product = (wide.T @ wide).cpu()
        total = product if total is None else total.add_(product)
        self.moments.update(dict.fromkeys(modules, total))

    def round(self, module: str, weight: Tensor, start: QuantTensor) -> QuantTensor:
        """The weight by GPTQ on searched scales; as it was rounded to nearest where no input was seen (an expert that no token went to)."""
        moments = self.moments.get(module)
        return start if moments is None else gptq(weight, moments, search_scales(weight, moments, start))


def calibrate(
    directory: str | Path,
    tokens: Sequence[int],
    window: int = 512,
    windows: int = 64,
    progress: Callable[[int, int], None] | None = None,
    policy: Policy | str | Path | None = None,
) -> Calibration:
    """Run `windows` contiguous windows of `window` tokens from token 0 through an unquantized model.

    progress: called with (windows done, windows in all).

    Raises:
        UsageError: too few tokens, or a model whose experts are not calibrated (gpt-oss); those of `LLM`.
    """
    if window < 2 or windows < 1 or len(tokens) < window * windows:
        raise UsageError(f"calibration wants {windows} windows of {window} tokens, got {len(tokens)} tokens")
    llm = LLM(directory, dtype="fp32", policy=policy, max_batch_tokens=max(2048, window), max_seqs=1)
    table = {weight.target: weight for weight in model_table(llm.config).weights}
    if any(weight.stacked for weight in table.values()):
        raise UsageError(f"{llm.config.architecture} has its experts in one tensor, which is not calibrated")
    found, checkpoint = Calibration(), Checkpoint(directory)
    for owner, name, layer in find_layers(llm.model.layers):  # type: ignore[attr-defined]
        if isinstance(layer, MixtureOfExperts):
            setattr(owner, name, _Experts(layer, table, found, checkpoint))
        else:
            setattr(owner, name, _Seen(layer, table[layer.target].part_names(), found))
    for index in range(windows):
        window_logits(llm.engine, tokens[index * window : (index + 1) * window])
        if progress is not None:
            progress(index + 1, windows)
    return found


def find_layers(root: Any) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, layer) of all linear layers that a table knows, and of mixtures of experts."""
    for item in root if isinstance(root, list) else [root]:
        for name, value in list(vars(item).items()):
            if isinstance(value, Linear | SplitLinear):
                if value.target:
                    yield item, name, value
            elif type(value).__module__.startswith("gristmill.runtime.layers.") and hasattr(value, "__dict__"):
                yield from find_layers(value)
                if isinstance(value, MixtureOfExperts):
                    yield item, name, value


class _Seen:
    """A linear layer whose inputs are counted."""

    def __init__(self, layer: Linear | SplitLinear, modules: list[str], found: Calibration) -> None:
        self.layer, self.modules, self.found = layer, modules, found

    def __call__(self, x: Tensor) -> Tensor:
        self.found.add(self.modules, x)
        return self.layer(x)


class _Experts:
    """A mixture of experts whose routed inputs are counted, and what its experts' last products see."""

    def __init__(self, layer: MixtureOfExperts, table: dict[str, Weight], found: Calibration, checkpoint: Checkpoint) -> None:
        self.layer, self.found, self.checkpoint = layer, found, checkpoint
        self.gate_up = table[f"{layer.target}.gate_up"]
        self.down = table[f"{layer.target}.down"]

    def __call__(self, x: Tensor) -> Tensor:
        ids = self.layer.route(x)[1]
        for expert in ids.unique().tolist():
            rows = x[(ids == expert).any(1)].float()
            names = [source.format(expert=expert) for source in self.gate_up.sources]
            self.found.add(names, rows)
            gate, up = (rows @ self._weight(name, rows.device).T for name in names)
            self.found.add([self.down.sources[0].format(expert=expert)], torch.nn.functional.silu(gate) * up)
        return self.layer(x)

    def _weight(self, name: str, device: torch.device) -> Tensor:
        return self.checkpoint.read(f"{name}.weight", dtypes=FLOATS).to(device=device, dtype=torch.float32)
