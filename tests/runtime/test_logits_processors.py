"""Penalties, biases and bans equal transformers' processors in any batch, also after steps that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from transformers.generation.logits_process import SuppressTokensLogitsProcessor

from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.logits_processors import FIRST_SLOTS, IN_PROMPT, LogitsProcessors
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA
from tests.runtime.processed import apply, cpu_plans, entry

VOCAB = 257
TEXT = "The CREATE INDEX statement"


class CountPenalties:
    """Frequency and presence penalties as the OpenAI API defines them; transformers lacks them."""

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self.params, self.prompt_len = params, prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token in input_ids[0, self.prompt_len :].tolist():
            scores[0, token] -= self.params.frequency_penalty
        for token in set(input_ids[0, self.prompt_len :].tolist()):
            scores[0, token] -= self.params.presence_penalty
        return scores


def transformers_processors(
    params: SamplingParams, prompt_len: int, stop_ids: Sequence[int], vocab: int = VOCAB
) -> Any:
    """Returns transformers' processors for a request, in the order that SamplingParams states."""
    processors: list[Any] = []
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(t,): float(b) for t, b in params.logit_bias.items()}))
    if params.allowed_token_ids is not None:
        barred = sorted(set(range(vocab)) - set(params.allowed_token_ids))
        processors.append(SuppressTokensLogitsProcessor(barred, device="cpu"))
    if params.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_len, params.min_tokens, list(stop_ids)))
    if params.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(w) for w in params.bad_words], eos_token_id=-1))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(CountPenalties(params, prompt_len))
    return LogitsProcessorList(processors)


PARAMS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.7, presence_penalty=-1.5),
    SamplingParams(presence_penalty=1.1, frequency_penalty=0.3),
    SamplingParams(logit_bias={3: 2.5, 256: -7.0, 0: 100.0}),
    SamplingParams(allowed_token_ids=[0, 5, 9, 256], logit_bias={5: -1.0, 7: 30.0}),
    SamplingParams(bad_words=[[4], [1, 2], [1, 2, 3], [2, 2]]),
    SamplingParams(min_tokens=3),
    SamplingParams(
        repetition_penalty=1.2,
        frequency_penalty=-0.4,
        presence_penalty=0.9,
        logit_bias={1: 4.0, 2: -4.0},
        bad_words=[[2], [3, 1]],
        min_tokens=2,
        allowed_token_ids=range(200),
    ),
]
STOP_IDS = [0, 7]


def compare(params: Sequence[SamplingParams], seed: int = 0, steps: int = 6) -> float:
    """Returns the largest difference from transformers over some steps while requests join one by one; every
    row is compared."""
    rng = torch.Generator().manual_seed(seed)
    ours = LogitsProcessors(VOCAB, cpu_plans())
    tokens: list[list[int]] = []
    prompts: list[int] = []
    worst = 0.0
    for number in range(steps + len(params)):
        if number < len(params):  # another request joins
            # transformers skips words longer than the context.
            length = int(torch.randint(3, 9, (), generator=rng))
            tokens.append(torch.randint(0, 8, (length,), generator=rng).tolist())
            prompts.append(length)
            if params[number].edits_logits:
                ours.add(str(number), params[number], tokens[number], length, STOP_IDS)
        order = torch.randperm(len(tokens), generator=rng).tolist()
        logits = 3 * torch.randn(len(tokens), VOCAB, generator=rng)
        original = logits.clone()
        processed = apply(ours, logits, [str(i) for i in order])
        assert torch.equal(logits, original), "the logits that came in were changed"
        for row, i in enumerate(order):
            expected = transformers_processors(params[i], prompts[i], STOP_IDS)(
                torch.tensor([tokens[i]]), logits[row][None]
            )[0]
            assert torch.equal(processed[row].isinf(), expected.isinf()), params[i]
            finite = expected.isfinite()
            worst = max(worst, float((processed[row] - expected)[finite].abs().max()))
        for some in tokens:
            some.append(int(torch.randint(0, 8, (), generator=rng)))
    return worst


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_alone_like_transformers(params: SamplingParams) -> None:
    assert compare([params]) < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_together_like_transformers(seed: int) -> None:
    """There are more requests than initial slots, and the order of rows changes every step."""
    assert len(PARAMS * 2) > 2 * FIRST_SLOTS
    assert compare(PARAMS * 2, seed) < 1e-5


