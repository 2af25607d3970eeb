"""The form of latent attention of each sequence: the rule, what the forms read, and ids of the example model in every mix of forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gristmill.runtime.batch import make_batch
from gristmill.runtime.config import MlaConfig
from gristmill.runtime.layers import latent_forms, mla
from gristmill.runtime.layers.latent_forms import expands, split
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK

SIZES = MlaConfig(q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
BLOCK = 16


def entry(start: int, count: int, blocks: list[int]) -> ScheduledRequest:
    return ScheduledRequest(f"{blocks}", start, count, True, [1] * count, blocks, [])


def test_few_new_tokens_are_absorbed_and_prompts_are_not() -> None:
    assert not expands(1, 1, SIZES) and expands(2, 2, SIZES)
    for context in (100, 5000, 100_000):
        assert not expands(1, context, SIZES)
        assert not expands(4, context, SIZES)
    for new, context in ((1000, 1000), (8192, 8192), (2048, 16384), (1024, 100_000)):
        assert expands(new, context, SIZES)
    for context in (2000, 20_000):  # one threshold
        chosen = [expands(new, context, SIZES) for new in range(1, 2000)]
        assert chosen == sorted(chosen)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 1, 2), (1, 3, 0, 2), (2, 1, 3, 0)])
def test_the_sequences_of_either_form(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, lengths, tables and places in the cache, wherever the sequences of a form lie in the batch."""
    entries = [
        entry(40, 1, [7, 3, 9]),
        entry(0, 20, [1, 4]),
        entry(30, 25, [8, 2, 6, 5]),
        entry(17, 1, [10, 11]),
    ]
    entries = [entries[i] for i in order]
    monkeypatch.setattr(latent_forms, "expands", lambda new, context, mla: new > 1)
    batch = make_batch(entries, BLOCK, torch.device("cpu"))
    forms = split(batch, SIZES, BLOCK)
    assert forms.expanded is not None and forms.absorbed is not None
    tokens = torch.arange(len(batch.tokens))
    begin = batch.query_start.tolist()
    for part, long in ((forms.expanded, True), (forms.absorbed, False)):
        mine = [i for i, one in enumerate(entries) if (one.count > 1) == long]
        counts = [entries[i].count for i in mine]
        assert torch.equal(tokens[part.rows], torch.cat([tokens[begin[i] : begin[i + 1]] for i in mine]))
        assert part.query_start.diff().tolist() == counts and part.query_start[0] == 0
        assert part.seq_lens.tolist() == [entries[i].context for i in mine]
        assert torch.equal(part.block_table, batch.block_table[mine])
        assert (part.max_q, part.max_ctx) == (max(counts), max(part.seq_lens.tolist()))
    contexts = [one for one in entries if one.count > 1]
    assert forms.expanded.context_start.diff().tolist() == [one.context for one in contexts]
    assert forms.expanded.slots is not None
    assert forms.expanded.slots.tolist() == [
        one.block_ids[place // BLOCK] * BLOCK + place % BLOCK
        for one in contexts
        for place in range(one.context)
    ]


def test_new_prompts_need_no_cache() -> None:
    batch = make_batch(
        [entry(0, 500, [*range(32)]), entry(0, 700, [*range(32, 76)])], BLOCK, torch.device("cpu")
    )
    forms = split(batch, SIZES, BLOCK)
    assert forms.absorbed is None and forms.expanded is not None and forms.expanded.slots is None
    assert torch.equal(forms.expanded.context_start, batch.query_start)


def test_a_captured_step_is_absorbed() -> None:
    """Its lengths are not known on the host."""
    batch = make_batch([entry(0, 500, [*range(32)])], BLOCK, torch.device("cpu"))
    forms = split(dataclasses.replace(batch, lengths=()), SIZES, BLOCK)
    assert forms.expanded is None and forms.absorbed is not None


def answers(llm: LLM, what: str) -> None:
    """Compares the ids of five prompts, some of several chunks, with transformers'."""
    prompts = [*oracle.prompts()[3:15:4], oracle.prompts()[19]]
    done = llm.generate(prompts, SamplingParams(max_tokens=8))
    compared = oracle.Comparison(what)
    for prompt, one in zip(prompts, done, strict=True):
        compared.add(one.token_ids, oracle.answer(DEEPSEEK, tuple(prompt), one.token_ids, 8))
    compared.finish()


RULES: dict[str, Callable[[int, int, Any], bool]] = {
    "by arithmetic": expands,
    "all expanded": lambda new, context, mla: True,
    "all absorbed": lambda new, context, mla: False,
    "odd contexts expanded": lambda new, context, mla: context % 2 == 1,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", [1 << 20, 1500])
def test_ids_in_every_mix_of_forms(
    rule: str, keys: int, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where contexts have more keys than are made at a time, so that two of the four heads are attended at once."""
    monkeypatch.setattr(latent_forms, "expands", RULES[rule])
    monkeypatch.setattr(mla, "LARGEST_EXPANDED", keys)
    monkeypatch.setattr(mla, "FEW_HEADS", 2)
    seen: list[tuple[bool, int]] = []
    attend = mla.LatentAttention._keys_and_values

    def counted(self: Any, context: torch.Tensor, heads: slice, new: bool) -> Any:
        seen.append((heads.stop - heads.start < self.heads, len(context)))
        return attend(self, context, heads, new)

    monkeypatch.setattr(mla.LatentAttention, "_keys_and_values", counted)
    llm = make(DEEPSEEK, max_chunk=200, max_batch_tokens=300)
    answers(llm, f"{rule}, {keys}")
    assert bool(seen) == (rule != "all absorbed")
    if rule == "all expanded":
        assert any(some for some, _ in seen) == (keys == 1500)
        assert max(rows for _, rows in seen) > 650, "no context with cached tokens"


def test_a_wrong_place_in_the_cache_is_seen(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token reads the latent of the first one of its block."""
    made = latent_forms._expanded

    def shifted(*arguments: Any) -> Any:
        expanded = made(*arguments)
        if expanded.slots is None:
            return expanded
        return dataclasses.replace(expanded, slots=expanded.slots // BLOCK * BLOCK)

    monkeypatch.setattr(latent_forms, "_expanded", shifted)
    monkeypatch.setattr(latent_forms, "expands", RULES["all expanded"])
    with pytest.raises(AssertionError, match="logit gap"):
        answers(make(DEEPSEEK, max_chunk=200, max_batch_tokens=300), "wrong places")
