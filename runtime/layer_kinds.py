"""The kinds of layers of a model. Layers of a kind call the same plans with the same sizes, so that one of them, in a step that is run for its
kernels alone, stands for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from gristmill.runtime.runner import Runner


@runtime_checkable
class LayeredModel(Protocol):
    """A model whose `forward` does not run the layers that its batch leaves out (`Batch.left_out`)."""

    leaves_out: bool
    layers: Sequence[Any]


def repeated_layers(runner: Runner, step: Callable[[], object]) -> frozenset[int]:
    """The layers of the runner's model that are of the kind of an earlier one; none of a model that is no `LayeredModel`.

    Args:
        step: runs a step of the runner; it is recorded, without kernels, for each layer alone.
    """
    model, before = runner.model, runner.left_out
    if not isinstance(model, LayeredModel) or not model.leaves_out:
        return frozenset()
    c, every = runner.model.config, frozenset(range(len(model.layers)))
    kinds: set[tuple[object, ...]] = set()
    repeated: set[int] = set()
    try:
        with runner.model.plans.recorded() as calls:
            for index, layer in enumerate(model.layers):
                runner.left_out = every - {index}
                calls.clear()
                step()
                shares = c.kv_source(index) != index
                kind = (type(layer), c.window(index), c.chunk(index), shares, frozenset(calls))
                if kind in kinds:
                    repeated.add(index)
                kinds.add(kind)
    finally:
        runner.left_out = before
    return frozenset(repeated)
