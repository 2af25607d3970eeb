"""Log-probabilities of output and prompt compared with transformers; several completions of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from gristmill.kernels.sampling.logprobs_torch import log_sums
from gristmill.runtime.completion import Completion
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.logprobs import LogprobReader, read_rows
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledStep, TokenLogprobs
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA
from tests.runtime.processed import cpu_plans

LIMIT = 1e-3
PROMPT = oracle.eval_tokens()[2000:2070]


def differences(name: str, ids: Sequence[int], logprobs: Sequence[TokenLogprobs], first: int) -> float:
    """Returns the largest difference from transformers. logprobs: of the tokens of `ids` from `first` on."""
    expected = oracle.logits(oracle.oracle(name), ids).log_softmax(-1)
    worst = 0.0
    for place, one in enumerate(logprobs, first):
        row = expected[place - 1]
        assert one.token_id == ids[place]
        worst = max(worst, abs(float(row[one.token_id]) - one.logprob))
        worst = max([worst, *(abs(float(row[token]) - value) for token, value in one.top)])
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
        clear = int((row > row[one.token_id] + LIMIT).sum()), int((row > row[one.token_id] - LIMIT).sum())
        assert clear[0] < one.rank <= max(clear[1], 1)
        top = row.topk(len(one.top)).values
        assert all(abs(a - float(b)) < LIMIT for (_, a), b in zip(one.top, top, strict=True))
    return worst


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize(
    "options",
    [{}, {"decode_graphs": True}, {"max_chunk": 7, "block_size": 5}],
    ids=["plain", "graphs", "chunks"],
)
def test_like_transformers(make: Callable[..., LLM], name: str, options: dict[str, Any]) -> None:
    llm = make(name, **options)
    params = [
        SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(
            max_tokens=9, logprobs=0, temperature=1.0, seed=1, repetition_penalty=1.3, ignore_eos=True
        ),
        SamplingParams(max_tokens=3, prompt_logprobs=0, ignore_eos=True),
    ]
    first, second, third, fourth = llm.generate([PROMPT] * 4, params)
    for result, top in ((first, 3), (third, 0)):
        ids = [*result.prompt_ids, *result.token_ids]
        assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
        assert {len(one.top) for one in result.logprobs} == {top}
        assert differences(name, ids, result.logprobs, len(PROMPT)) < LIMIT
    assert all(one.rank == 1 for one in first.logprobs or ())
    for result, top in ((first, 2), (fourth, 0)):
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        rest = [one for one in result.prompt_logprobs if one is not None]
        assert len(rest) == len(PROMPT) - 1 and {len(one.top) for one in rest} == {top}
        assert differences(name, PROMPT, rest, 1) < LIMIT
    assert second.logprobs is second.prompt_logprobs is third.prompt_logprobs is fourth.logprobs is None
    assert not llm.engine._with_logprobs and not llm.engine._prompts


def test_the_prompt_is_computed_where_it_is_cached(make: Callable[..., LLM]) -> None:
    """The cached blocks are read again after a preemption, and by other requests."""
    llm = make(LLAMA)
    plain, with_logprobs = SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, prompt_logprobs=0)
    [expected] = llm.generate([PROMPT], with_logprobs)
    llm.generate([PROMPT], plain)
    [result] = llm.generate([PROMPT], with_logprobs)
    assert result.prompt_logprobs is not None and None not in result.prompt_logprobs[1:]
    assert [one.token_id for one in result.prompt_logprobs[1:] if one] == PROMPT[1:]
    assert result == expected


def test_preemption_inside_the_prompt(make: Callable[..., LLM]) -> None:
    """The prompts do not fit together: results before and after a preemption form one answer."""
    prompts = [oracle.eval_tokens()[90 * i :][: 60 if i else 20] for i in range(3)]
    params = SamplingParams(max_tokens=20, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    roomy, tight = make(LLAMA), make(LLAMA, num_blocks=6, max_chunk=2)
    scheduler, inside = tight.engine.scheduler, []
    commit = scheduler.commit

    def watched(plan: ScheduledStep) -> None:
        requests = [scheduler.requests[name] for name in plan.preempted]
        inside.extend(r.id for r in requests if 0 < r.computed < r.prompt_len)
        commit(plan)

    scheduler.commit = watched  # type: ignore[method-assign]
    for actual, expected in zip(
        tight.generate(prompts, params), roomy.generate(prompts, params), strict=True
    ):
        assert actual.token_ids == expected.token_ids
        for one, other in zip(
            (*(actual.prompt_logprobs or ())[1:], *(actual.logprobs or ())),
            (*(expected.prompt_logprobs or ())[1:], *(expected.logprobs or ())),
            strict=True,
        ):
            assert one is not None and other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=LIMIT)
    assert inside


def test_a_planted_fault_shows(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: each token is compared with the distribution of the next position."""
    llm = make(LLAMA)
    read = LogprobReader.read
    monkeypatch.setattr(
        LogprobReader, "read", lambda self, logits, *given: read(self, logits.roll(1, 0), *given)
    )
    [result] = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0))
    with pytest.raises(AssertionError):
        assert differences(LLAMA, PROMPT, [one for one in result.prompt_logprobs or () if one], 1) < LIMIT


