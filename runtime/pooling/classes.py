"""Classes of texts: what a classifier with several labels says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gristmill.runtime.config import Fields
from gristmill.runtime.errors import ConfigError

ClassActivation = Literal["softmax", "sigmoid", "none"]
PROBLEMS: dict[str, ClassActivation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
"""``problem_type`` of config.json -> what becomes of the logits."""


@dataclass(frozen=True)
class Classes:
    """The classes of a model.

    Attributes:
        labels: their names, in the order of the logits.
        activation: of the logits, where the caller names none.
    """

    labels: tuple[str, ...]
    activation: ClassActivation

    def values(self, logits: Tensor, activation: ClassActivation | None) -> Tensor:
        """logits float32 [texts, classes] -> float32 [texts, classes]."""
        made = activation or self.activation
        return logits.softmax(-1) if made == "softmax" else logits.sigmoid() if made == "sigmoid" else logits


@dataclass(frozen=True, eq=False)
class Classification:
    """What a classifier says of a text.

    Attributes:
        label: the name of the class with the largest value.
        values: of each class, float32 [classes]: probabilities (of one class among all, or of each class by itself), or what a regression
            gives.
        labels: the names of all classes, in the order of `values`.
        prompt_tokens: tokens of the text, or of both, with what the tokenizer adds.
    """

    label: str
    values: NDArray[np.float32]
    labels: tuple[str, ...]
    prompt_tokens: int


def read_classes(fields: Fields, count: int) -> Classes:
    """The classes by ``id2label``, ``LABEL_0`` and so on where it is missing, and ``problem_type``, one class among all where it is missing.

    Raises:
        ConfigError: an unknown type of problem, or an id2label that does not number its classes from 0.
    """
    named = fields.get("id2label", dict, None) or {str(i): f"LABEL_{i}" for i in range(count)}
    if {str(key) for key in named} != {str(i) for i in range(count)}:
        raise ConfigError(
            f"{fields.origin}: id2label must name the classes 0 to {count - 1}, got {', '.join(map(str, named))}"
        )
    by_index = {int(key): str(name) for key, name in named.items()}
    problem = fields.get("problem_type", str, None) or "single_label_classification"
    if problem not in PROBLEMS:
        raise ConfigError(
            f"{fields.origin}: problem_type must be one of {', '.join(PROBLEMS)}, got {problem!r}"
        )
    return Classes(tuple(by_index[i] for i in range(count)), PROBLEMS[problem])
