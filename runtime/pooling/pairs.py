"""Pairs of texts as an engine computes them, and the interface of what makes scores of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from gristmill.runtime.pooling.engine import PoolingInput

Activation = Literal["sigmoid", "none"]


@dataclass(frozen=True)
class PairInputs:
    """What the engine computes for pairs of texts: texts that several pairs have, once.

    Attributes:
        inputs: each once.
        pairs: for each pair, which of them it has.
    """

    inputs: list[PoolingInput]
    pairs: list[tuple[int, ...]]

    @classmethod
    def joint(cls, inputs: list[PoolingInput]) -> PairInputs:
        """One input for each pair, with both texts."""
        return cls(inputs, [(index,) for index in range(len(inputs))])

    @classmethod
    def apart(
        cls, pairs: Sequence[tuple[str, str]], encode: Callable[[list[str], bool], list[PoolingInput]]
    ) -> PairInputs:
        """Query and document by themselves; `encode` takes texts, and whether they are queries."""
        inputs, places = list[PoolingInput](), list[dict[str, int]]()
        for side in (0, 1):
            texts = [*dict.fromkeys(pair[side] for pair in pairs)]
            places.append({text: len(inputs) + index for index, text in enumerate(texts)})
            inputs += encode(texts, side == 0)
        return cls(inputs, [(places[0][query], places[1][document]) for query, document in pairs])


class Scorer(Protocol):
    """How a model scores pairs of texts."""

    def inputs(
        self, front: Any, pairs: Sequence[tuple[str, str]], instruction: str | None, truncate: bool
    ) -> PairInputs:
        """What the engine computes for pairs; `front` is the model's `PoolingFront`."""
        ...

    def scores(self, made: PairInputs, results: Sequence[Tensor], activation: Activation | None) -> Tensor:
        """float32 [pairs] from the results of `inputs`."""
        ...
