"""Layers bind their plans when they are made; a step only calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.problem import AxisError, Problem
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import explain_plans
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.oracle import LLAMA, NAMES

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


class Calls(TorchDispatchMode):
    """Counts the operators of torch that run, without views and allocations."""

    FREE = ("view", "_unsafe_view", "empty", "new_empty", "split_with_sizes", "detach", "slice", "select")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.count.update([name] if name not in self.FREE else [])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [1, 5])
def test_calls_of_a_layer(tokens: int, shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two norms, four products, one attention and one call between projection and attention; torch copies nothing."""
    llm = shared(LLAMA, decode_graphs=False)
    model, launched, layers = llm.model, Counter[str](), Calls()
    call, first = BoundPlan.__call__, model.layers[0]

    def count(plan: BoundPlan, *arguments: Any, **named: Any) -> None:
        launched.update([plan.op.name])
        call(plan, *arguments, **named)

    class Counted:
        def __call__(self, *arguments: Any) -> Any:
            monkeypatch.setattr(BoundPlan, "__call__", count)
            with layers:
                out = first(*arguments)
            monkeypatch.setattr(BoundPlan, "__call__", call)
            return out

    monkeypatch.setattr(model, "layers", [Counted(), *model.layers[1:]])
    llm.generate([[*range(5, 5 + tokens)]], SamplingParams(max_tokens=1))
    assert launched == {"fused_add_rms_norm": 2, "linear": 4, "qk_norm_rope_cache": 1, "paged_attention": 1}
    assert not layers.count, layers.count


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


def test_workspace_of_large_steps_is_sized_once(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps above the largest bucket differ in their number of tokens; each would ask the kernel of every layer again."""
    plans, asked = make(LLAMA).model.plans, []
    plan = next(plan for plan in plans.bound.values() if plan.op.name == "linear")
    workspace = BoundPlan.workspace
    monkeypatch.setattr(
        BoundPlan, "workspace", lambda plan, size: asked.append(size) or workspace(plan, size)
    )
    for size in (5000, 4097, 5120, 5120):
        plans.workspace(plan, size)
    assert asked == [5120]
    plans.workspace(plan, 5121)
    assert asked == [5120, 6144]


def test_explain_says_that_a_kernel_was_verified_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(torch.device("cpu"), torch.float32)
    bound = plans.bind("rms_norm", n=72, x="fp32").prepare([4])
    [row] = explain_plans(plans)
    assert row["grade"] == "here" and row["reason"].startswith("verified here; ")
    chosen = bound.resolver.select(bound.op, bound.problem(2)).require()
    why = "verified elsewhere, on another device of this model (h200.json); canary passed here: m=1,n=8"
    found = SimpleNamespace(candidates=[replace(chosen, grade="elsewhere", reasons=(why,))])
    monkeypatch.setattr(Resolver, "select", lambda *arguments: found)
    [row] = explain_plans(plans)
    assert row["grade"] == "elsewhere" and row["reason"].startswith(f"{why}; ")
