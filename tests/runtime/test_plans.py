"""Layers bind their plans when they are made; a step only calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gristmill.kernel_registry.problem import AxisError, Problem
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.errors import UsageError
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.oracle import NAMES

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_binds_nothing(name: str, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and decode steps, with and without the buffers of decode graphs, also with another block size."""
    llms = [make(name, decode_graphs=graphs, block_size=size) for graphs, size in ((True, 16), (False, 32))]
    bound = [len(llm.model.plans.bound) for llm in llms]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("bound in a step")

    for method in ("problem", "bind", "bind_packed", "resolver"):
        monkeypatch.setattr(Plans, method, refuse)
    monkeypatch.setattr("gristmill.ops.bind", refuse)
    first, second = (llm.generate([[5, 6, 7], [8]], PARAMS) for llm in llms)
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]
    assert [len(llm.model.plans.bound) for llm in llms] == bound
    with pytest.raises(AssertionError, match="bound in a step"):  # what the test would report
        llms[0].model.plans.bind("rms_norm", n=8, x="fp32")


def test_a_plan_is_bound_once_by_its_axes(shared: Callable[..., LLM]) -> None:
    plans = shared(NAMES[0]).model.plans
    plan = plans.bind("rms_norm", n=48, x="fp32")
    assert (
        plans.bind("rms_norm", x="fp32", n=48) is plan and plans.bind("rms_norm", n=49, x="fp32") is not plan
    )
    assert all(isinstance(problem, Problem) for problem, _ in plans.bound)
    with pytest.raises(AxisError, match="rms_norm has no axis colour"):
        plans.bind("rms_norm", n=48, colour="red")


def test_a_cache_of_other_blocks_is_refused(shared: Callable[..., LLM]) -> None:
    model = shared(NAMES[0]).model
    cache = PagedCache(model.config, 8, 32, model.plans.dtype, model.plans.device)
    with pytest.raises(UsageError, match="planned for cache blocks of 16 tokens, the cache has blocks of 32"):
        Runner(model, cache)