def test_more_rows_than_are_processed_at_a_time() -> None:
    rows = 67
    processors = LogitsProcessors(VOCAB, cpu_plans())
    for i in range(rows):
        processors.add(str(i), SamplingParams(logit_bias={i: 1.0 + i}), [1], 1, [])
    processed = apply(processors, torch.zeros(rows, VOCAB), [str(i) for i in range(rows)])
    assert torch.equal(processed, torch.zeros(rows, VOCAB).diagonal_scatter(1.0 + torch.arange(rows)))


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        ("_count", lambda self, known: None),
        ("edit", None),
    ],
)
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, fault: str, changed: Any) -> None:
    if changed is not None:
        monkeypatch.setattr(LogitsProcessors, fault, changed)
    else:  # only output tokens count as repeated
        edit = LogitsProcessors.edit

        def forgetful(self: LogitsProcessors, *arguments: Any) -> Any:
            self._seen &= ~IN_PROMPT
            return edit(self, *arguments)

        monkeypatch.setattr(LogitsProcessors, "edit", forgetful)
    assert compare([SamplingParams(repetition_penalty=1.3)]) > 0.1


def test_slots_are_given_back_and_written_anew() -> None:
    processors = LogitsProcessors(VOCAB, cpu_plans())
    for i in range(5 * FIRST_SLOTS):
        processors.add("r", SamplingParams(logit_bias={i: -3.0}, repetition_penalty=2.0), [i, i], 1, [])
        processed = apply(processors, torch.ones(1, VOCAB), ["r"])
        expected = torch.ones(1, VOCAB)
        expected[0, i] = -2 * 2.0
        assert torch.equal(processed, expected)
        processors.remove("r")
    assert processors._slots == FIRST_SLOTS and len(processors) == 0
    processors.remove("nobody")


def test_rows_without_wishes_are_the_same_tensor() -> None:
    processors = LogitsProcessors(VOCAB, cpu_plans())
    processors.add("r", SamplingParams(min_tokens=1), [1], 1, [2])
    logits = torch.randn(3, VOCAB)
    assert apply(processors, logits, ["a", "b", "c"]) is logits
    processed = apply(processors, logits, ["a", "r", "c"])
    assert torch.equal(processed[[0, 2]], logits[[0, 2]]) and processed[1, 2] == -torch.inf


def test_steps_without_wishes_do_not_meet_the_processors(
    shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitsProcessors, "prepare", lambda *arguments: 1 / 0)
    llm = shared(LLAMA)
    llm.generate(TEXT, SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9, stop_token_ids=[5]))
    with pytest.raises(ZeroDivisionError):
        llm.generate(TEXT, SamplingParams(max_tokens=2, min_tokens=1))


def test_bf16_logits_are_processed_in_float32() -> None:
    processors = LogitsProcessors(VOCAB, cpu_plans())
    processors.add("r", SamplingParams(logit_bias={1: 0.001}), [1], 1, [])
    processed = apply(processors, torch.full((1, VOCAB), 100.0, dtype=torch.bfloat16), ["r"])
    assert processed.dtype is torch.float32 and float(processed[0, 1]) == pytest.approx(100.001)