def test_rows_in_slices_and_a_top_past_the_vocabulary() -> None:
    logits = torch.randn(9, 7, dtype=torch.float64).bfloat16()
    ids, tops = [0, 1, 2, 3, 4, 5, 6, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 0]

    reader = LogprobReader(cpu_plans(), 7)

    def read(size: int) -> list[TokenLogprobs]:
        parts = torch.arange(9).split(size)
        return read_rows([reader.read(logits, part, torch.tensor(ids), 9) for part in parts], ids, tops)

    unsliced = read(9)
    assert read(2) == unsliced
    expected = logits.float().log_softmax(-1)
    for row, (token, top, one) in enumerate(zip(ids, tops, unsliced, strict=True)):
        assert one.logprob == pytest.approx(float(expected[row, token]), abs=1e-6) and len(one.top) == top
    assert read_rows([], [], []) == []


def row_norms(x: torch.Tensor) -> torch.Tensor:
    """log(sum(exp(x))) of each row, [rows, 1]."""
    peak = x.amax(1, keepdim=True)
    return peak + log_sums(x, peak)


def test_norms_do_not_depend_on_the_order_of_additions() -> None:
    """So the same logits have the same log-probabilities in every batch, whatever a reduction does with its rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4001, generator=generator)
    x[1, 7], x[2, 100:] = 90.0, -torch.inf
    orders = [torch.randperm(4001, generator=generator) for _ in range(8)]
    assert all(torch.equal(row_norms(x[:, order]), row_norms(x)) for order in orders)
    assert not all(torch.equal(x[:, order].logsumexp(1), x.logsumexp(1)) for order in orders)
    assert torch.allclose(row_norms(x)[:, 0], x.double().logsumexp(1), rtol=0, atol=2e-6)
    assert bool(row_norms(torch.tensor([[0.0, torch.nan]])).isnan().all())


def test_an_end_token_has_a_logprob_and_a_cut_run_as_many_as_ids(shared: Callable[..., LLM]) -> None:
    llm = shared(LLAMA)
    [full] = llm.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))
    stop = full.token_ids[4]
    [result] = llm.generate([PROMPT], SamplingParams(max_tokens=12, logprobs=0, stop_token_ids=[stop]))
    assert [one.token_id for one in result.logprobs or ()] == list(result.token_ids)
    [text] = llm.generate([PROMPT], SamplingParams(max_tokens=12, logprobs=0, stop=[full.text[5:8]]))
    assert [one.token_id for one in text.logprobs or ()] == list(text.token_ids)


def test_logprobs_are_checked(shared: Callable[..., LLM]) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UsageError, match=f"{name} must be an integer of at least 0, got -1"):
            SamplingParams(**{name: -1})  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=f"{name} must be at most the vocabulary's size 4096, got 4097"):
            shared(LLAMA).generate([1], SamplingParams(**{name: 4097}))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="n must be an integer of at least 1, got 0"):
        SamplingParams(n=0)


def test_n_completions_compute_the_prompt_once(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA)
    launch, computed = llm.engine.runner.launch, []
    llm.engine.runner.launch = lambda entries, *others: (  # type: ignore[method-assign]
        computed.extend(entry.count for entry in entries),
        launch(entries, *others),
    )[1]
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=7, n=4, ignore_eos=True)
    several = llm.generate([PROMPT, PROMPT[:3]], params)
    assert [(one.prompt_ids, one.choice) for one in several] == [
        (tuple(prompt), choice) for prompt in (PROMPT, PROMPT[:3]) for choice in range(4)
    ]
    # 70 tokens: four full blocks are shared, the next six are computed per completion.
    assert sum(count for count in computed if count > 1) == 70 + 3 * 6 + 4 * 3
    for choice in range(4):
        single = SamplingParams(max_tokens=6, temperature=1.0, seed=7 + choice, ignore_eos=True)
        assert several[choice].token_ids == llm.generate([PROMPT], single)[0].token_ids
    assert len({one.token_ids for one in several[:4]}) > 1


def test_n_with_everything_else(make: Callable[..., LLM]) -> None:
    """Also without a prefix cache; the prompt's logprobs come once; the request ends when all completions
    have ended."""
    params = SamplingParams(
        max_tokens=6, temperature=1.0, seed=7, n=3, logprobs=1, prompt_logprobs=0, stop=["e"]
    )

    def ids(completions: list[Completion]) -> list[tuple[Any, ...]]:
        return [
            (one.token_ids, one.text, one.finish_reason, one.prompt_logprobs is None) for one in completions
        ]

    cached, uncached = make(LLAMA), make(LLAMA, enable_prefix_cache=False)
    assert ids(cached.generate(PROMPT, params)) == ids(uncached.generate(PROMPT, params))
    assert [missing for *_, missing in ids(cached.generate(PROMPT, params))] == [False, True, True]
    chunks = list(cached.stream(PROMPT, params))
    assert {chunk.choice for chunk in chunks} == {0, 1, 2}
    assert sum(chunk.finish_reason is not None for chunk in chunks) == 3
    assert not cached.engine.has_unfinished() and not cached.engine._followers


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_leader_that_is_aborted_holds_nobody(make: Callable[..., LLM], steps: int) -> None:
    llm = make(LLAMA, max_chunk=40)
    engine = llm.engine
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    for name in "bcd":
        engine.add_request(name, PROMPT, params, after="a")
    assert list(engine.scheduler.held) == ["b", "c", "d"]
    for _ in range(steps):
        engine.step()
    assert [output.id for output in engine.abort(["c", "a"])] == ["c", "a"]
    ended = {}
    while engine.has_unfinished():
        ended.update({output.id: output.finish_reason for output in engine.step() if output.finish_reason})
    assert set(ended) == {"b", "d"}
    engine.add_request("e", PROMPT, params, after="nobody")
    assert not engine.scheduler.held
    engine.abort(["e"])
    engine.scheduler.check()
