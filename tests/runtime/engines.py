"""Models that tests load: with one store of verifications for the whole run, and a small cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from tests.runtime.oracle import MODELS


def run_policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """The default policy, with a cache for this run, which workers of pytest-xdist share: one verifies, the others read."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return Policy(cache=str(folder / "gristmill"))


def maker(policy: Policy, device: str) -> Callable[..., LLM]:
    """Returns a function that makes an LLM of an example model or of any directory, with a small cache and, by default, in float32.

    As in a program with several models, their layers of one shape have the same plans: kernels are selected once for all tests.
    """
    policies: dict[str | None, Policy] = {}  # plans belong to a policy object

    def build(name: str | Path, *, activations: str | None = None, **options: Any) -> LLM:
        folder = name if isinstance(name, Path) else MODELS / name
        mine = policies.setdefault(activations, replace(policy, activations=activations))
        defaults = {"dtype": "fp32", "device": device, "policy": mine, "num_blocks": 256, "warm": "off"}
        return LLM(folder, **{**defaults, **options})

    return build