def test_a_step_that_failed_counts_nothing_twice() -> None:
    processors = LogitsProcessors(VOCAB, cpu_plans())
    tokens = [5, 6]
    processors.add("r", SamplingParams(frequency_penalty=1.0), tokens, 1, [])
    for _ in range(3):  # the same step, tried again
        assert float(apply(processors, torch.zeros(1, VOCAB), ["r"])[0, 6]) == -1.0
    tokens += [6, 6]  # two drafts at once
    assert float(apply(processors, torch.zeros(1, VOCAB), ["r"])[0, 6]) == -3.0


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("fault", [False, True])
def test_drafts_are_processed_as_if_they_were_known(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, fault: bool
) -> None:
    """Every row of two requests with drafts equals the row of a request that has these tokens, bit for bit, also in a later step.

    Planted fault: the rows do not see their drafts.
    """
    rng = torch.Generator().manual_seed(3)
    prompt, drafts = [1, 2, 5], [[2, 2, 1, 4], [1, 2, 2]]
    ours, known = LogitsProcessors(VOCAB, cpu_plans()), LogitsProcessors(VOCAB, cpu_plans())
    drafted = [some[:count] for some in drafts for count in range(len(some) + 1)]
    for tokens in ([*prompt], [*prompt, 1], [*prompt, 1, 2]):
        for name in "ab":
            ours.remove(name)
            ours.add(name, params, tokens, len(prompt), STOP_IDS)
        for row, prefix in enumerate(drafted):
            known.remove(str(row))
            known.add(str(row), params, [*tokens, *prefix], len(prompt), STOP_IDS)
        logits = 3 * torch.randn(9, VOCAB, generator=rng)
        expected = apply(known, logits, [str(row) for row in range(9)])
        if fault:
            monkeypatch.setattr(
                "gristmill.runtime.processed_requests._drafted_prefixes",
                lambda entry: [[] for _ in range(1 + entry.drafts)],
            )
        actual = apply(ours, logits, [entry("a", drafts[0]), entry("b", drafts[1])])
        monkeypatch.undo()
        assert torch.equal(actual, expected) != (fault and depends_on_tokens(params))
        without = apply(ours, logits[:2], ["b", "a"])  # nothing of the drafts is left in the slots
        assert torch.equal(without, apply(known, logits[:2], ["5", "0"]))


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("fault", [False, True])
def test_a_token_on_the_device_is_processed_as_if_it_were_known(params: SamplingParams, fault: bool) -> None:
    """Step by step, as asynchronous steps run: the host learns of a token one step late.

    Planted fault: rows do not see the token.
    """
    rng = torch.Generator().manual_seed(5)
    prompt, output = [1, 2, 5], [1, 2, 2, 1, 2, 3, 1, 2]
    ours, known = LogitsProcessors(VOCAB, cpu_plans()), LogitsProcessors(VOCAB, cpu_plans())
    late = [*prompt]
    ours.add("a", params, late, len(prompt), STOP_IDS)
    same = True
    for count, token in enumerate(output):
        known.remove("a")
        known.add("a", params, [*prompt, *output[: count + 1]], len(prompt), STOP_IDS)
        logits = 3 * torch.randn(1, VOCAB, generator=rng)
        fed = torch.tensor([9 if fault else token])
        processed = apply(ours, logits, [entry("a", tokens=None)], fed)
        same = same and torch.equal(processed, apply(known, logits, ["a"]))
        late.append(token)
    assert same != (fault and depends_on_tokens(params) and not only_counts(params))


def only_counts(params: SamplingParams) -> bool:
    """Whether only the number of tokens matters, not which they are."""
    return params == SamplingParams(min_tokens=params.min_tokens)


def depends_on_tokens(params: SamplingParams) -> bool:
    fixed = replace(params, logit_bias={}, allowed_token_ids=None)
    return fixed.edits_logits


EDITS = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {40: 5.0, 41: 5.0}},
    {"allowed_token_ids": range(100, 400)},
]


