"""LLM and Engine: prompts, streams, ends, seeds, errors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch

from gristmill.runtime.completion import GrowingCompletion, text_stream
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import summarize
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import FinishReason
from gristmill.runtime.tokenizer import LONG_TEXT, Tokenizer
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

TEXT = "The CREATE INDEX statement"


@pytest.fixture
def llm(shared: Callable[..., LLM]) -> LLM:
    return shared(LLAMA)


def test_text_ids_and_lists(llm: LLM) -> None:
    ids = llm.tokenizer.encode(TEXT)
    params = SamplingParams(max_tokens=12)
    by_text, by_ids = llm.generate(TEXT, params), llm.generate(ids, params)
    assert by_text == by_ids == llm.generate([TEXT, ids], params)[1:]
    assert by_text[0].prompt_ids == tuple(ids)
    assert by_text[0].text == llm.tokenizer.decode(by_text[0].token_ids)
    assert by_text[0].finish_reason == "length" and len(by_text[0].token_ids) == 12


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=20, stop=["e", "the"], logprobs=1),
    ],
)
def test_stream_is_generate_in_pieces(llm: LLM, params: SamplingParams) -> None:
    prompts = [TEXT, "import numpy as"]
    llm.engine.reset_prefix_cache()
    results = llm.generate(prompts, params)
    llm.engine.reset_prefix_cache()
    growing = defaultdict[tuple[int, int], GrowingCompletion](GrowingCompletion)
    chunks = list(llm.stream(prompts, params))
    for chunk in chunks:
        growing[chunk.index, chunk.choice].add(chunk)
    assert len(chunks) > 2 * len(results)
    assert results == [growing[i, c].completion(results[i * params.n].prompt_ids) for i, c in sorted(growing)]


def test_results_are_decoded_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a result is decoded at its end, and that of every token only where somebody reads it, or a stop string is looked for in it."""
    decoded, decode = list[int](), Tokenizer.decode

    def counted(self: Tokenizer, ids: Sequence[int], skip: bool = True) -> str:
        decoded.append(len(ids))
        return decode(self, ids, skip)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    whole = llm.generate([TEXT, "import"], SamplingParams(max_tokens=20, ignore_eos=True))
    assert decoded == [20, 20]
    stopped = llm.generate(TEXT, SamplingParams(max_tokens=20, ignore_eos=True, stop=("\0 never",)))
    assert len(decoded) > 20 and stopped[0].text == whole[0].text
    hidden = SamplingParams(max_tokens=20, ignore_eos=True, skip_special_tokens=False)
    assert llm.generate(TEXT, hidden)[0].text == decode(llm.tokenizer, whole[0].token_ids, False)


def test_chunks_say_what_was_cached(llm: LLM) -> None:
    """Of the prompt, in whole blocks; chunks are equal whether or not."""
    prompt = [7 + i % 90 for i in range(70)]
    fresh, again = (list(llm.stream([prompt], SamplingParams(max_tokens=3))) for _ in range(2))
    assert {chunk.cached_tokens for chunk in fresh} == {0}
    assert {chunk.cached_tokens for chunk in again} == {64}
    assert fresh == again


def test_closing_a_stream_aborts(llm: LLM) -> None:
    stream = llm.stream(TEXT, SamplingParams(max_tokens=100))
    next(stream)
    assert llm.engine.has_unfinished()
    stream.close()
    assert not llm.engine.has_unfinished()
    llm.engine.scheduler.check()


def test_ends(llm: LLM) -> None:
    first = llm.generate(TEXT, SamplingParams(max_tokens=8))[0].token_ids
    stopped = llm.generate(TEXT, SamplingParams(max_tokens=8, stop_token_ids=(first[3],)))[0]
    place = first.index(first[3])
    assert stopped.token_ids == first[: place + 1] and stopped.finish_reason == "stop"
    end = llm.config.eos_ids[0]
    prompt = oracle.eval_tokens()[: oracle.eval_tokens().index(end)]
    answer = llm.generate(prompt[-64:], SamplingParams(max_tokens=64, temperature=1.0, seed=3))[0]
    assert (end in answer.token_ids) == (answer.finish_reason == "stop")


def test_a_seed_draws_the_same_whatever_else_runs(shared: Callable[..., LLM]) -> None:
    for name in (LLAMA, DEEPSEEK):
        model = shared(name)
        params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=11)
        single = model.generate(TEXT, params)[0]
        greedy = SamplingParams(max_tokens=24)
        among = model.generate(["Python", TEXT, "SELECT", "fn main"], [greedy, params, greedy, greedy])
        assert among[1] == single
        other = model.generate(TEXT, SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=12))[0]
        assert other.token_ids != single.token_ids
        assert among[0] == model.generate("Python", greedy)[0]


