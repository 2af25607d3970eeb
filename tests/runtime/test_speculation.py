"""Ids with drafts are the ids without, whatever is drafted, for every kind of request and every state of the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from gristmill.runtime import logits_processors
from gristmill.runtime import processed_requests as requests_module
from gristmill.runtime import step_pipeline as pipeline_module
from gristmill.runtime.completion import Completion
from gristmill.runtime.decode_inputs import Buffers
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.speculation import speculator as speculator_module
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.structured_output import StructuredOutput
from tests.runtime import oracle
from tests.runtime.draft_sources import Source, sources, use
from tests.runtime.oracle import LLAMA, NAMES

FIXED = Speculation("ngram", tokens=4, adaptive=False)

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=21, temperature=0.8, seed=3, logprobs=2),
    SamplingParams(max_tokens=17, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    SamplingParams(max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(
        max_tokens=19, temperature=0.9, seed=8, min_tokens=6, stop_token_ids=range(300), logit_bias={17: 4.0}
    ),
    SamplingParams(max_tokens=22, bad_words=[[265, 266], [11, 12, 13], [5]], allowed_token_ids=range(3000)),
    SamplingParams(max_tokens=15, temperature=0.7, seed=4, n=2, frequency_penalty=1.0),
]
PROMPTS = [oracle.eval_tokens()[600 + 40 * i :][: 9 + 7 * i] for i in range(len(PARAMS))]
STATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "preemption": {"num_blocks": 26, "block_size": 4, "max_seqs": 4},
    "chunks": {"max_chunk": 8, "max_seqs": 3, "max_batch_tokens": 24},
    "no prefix cache": {"enable_prefix_cache": False, "block_size": 5},
}


def content(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in completions]


@pytest.fixture(scope="module")
def reference(shared: Callable[..., LLM]) -> Callable[[str], list[Completion]]:
    """The completions without drafts; computed once per model."""
    return cache(lambda name: shared(name).generate(PROMPTS, PARAMS))


def known(completions: Sequence[Completion]) -> dict[str, tuple[int, ...]]:
    """The outputs by the ids that a fresh LLM gives to its requests."""
    return {f"llm-{i}": completion.token_ids for i, completion in enumerate(completions)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["right", "wrong", "anything", "partly", "hostile"])
def test_same_ids(
    make: Callable[..., LLM], reference: Callable[[str], list[Completion]], name: str, kind: str
) -> None:
    llm = make(name, speculate=FIXED)
    expected = reference(name)
    source = use(llm.engine, sources(known(expected), llm.config.vocab_size)[kind])
    actual = llm.generate(PROMPTS, PARAMS)
    assert content(actual) == content(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        for got, true in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert got.token_id == true.token_id and got.logprob == pytest.approx(true.logprob, abs=1e-4)
    status = llm.engine.status().speculation
    assert status is not None and source.asked > 20 and status.drafts > 10
    assert llm.engine.scheduler.pool.num_referenced == 0
    assert sorted(source.ended_ids) == sorted(known(expected))
    if kind == "right":
        assert status.accepted_tokens == status.draft_tokens
    if kind == "wrong":
        assert status.accepted_tokens == 0


@pytest.mark.parametrize("state", [*STATES][1:])
def test_same_ids_in_every_state(
    make: Callable[..., LLM], reference: Callable[[str], list[Completion]], state: str
) -> None:
    llm = make(LLAMA, speculate=FIXED, **STATES[state])
    preempted: list[str] = []
    commit = llm.engine.scheduler.commit
    llm.engine.scheduler.commit = lambda plan: (preempted.extend(plan.preempted), commit(plan))  # type: ignore[method-assign]
    use(llm.engine, sources(known(reference(LLAMA)), llm.config.vocab_size)["partly"])
    assert content(llm.generate(PROMPTS, PARAMS)) == content(reference(LLAMA))
    assert bool(preempted) == (state == "preemption")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["right", "partly"])
def test_verified_steps_in_decode_graphs(
    make: Callable[..., LLM], reference: Callable[[str], list[Completion]], name: str, kind: str
) -> None:
    """Graphs of five tokens per sequence, whose sequences have one to five; also with logits that are processed."""
    llm = make(name, speculate=FIXED, decode_graphs=True, max_seqs=5)
    expected = reference(name)
    ids = known([*expected, expected[0], expected[2]])
    use(llm.engine, sources(ids, llm.config.vocab_size)[kind])
    assert content(llm.generate(PROMPTS, PARAMS)) == content(expected)
    assert content(llm.generate(PROMPTS[:3:2], PARAMS[:3:2])) == content(expected[:3:2])
    steps = [row for row in llm.explain_graphs() if row["tokens_per_seq"] == 5]
    assert sum(row["steps"] for row in steps) > 5


def test_verified_steps_that_no_graph_holds(make: Callable[..., LLM], shared: Callable[..., LLM]) -> None:
    """Many drafts of many sequences, and sequences at the end of the cache, run kernel by kernel."""
    prompts, params = [oracle.eval_tokens()[9 * i :][:9] for i in range(12)], SamplingParams(max_tokens=23)
    expected = shared(LLAMA).generate(prompts, params)
    llm = make(LLAMA, speculate=Speculation("ngram", 20, adaptive=False), decode_graphs=True)
    use(llm.engine, sources(known(expected), llm.config.vocab_size)["partly"])
    assert content(llm.generate(prompts, params)) == content(expected)
    reasons = {row["reason"]: row["steps"] for row in llm.explain_graphs() if row["seqs"] is None}
    assert reasons["over 256 tokens with drafts"] > 0
    # Steps of nine tokens from positions 7, 16 and 25 on; five drafts behind 25 would be padded beyond the 32 tokens of the cache.
    one, whole = prompts[0][:7], SamplingParams(max_tokens=25, ignore_eos=True)
    expected = shared(LLAMA).generate([one], whole)
    short = make(LLAMA, speculate=replace(FIXED, tokens=8), decode_graphs=True, num_blocks=2)
    use(short.engine, sources(known(expected), llm.config.vocab_size)["right"])
    assert content(short.generate([one], whole)) == content(expected)
    assert "no room for padding after a sequence" in [row["reason"] for row in short.explain_graphs()]


@pytest.mark.parametrize("fault", ["slots", "logit_rows"])
def test_wrong_padding_shows(
    make: Callable[..., LLM],
    reference: Callable[[str], list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    """Planted faults: the padding after a sequence is written to the cache; logits are those of the first tokens of the step."""
    fill = Buffers.fill

    def wrong(self: Buffers, slot: int, *arguments: Any) -> None:
        fill(self, slot, *arguments)
        values = self.host[slot][fault]
        if fault == "slots":
            values[values < 0] = 1
        else:
            values[:] = range(len(values))

    monkeypatch.setattr(Buffers, "fill", wrong)
    llm = make(LLAMA, speculate=FIXED, decode_graphs=True)
    ids = known(reference(LLAMA))
    source = use(llm.engine, sources(ids, llm.config.vocab_size)["partly"])
    source.known = {}
    source.draft = lambda _, count, request: ids[request.id][len(request.tokens) - request.prompt_len :][:3]
    assert content(llm.generate(PROMPTS, PARAMS)) != content(reference(LLAMA))


@pytest.mark.parametrize("method", ["ngram:5", "suffix"])
def test_same_ids_by_method(
    make: Callable[..., LLM], reference: Callable[[str], list[Completion]], method: str
) -> None:
    """Twice, so that past outputs and cached prefixes are used; the drafts are switched on and off by measured times."""
    llm = make(LLAMA, speculate=method)
    for _ in range(2):
        assert content(llm.generate(PROMPTS, PARAMS)) == content(reference(LLAMA))
        llm.engine.scheduler.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", [*STATES])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_same_ids_everywhere(
    make: Callable[..., LLM],
    reference: Callable[[str], list[Completion]],
    name: str,
    state: str,
    seed: int,
    tokens: int,
) -> None:
    for kind in ("right", "anything", "partly", "hostile"):
        llm = make(name, speculate=replace(FIXED, tokens=tokens), **STATES[state])
        use(llm.engine, sources(known(reference(name)), llm.config.vocab_size, seed)[kind])
        assert content(llm.generate(PROMPTS, PARAMS)) == content(reference(name))


def test_an_output_ends_inside_an_accepted_run(make: Callable[..., LLM], shared: Callable[..., LLM]) -> None:
    """Stop ids, stop strings and max_tokens cut the run; the drafts go on behind them."""
    [whole] = shared(LLAMA).generate([PROMPTS[2]], SamplingParams(max_tokens=30, ignore_eos=True))
    text, ids = whole.text, whole.token_ids
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True, stop=text[len(text) // 2 :][:6]),
        SamplingParams(max_tokens=30, ignore_eos=True, stop=text[len(text) // 2 :][:3], min_tokens=9),
        SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=[ids[12]]),
        SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1),
    ):
        llm = make(LLAMA, speculate=replace(FIXED, tokens=7))
        use(llm.engine, sources({"llm-0": ids}, llm.config.vocab_size)["right"])
        [actual] = llm.generate([PROMPTS[2]], params)
        [expected] = shared(LLAMA).generate([PROMPTS[2]], params)
        assert content([actual]) == content([expected]) and len(actual.token_ids) < len(ids)
        assert actual.logprobs is None or len(actual.logprobs) == len(actual.token_ids)
        assert llm.engine.scheduler.pool.num_referenced == 0


def index_off_by_one(entry: ScheduledRequest, row: SamplingRow) -> list[SamplingRow]:
    return [SamplingRow(row.params, row.seed, row.index + i + (i > 0)) for i in range(1 + entry.drafts)]


def noise_by_place(entry: ScheduledRequest, row: SamplingRow) -> list[SamplingRow]:
    return [SamplingRow(row.params, row.seed, row.index)] * (1 + entry.drafts)


def bonus_from_the_last_row(entries: Sequence[ScheduledRequest], drawn: Sequence[int]) -> list[list[int]]:
    runs, first = accepted_runs(entries, drawn), 0
    for entry, run in zip(entries, runs, strict=True):
        first += 1 + entry.drafts
        run[-1] = drawn[first - 1]
    return runs


def shifted_prefixes(entry: ScheduledRequest) -> list[list[int]]:
    """Bans and penalties of each drafted row are those of a row further on."""
    drafts = entry.tokens[entry.count - entry.drafts :] if entry.drafts else []
    return [drafts[: count + (count > 0)] for count in range(len(drafts) + 1)]


accepted_runs = speculator_module.accepted_runs


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (pipeline_module, "sampling_rows", index_off_by_one),
        (pipeline_module, "sampling_rows", noise_by_place),
        (speculator_module, "accepted_runs", bonus_from_the_last_row),
        (requests_module, "_drafted_prefixes", shifted_prefixes),
    ],
)
def test_planted_faults(
    make: Callable[..., LLM],
    reference: Callable[[str], list[Completion]],
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    fault: Callable[..., Any],
) -> None:
    llm = make(LLAMA, speculate=FIXED)
    expected = reference(LLAMA)
    source = sources(known(expected), llm.config.vocab_size)["partly"]
    source.known = {}  # ids will change
    ids = known(expected)
    source.draft = lambda _, count, request: [
        token if i % 3 else (token + 7) % llm.config.vocab_size
        for i, token in enumerate(ids[request.id][len(request.tokens) - request.prompt_len :][:count], 1)
    ]
    assert llm.engine.speculator is not None
    llm.engine.speculator.proposer = source
    monkeypatch.setattr(module, name, fault)
    assert content(llm.generate(PROMPTS, PARAMS)) != content(expected)


def test_counts_of_a_proposer_of_known_agreement(
    make: Callable[..., LLM], shared: Callable[..., LLM]
) -> None:
    """The third of four drafts is wrong: each step accepts two and draws one more."""
    params = SamplingParams(max_tokens=1 + 3 * 7 + 1, ignore_eos=True)
    [expected] = shared(LLAMA).generate([PROMPTS[3]], params)
    llm = make(LLAMA, speculate=FIXED)

    def draft(coming: list[int], count: int, request: Any) -> list[int]:
        return [token + (place == 2) for place, token in enumerate(coming[:count])]

    use(llm.engine, Source({"llm-0": expected.token_ids}, draft))
    steps = 0
    step = llm.engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    assert content(llm.generate([PROMPTS[3]], params)) == content([expected])
    status = llm.engine.status().speculation
    assert status is not None
    # The first token comes from the prompt, the last without drafts; a request takes no more drafts than it has outputs left.
    assert (status.drafts, status.draft_tokens) == (7, 6 * 4 + 3) and steps == 1 + 7 + 1
    assert status.accepted_by_position == (7, 7, 0, 0) and status.accepted_tokens == 14
    assert status.mean_run == 3.0 and status.acceptance == pytest.approx(14 / 27)
    assert status.reasons == {"the last token of an output": 1}
    assert llm.engine.status().speculation == status
    assert shared(LLAMA).engine.status().speculation is None


GRAMMAR_PARAMS = [
    SamplingParams(
        max_tokens=40,
        structured_output=StructuredOutput(
            json_schema={
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "why"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        ),
    ),
    SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=1,
        structured_output=StructuredOutput(regex="[a-z]{1,9}(-[0-9]{4}){1,3}"),
    ),
    SamplingParams(
        max_tokens=30,
        temperature=0.9,
        seed=2,
        frequency_penalty=0.5,
        structured_output=StructuredOutput(choice=["the first of them", "the second", "nothing"]),
    ),
    SamplingParams(max_tokens=12),
]


@pytest.mark.parametrize("kind", ["right", "wrong", "anything", "partly", "hostile"])
def test_grammars(make: Callable[..., LLM], shared: Callable[..., LLM], kind: str) -> None:
    """Masks follow the drafts, whose copies of the grammar are given up afterwards; illegal drafts are cut and counted."""
    pytest.importorskip("llguidance")
    prompts = PROMPTS[: len(GRAMMAR_PARAMS)]
    expected = shared(LLAMA).generate(prompts, GRAMMAR_PARAMS)
    llm = make(LLAMA, speculate=FIXED)
    use(llm.engine, sources(known(expected), llm.config.vocab_size)[kind])
    assert content(llm.generate(prompts, GRAMMAR_PARAMS)) == content(expected)
    status = llm.engine.status().speculation
    assert status is not None and status.drafts > 4
    assert ("a draft against the grammar" in status.reasons) == (kind != "right")


def test_a_mask_of_another_draft_shows(
    make: Callable[..., LLM], shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the masks of drafted rows are those of the row before."""
    pytest.importorskip("llguidance")
    expected = shared(LLAMA).generate(PROMPTS[:1], GRAMMAR_PARAMS[1])
    llm = make(LLAMA, speculate=FIXED)
    use(llm.engine, sources(known(expected), llm.config.vocab_size)["right"]).known = {}
    original = logits_processors.next_tokens

    def shifted(*arguments: Any, **options: Any) -> Any:
        mask = original(*arguments, **options)
        mask[1:] = mask[:-1].clone()
        return mask

    ids = expected[0].token_ids
    llm.engine.speculator.proposer.draft = (
        lambda _, count, request: list(  # type: ignore[union-attr]
            ids[len(request.tokens) - request.prompt_len :][:count]
        )
    )
    monkeypatch.setattr(logits_processors, "next_tokens", shifted)
    assert content(llm.generate(PROMPTS[:1], GRAMMAR_PARAMS[1])) != content(expected)