def greedy(llm: LLM, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
    """Applies transformers' logits and processors, one token after another."""
    ids, model = list(prompt), oracle.oracle(LLAMA)
    stop_ids = [*llm.config.eos_ids, *params.stop_token_ids]
    processors = transformers_processors(params, len(prompt), stop_ids, llm.config.vocab_size)
    for _ in range(count):
        scores = processors(torch.tensor([ids]), oracle.logits(model, ids)[-1:])
        ids.append(int(scores.argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("decode_graphs", [False, True])
def test_generation_like_transformers(shared: Callable[..., LLM], decode_graphs: bool) -> None:
    """All requests are in one batch, with a plain request between them."""
    llm = shared(LLAMA, decode_graphs=decode_graphs)
    prompt = llm.tokenizer.encode(TEXT)
    params = [SamplingParams(max_tokens=16), *(SamplingParams(max_tokens=16, **edit) for edit in EDITS)]  # type: ignore[arg-type]
    plain = greedy(llm, prompt, 16, params[0])
    params.append(SamplingParams(max_tokens=16, bad_words=[plain[2:4], [plain[6]]]))
    params.append(SamplingParams(max_tokens=16, stop_token_ids=[plain[2]], min_tokens=9))
    completions = llm.generate([prompt] * len(params), params)
    for one, wish in zip(completions, params, strict=True):
        assert list(one.token_ids) == greedy(llm, prompt, 16, wish), wish
    assert len({one.token_ids for one in completions}) > 5, "the edits change nothing: the test shows nothing"
    assert not llm.engine.runner.processors
    if decode_graphs:
        assert sum(row["steps"] for row in llm.explain_graphs() if row["seqs"]) > 10


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_others_ask_for_changes_no_ids(make: Callable[..., LLM], dtype: str) -> None:
    llm = make(LLAMA, dtype=dtype)
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    single = llm.generate(TEXT, sampled)[0]
    among = llm.generate([TEXT, TEXT], [sampled, SamplingParams(max_tokens=12, repetition_penalty=1.5)])
    assert among[0] == single and among[1].token_ids != single.token_ids


def test_preemption_changes_nothing(make: Callable[..., LLM]) -> None:
    params = [SamplingParams(max_tokens=30, ignore_eos=True, **edit) for edit in EDITS]  # type: ignore[arg-type]
    prompts = [oracle.eval_tokens()[100 * i :][:20] for i in range(len(params))]
    roomy, tight = make(LLAMA), make(LLAMA, num_blocks=9, max_seqs=4)
    commit, preempted = tight.engine.scheduler.commit, []
    tight.engine.scheduler.commit = lambda plan: (preempted.extend(plan.preempted), commit(plan))  # type: ignore[method-assign]
    assert tight.generate(prompts, params) == roomy.generate(prompts, params)
    assert preempted


def test_bad_words_as_text(shared: Callable[..., LLM]) -> None:
    llm = shared(LLAMA)
    text = llm.generate(TEXT, SamplingParams(max_tokens=16))[0].text
    word = max(text.split(), key=len)
    cleaned = llm.generate(TEXT, SamplingParams(max_tokens=16, bad_words=[word]))[0].text
    assert word in text and word not in cleaned
    with pytest.raises(
        UsageError, match="the engine has no tokenizer: bad_words must be lists of token ids, got 'x'"
    ):
        llm.engine.add_request("a", [1], SamplingParams(bad_words=["x"]))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty must be a number in \[-2, 2\], got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias must map token ids to finite numbers, got '1'"),
        ({"logit_bias": {1: float("inf")}}, "finite numbers, got 1: inf"),
        ({"bad_words": "word"}, "bad_words must be a list of texts"),
        ({"bad_words": [""]}, "must not hold an empty text"),
        ({"bad_words": [[]]}, "must not hold an empty text"),
        ({"bad_words": [[-1]]}, "bad_words must be token ids"),
        ({"allowed_token_ids": []}, "must name at least one"),
        ({"allowed_token_ids": "abc"}, "allowed_token_ids must be a list or an array"),
        ({"min_tokens": -1}, "min_tokens must be an integer of at least 0"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\), got 5"),
    ],
)
def test_parameters_are_checked(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**wish)


@pytest.mark.parametrize(
    "wish",
    [
        {"logit_bias": {4096: 1.0}},
        {"bad_words": [[1, 4096]]},
        {"allowed_token_ids": [1, 4096]},
        {"min_tokens": 1, "stop_token_ids": [4096]},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(shared: Callable[..., LLM], wish: dict[str, Any]) -> None:
    llm = shared(LLAMA)
    with pytest.raises(UsageError, match="must be token ids from 0 to 4095, got 4096"):
        llm.generate([1], SamplingParams(**wish))
    assert not llm.engine.has_unfinished() and not llm.engine.runner.processors