def test_two_engines_of_one_seed_agree(make: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0)
    one, two, three = (make(LLAMA, seed=seed).generate([TEXT] * 2, params) for seed in (5, 5, 6))
    assert one == two and one != three
    assert one[0] != one[1], "two requests drew from one stream"


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(llm: LLM, params: dict[str, float]) -> None:
    drawn = SamplingParams(max_tokens=16, temperature=1.5, seed=1, **params)  # type: ignore[arg-type]
    assert llm.generate(TEXT, drawn) == llm.generate(TEXT, SamplingParams(max_tokens=16))


def test_a_top_k_past_the_vocabulary_is_no_filter(llm: LLM) -> None:
    everything, huge = (
        llm.generate(TEXT, SamplingParams(max_tokens=8, temperature=1.0, seed=1, top_k=k))
        for k in (0, 10**12)
    )
    assert everything == huge


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 10**400}, "temperature must be a finite number of at least 0"),
        ({"logit_bias": {1: -(10**400)}}, "logit_bias must map token ids to finite numbers"),
        ({"top_p": 0.0}, r"top_p must be a number in \(0, 1\], got 0"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed must be at most"),
        ({"n": 10**9}, "n must be at most"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list or an array of token ids, got int"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must be token ids"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None"),
        ({"include_stop_str_in_output": 0}, "include_stop_str_in_output must be True or False, got 0"),
    ],
)
def test_sampling_params_are_checked(wish: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**wish)  # type: ignore[arg-type]


def test_prompts_that_cannot_be_served(llm: LLM, make: Callable[..., LLM]) -> None:
    for empty in ("", [""], [[]]):
        with pytest.raises(UsageError, match="prompt is empty"):
            llm.generate(empty)
    with pytest.raises(UsageError, match="no prompts"):
        llm.generate([])
    with pytest.raises(UsageError, match="integers from 0 to 4095, got 4096"):
        llm.generate([1, 4096])
    with pytest.raises(UsageError, match="text must be a list or an array of token ids, got float"):
        llm.generate([1.5])  # type: ignore[list-item]
    for wrong, type_name in (
        (5, "int"),
        (None, "NoneType"),
        (b"x", "bytes"),
        ({1: 2}, "dict"),
        ([b"x"], "bytes"),
        ([None], "NoneType"),
    ):
        with pytest.raises(UsageError, match=f"text.* token ids.*got {type_name}"):
            llm.generate(wrong)  # type: ignore[arg-type]
    for ids in ([-1], [[True]], [[1, "a"]]):
        with pytest.raises(UsageError, match="integers( from 0 to 4095)?, got (-1|True|'a')"):
            llm.generate(ids)  # type: ignore[arg-type]
    for params in ({"temperature": 1.0}, 3, [1]):
        with pytest.raises(UsageError, match="params must be a SamplingParams, or a list"):
            llm.generate("x", params)  # type: ignore[arg-type]
    surrogate = r"half of a surrogate pair \('\\udcff'\) at character 1: was it read from bytes"
    for text in ("a\udcff", "a\udcff" * LONG_TEXT):
        with pytest.raises(UsageError, match=surrogate):
            llm.generate(text)
    with pytest.raises(UsageError, match=surrogate):
        llm.generate("x", SamplingParams(bad_words=["a\udcff"]))
    with pytest.raises(UsageError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match=r"4096 prompt tokens .* need 4097 tokens .*capacity is 256 blocks"):
        llm.generate([1] * 4096)
    assert not llm.engine.has_unfinished(), "a refused prompt left the others behind"
    small = make(LLAMA, num_blocks=4)
    with pytest.raises(ValueError, match="can never run"):
        small.generate(["The", [1] * 64])
    assert not small.engine.has_unfinished()
    assert len(small.generate([1] * 60, SamplingParams(max_tokens=100, ignore_eos=True))[0].token_ids) == 4


def test_options_that_cannot_be(make: Callable[..., LLM]) -> None:
    for wrong, message in (
        ({"dtype": "int4"}, "unknown dtype 'int4'; known: auto, fp32"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"num_blocks": None, "memory": 2.0}, "memory must be bytes"),
        ({"num_blocks": None, "memory": 10}, "does not hold one cache block"),
        ({"max_batch_tokens": 8}, "max_batch_tokens"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": "16"}, "block_size must be an integer of at least 1, got '16'"),
        ({"max_seqs": 0}, "max_seqs must be an integer of at least 1, got 0"),
        ({"max_model_len": 0}, "max_model_len must be an integer of at least 1, got 0"),
        ({"max_chunk": 0}, "max_chunk must be at least 1, got 0"),
        ({"num_blocks": 10**12}, r"1000000000000 blocks of 16 tokens takes \d+ bytes, more than cpu gives"),
        ({"quant": "int5"}, "unknown scheme 'int5'"),
        ({"policy": {"strict": True}}, "policy must be a Policy or the path of a policy file, got dict"),
        ({"seed": "a"}, "seed must be an integer, got 'a'"),
        ({"enable_prefix_cache": "no"}, "enable_prefix_cache must be True or False, got 'no'"),
        ({"enable_prefix_cache": None}, "enable_prefix_cache must be True or False, got None"),
        ({"decode_graphs": "no"}, "decode_graphs must be True, False or None, got 'no'"),
    ):
        with pytest.raises(UsageError, match=message):
            make(LLAMA, **wrong)  # type: ignore[arg-type]
    for no_model in (None, 5):
        with pytest.raises(UsageError, match="a model is a path or the name of a repository, as text, got"):
            LLM(no_model)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no device 'cuda' here"):
            make(LLAMA, device="cuda")


