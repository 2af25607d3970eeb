"""The harness's registry of models."""

from __future__ import annotations

from lm_eval.api.registry import model_registry

NAME = "gristmill"
TARGET = "gristmill.integrations.lm_eval.model:GristmillLM"


def register() -> None:
    """Make ``gristmill`` a model of the harness: ``simple_evaluate(model="gristmill", ...)``. Calling it again changes nothing.

    Raises:
        ValueError: another package has registered that name.
    """
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
    model = model_registry.get(NAME)
    name = f"{model.__module__}:{model.__qualname__}"
    if name != TARGET:
        raise ValueError(
            f"the model {NAME} of lm-evaluation-harness is {name}, registered by another package"
        )
