"""Under a batch-invariant policy a request has the same bits alone, in a batch, in chunks, and after a prefix from the cache."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.completion import Completion
from gristmill.runtime.layers.mla import LatentAttention
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS, eval_tokens

INVARIANT = Policy(batch_invariant=True, origin="batch invariant")


def requests(count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of text of 1 to `longest` tokens, two of them with a common beginning; greedy and sampled."""
    draw, text = random.Random(0), list(eval_tokens())
    sizes = [1, longest, longest // 2, *(draw.randrange(2, longest) for _ in range(count - 3))]
    prompts = [text[37 * i : 37 * i + size] for i, size in enumerate(sizes)]
    prompts[-1] = prompts[1][: longest // 2] + prompts[-1]
    params = [
        SamplingParams(max_tokens=5 + i % 4, logprobs=2, ignore_eos=True, temperature=i % 2 * 0.8, seed=i)
        for i in range(count)
    ]
    return prompts, params


def bits(completion: Completion) -> tuple[object, ...]:
    """Ids, and their log-probabilities without rounding."""
    return completion.token_ids, repr(completion.logprobs)


def check_model(model: str, count: int, longest: int, **options: Any) -> None:
    """Compare a batch, and a batch in chunks, with each request in an engine without a prefix cache."""
    prompts, params = requests(count, longest)
    shared: dict[str, Any] = {"num_blocks": 512, "policy": INVARIANT, "warm": "off", **options}
    alone = LLM(MODELS / model, enable_prefix_cache=False, **shared)
    expected = [bits(alone.generate([p], [s])[0]) for p, s in zip(prompts, params, strict=True)]
    alone.close()
    for chunk in (None, 16):
        together = LLM(MODELS / model, max_seqs=count, max_chunk=chunk, **shared)
        assert [bits(result) for result in together.generate(prompts, params)] == expected, (
            f"chunks of {chunk}"
        )
        again = together.generate(prompts, params)
        assert [bits(result) for result in again] == expected, "after a prefix from the cache"
        together.close()


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
def test_requests_have_the_same_bits_in_every_batch(model: str) -> None:
    check_model(model, 4, 40, dtype="fp32")


def test_a_form_of_attention_that_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LatentAttention.__init__

    def planted(self: LatentAttention, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **named)
        self.one_form = False

    monkeypatch.setattr(LatentAttention, "__init__", planted)
    with pytest.raises(AssertionError, match="chunks of 16|after a prefix"):
        check_model(DEEPSEEK, 4, 40, dtype="fp32")


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
def test_every_size_runs_one_kernel(model: str) -> None:
    llm = LLM(MODELS / model, num_blocks=64, policy=INVARIANT, warm="off")
    plans = llm.model.plans
    assert isinstance(plans, Plans)
    for plan in plans.bound.values():
        problems = [plan.op.at_bucket(plan.static, size) for size in (1, 7, 300)]
        best = {plans.resolver.select(plan.op, p, plan.layouts).require().kernel for p in problems}
        assert len(best) == 1 and best.pop().batch_invariant, plan.op.name