def test_engine_step_by_step(llm: LLM) -> None:
    engine: Engine = llm.engine
    prompt = llm.tokenizer.encode(TEXT)
    engine.add_request("a", prompt, SamplingParams(max_tokens=3))
    engine.add_request("b", prompt[:2], SamplingParams(max_tokens=30))
    with pytest.raises(UsageError, match="in use"):
        engine.add_request("a", prompt)
    with pytest.raises(UsageError, match="abort takes a list of request ids, got the text 'ab'"):
        engine.abort("ab")
    for wrong, message in (
        ((None, prompt), "a text as its id"),
        (("c", prompt, None, "high"), "an integer as its priority"),
        (("c", None), "must be a list or an array of token ids, got NoneType"),
        (("c", prompt, {}), "must be a SamplingParams, got dict"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.add_request(*wrong)  # type: ignore[arg-type]
    actual: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(3):
        for output in engine.step():
            actual[output.id] += output.new_ids
    assert [len(actual["a"]), len(actual["b"])] == [3, 3]
    ended = engine.abort(["a", "b", "c"])
    assert [(o.id, o.finish_reason) for o in ended] == [("b", FinishReason.ABORT)]
    assert engine.step() == [] and not engine.has_unfinished()
    assert tuple(actual["a"]) == llm.generate(prompt, SamplingParams(max_tokens=3))[0].token_ids


def test_nan_logits_end_their_own_request_alone(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA)
    logits = llm.model.logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        corrupted = logits(hidden)
        corrupted[0] = torch.nan
        return corrupted

    monkeypatch.setattr(llm.model, "logits", poisoned)
    first, second = llm.generate([TEXT, "Python"], SamplingParams(max_tokens=1))
    assert (first.finish_reason, second.finish_reason) == ("error", "length")
    llm.engine.scheduler.check()


def test_a_failed_step_can_be_tried_again(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make(LLAMA)
    expected = llm.generate(TEXT, SamplingParams(max_tokens=5))[0].token_ids
    llm.engine.add_request("x", llm.tokenizer.encode(TEXT), SamplingParams(max_tokens=5))
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.model, "logits", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.engine.step()
    actual: list[int] = []
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            actual += output.new_ids
    assert tuple(actual) == expected


def test_explain_and_weight_bytes(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, quant="int4_g128", dtype="bf16")
    llm.generate(TEXT, SamplingParams(max_tokens=2))
    rows = llm.explain()
    assert {row["op"] for row in rows} >= {"linear", "paged_attention", "qk_norm_rope_cache", "sample"}
    assert any("w=int4_g128" in row["problem"] and row["layout"] for row in rows)
    assert all(row["reason"] for row in rows)
    assert llm.weight_bytes < make(LLAMA, dtype="bf16").weight_bytes
    short = {row["op"]: row for row in summarize(rows)}
    assert set(short["linear"]["formats"]) == {"bf16", "int4_g128"} and short["sample"]["formats"] == []
    assert sum(row["plans"] for row in summarize(rows)) == len(rows)


def test_streamed_text_never_breaks_a_character() -> None:
    tokenizer = Tokenizer(MODELS / LLAMA)
    text = "naïve — ∑ λ→µ 日本語 🙂🙃 café"
    ids = tokenizer.encode(text)
    stream, pieces = tokenizer.stream(), []
    for token in ids:
        pieces.append(stream.push([token]))
        assert "\N{REPLACEMENT CHARACTER}" not in pieces[-1]
    pieces.append(stream.finish())
    assert "".join(pieces) == text
    assert any(not piece for piece in pieces[:-1]), "no character took two tokens: the test shows nothing"
    cut = tokenizer.stream()
    part = tokenizer.encode("🙂")[:-1]
    assert cut.push(part) + cut.finish() == tokenizer.decode(part)
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(0, 4096, (40,), generator=draw).tolist()
        stream = tokenizer.stream()
        assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == tokenizer.decode(ids)


def test_special_tokens_are_shown_on_request() -> None:
    """In whole texts, in streams, and in what a request gets."""
    tokenizer = Tokenizer(MODELS / LLAMA)
    ids = [0, *tokenizer.encode("The index", add_special_tokens=False), 1, 1]
    shown, hidden = tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids)
    assert shown != hidden
    assert str(tokenizer.token(0)) in shown
    for skip, text in ((True, hidden), (False, shown)):
        stream = tokenizer.stream(skip)
        assert "".join(stream.push([token]) for token in ids) + stream.finish() == text
        made = text_stream(lambda: tokenizer, SamplingParams(skip_special_tokens=skip), ())
        assert made is not None
        assert made.push(ids) + made.finish() == text
