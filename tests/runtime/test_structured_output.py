"""Structured output matches its description for any model, in any batch, and after any failed step."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ci.budget import REFERENCE, timed_work

from gristmill.runtime import grammars, logits_processors
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.chat.conversation import ChatOptions
from gristmill.runtime.chat.formats._structure import after_thought, thought_rule
from gristmill.runtime.errors import UsageError
from gristmill.runtime.grammars import Grammar, GrammarCompiler
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.structured_output import StructuredOutput
from gristmill.runtime.tokenizer import Tokenizer
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["reader", "writer"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "role", "tags"],
    "additionalProperties": False,
}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9]"
SUM = 'start: NUMBER ("+" NUMBER)* ";"\nNUMBER: /[1-9][0-9]?/'


def fits_person(text: str) -> bool:
    output = json.loads(text)
    return (
        output.keys() == PERSON["properties"].keys()  # type: ignore[attr-defined]
        and len(output["name"]) <= 12
        and 0 <= output["age"] <= 150
        and output["role"] in ("reader", "writer")
        and len(output["tags"]) <= 3
        and all(type(tag) is bool for tag in output["tags"])
    )


CASES: list[tuple[StructuredOutput, Callable[[str], bool]]] = [
    (StructuredOutput(json_schema=PERSON), fits_person),
    (StructuredOutput(json_schema=json.dumps(PERSON)), fits_person),
    (StructuredOutput(regex=DATE), lambda text: re.fullmatch(DATE, text) is not None),
    (
        StructuredOutput(choice=["SELECT", 'INSERT a "row"', "ünïcode 日本"]),
        lambda text: text in ("SELECT", 'INSERT a "row"', "ünïcode 日本"),
    ),
    (StructuredOutput(grammar=SUM), lambda text: re.fullmatch(r"[1-9]\d?(\+[1-9]\d?)*;", text) is not None),
]


def params(wish: StructuredOutput | None, seed: int | None = None, **more: Any) -> SamplingParams:
    temperature = 0.0 if seed is None else 1.2
    return SamplingParams(max_tokens=400, temperature=temperature, seed=seed, structured_output=wish, **more)


def prompt(i: int) -> list[int]:
    return oracle.eval_tokens()[331 * i :][: 5 + i]


@pytest.mark.parametrize("decode_graphs", [False, True])
def test_every_kind_in_one_batch(shared: Callable[..., LLM], decode_graphs: bool) -> None:
    """Greedy and sampled, together with unconstrained requests."""
    llm = shared(LLAMA, decode_graphs=decode_graphs)
    wishes = [params(wish, seed) for wish, _ in CASES for seed in (None, 1, 2)]
    plain = SamplingParams(max_tokens=30)
    prompts = [prompt(i) for i in range(len(wishes))]
    completions = llm.generate([*prompts, prompt(0)], [*wishes, plain])
    for place, completion in enumerate(completions[:-1]):
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "stop":
            assert CASES[place // 3][1](completion.text), completion.text
    assert sum(completion.finish_reason == "stop" for completion in completions[:-1]) >= len(wishes) - 3
    assert completions[-1] == llm.generate([prompt(0)], plain)[0]
    assert not llm.engine.runner.processors


def test_a_planted_fault_shows(shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the grammar does not receive the sampled tokens."""
    monkeypatch.setattr(Grammar, "consume", lambda self, tokens: None)
    [result] = shared(LLAMA).generate(
        [prompt(1)], SamplingParams(max_tokens=30, structured_output=StructuredOutput(regex=DATE))
    )
    assert re.fullmatch(DATE, result.text) is None


def test_the_mask_goes_to_the_rows_it_belongs_to(
    shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the masks of two requests are exchanged."""
    llm = shared(LLAMA)
    wishes = [params(StructuredOutput(choice=[text])) for text in ("aaaa", "bbbb")]
    assert [one.text for one in llm.generate([[5], [6]], wishes)] == ["aaaa", "bbbb"]
    original = logits_processors.next_tokens
    monkeypatch.setattr(
        logits_processors, "next_tokens", lambda *rows, **pinned: original(*rows, **pinned).flip(0)
    )
    assert [one.text for one in llm.generate([[5], [6]], wishes)] != ["aaaa", "bbbb"]


@pytest.mark.parametrize("helped", [False, True])
def test_threads_help_with_masks_that_take_long_only(
    shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, helped: bool
) -> None:
    threads = grammars._threads()
    asked: list[int] = []
    monkeypatch.setattr(grammars, "_threads", lambda: (asked.append(1), threads)[1])
    monkeypatch.setattr(grammars, "ALONE_S", 0.0 if helped else 60.0)
    wishes = [params(StructuredOutput(choice=[text])) for text in ("aaaa", "bbbb", "cccc")]
    assert [one.text for one in shared(LLAMA).generate([[5], [6], [7]], wishes)] == ["aaaa", "bbbb", "cccc"]
    assert bool(asked) is helped


def test_with_penalties_stop_strings_and_several_completions(shared: Callable[..., LLM]) -> None:
    llm = shared(LLAMA)
    several = llm.generate([prompt(2)], params(CASES[2][0], 3, n=4, repetition_penalty=1.2))
    assert all(CASES[2][1](one.text) for one in several) and len({one.text for one in several}) > 1
    [cut] = llm.generate([prompt(2)], params(CASES[2][0], 3, stop=["-"]))
    assert re.fullmatch("20[0-9]{2}", cut.text)


def test_preemption_and_steps_that_fail(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    roomy, tight = make(LLAMA), make(LLAMA, num_blocks=6, max_seqs=3)
    wishes = [params(CASES[0][0], seed) for seed in range(3)]
    prompts = [oracle.eval_tokens()[90 * i :][:20] for i in range(3)]
    expected = roomy.generate(prompts, wishes)
    commit, preempted = tight.engine.scheduler.commit, []
    tight.engine.scheduler.commit = lambda plan: (preempted.extend(plan.preempted), commit(plan))  # type: ignore[method-assign]
    step, sampler, calls = tight.engine.step, tight.engine.runner.sampler.draw, []

    def draw(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) % 5 == 0:
            raise MemoryError
        sampler(*arguments)

    def stubborn() -> Any:
        try:
            return step()
        except MemoryError:
            return step()

    monkeypatch.setattr(tight.engine.runner.sampler, "draw", draw)
    monkeypatch.setattr(tight.engine, "step", stubborn)
    for actual, other in zip(tight.generate(prompts, wishes), expected, strict=True):
        if other.finish_reason == "stop" and actual.finish_reason == "stop":
            assert actual.text == other.text
    assert preempted and len(calls) > 10


def test_async_engine_compiles_beside_the_event_loop(shared: Callable[..., LLM]) -> None:
    llm = shared(LLAMA)

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            completions = await asyncio.gather(
                *(engine.generate(prompt(i), params(CASES[2][0], i)) for i in range(6))
            )
            assert all(CASES[2][1](one.text) for [one] in completions)
            with pytest.raises(UsageError, match="cannot be compiled"):
                await engine.generate("x", params(StructuredOutput(regex="[a")))
            assert not engine._requests

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({}, "is one of json_schema, regex, grammar, choice and structural_tag, got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"choice": []}, "choice must be texts"),
        ({"choice": "abc"}, "choice must be texts"),
        ({"choice": [""]}, "choice must be texts"),
        ({"regex": 5}, "regex must be text, got 5"),
        ({"json_schema": [1]}, "json_schema must be a mapping or text"),
        ({"json_schema": "{"}, "json_schema is not JSON: Expecting"),
        ({"json_schema": '{"type": "string"}\nstart: "a"'}, "json_schema is not JSON: Extra data"),
        ({"json_schema": {"const": {1}}}, "json_schema is not JSON: Object of type set"),
        ({"json_schema": {"const": float("nan")}}, "json_schema is not JSON: Out of range float"),
    ],
)
def test_wishes_are_checked(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StructuredOutput(**wish)


def test_parameters_can_be_keys() -> None:
    wish = SamplingParams(
        structured_output=CASES[0][0], logit_bias={1: 2.0}, bad_words=["a", [1, 2]], stop=["x"]
    )
    same = SamplingParams(
        structured_output=CASES[0][0], logit_bias={1: 2.0}, bad_words=["a", [1, 2]], stop="x"
    )
    assert {wish: 1}[same] == 1 and wish != SamplingParams()


def test_what_cannot_be_compiled_or_combined(
    shared: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = shared(LLAMA)
    for wish, message in (
        (StructuredOutput(regex="[ab"), "unclosed character class"),
        (StructuredOutput(json_schema={"type": "nope"}), "Invalid type: nope"),
        (StructuredOutput(grammar='start: "a" | foo'), 'unknown name: "foo"'),
    ):
        with pytest.raises(UsageError, match=message):
            llm.generate("x", params(wish))
    assert not llm.engine.has_unfinished()
    for more in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(UsageError, match="ignore_eos and min_tokens cannot be set"):
            SamplingParams(structured_output=CASES[2][0], **more)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a StructuredOutput"):
        SamplingParams(structured_output={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="so does structured_output"):
        llm.engine.add_request("a", [1], params(CASES[2][0]))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(llm, "_compiler", None)
    with pytest.raises(UsageError, match=r"pip install 'gristmill\[structured\]'"):
        llm.generate("x", params(CASES[2][0]))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    """For a model of 4096 tokens."""
    return GrammarCompiler((oracle.MODELS / LLAMA / "tokenizer.json").read_text(), 4096, [2])


def written(grammar: Grammar, token: int, count: int) -> int:
    """How many of these tokens come until the grammar cannot go on."""
    for number in range(count):
        if grammar.failed:
            return number
        mask = grammars.next_tokens([grammar], [[]], False)
        if grammar.failed:
            return number
        assert mask[0, token // 32].item() >> token % 32 & 1
        grammar.consume([token])
    return count


def test_an_ambiguous_grammar_ends_before_it_holds_up_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes the square of the time of a text that has ever more derivations: without a bound half a second after 500 tokens. A second is
    one of the processor of the time budgets: on one that is much faster, another limit would end these."""
    slower, thread_time = timed_work() / REFERENCE, time.thread_time
    monkeypatch.setattr(
        grammars,
        "time",
        SimpleNamespace(thread_time=lambda: thread_time() / slower, perf_counter=time.perf_counter),
    )
    letter = Tokenizer(oracle.MODELS / LLAMA).encode("a", add_special_tokens=False)[-1]
    for rules in ('s: s s | "a" | ""', 's: l l l l l l l\nl: item*\nitem: "a" | "a" "b"?'):
        grammar = compiler.compile(StructuredOutput(grammar=f"start: s\n{rules}"))
        begin = time.thread_time()
        assert 20 < written(grammar, letter, 2000) < 2000
        assert (time.thread_time() - begin) / slower < 10
        assert (
            "the grammar is too ambiguous" in grammar.error
            and "Let a text have one derivation" in grammar.error
        )
        assert grammar.allowed([letter]) == 0
    for rules in ('s: "a"*', 's: s "a" | "a"', 's: (item ","?)* ";"?\nitem: /a+/ | /a/'):
        grammar = compiler.compile(StructuredOutput(grammar=f"start: s\n{rules}"))
        assert written(grammar, letter, 2000) == 2000, grammar.error


def test_a_grammar_makes_its_lexer_when_it_is_compiled(compiler: GrammarCompiler) -> None:
    """In its own thread, where only its request waits: of terminals that are a million characters long it takes seconds, and a step half a second
    at most. What goes wrong is said in a line, without the state of the parser."""
    doubled = "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(20))
    begin = time.thread_time()
    grammar = compiler.compile(StructuredOutput(grammar=f'start: R0\n{doubled}\nR20: "a"'))
    compiling, begin = time.thread_time() - begin, time.thread_time()
    mask = grammars.next_tokens([grammar], [[]], False)
    grammar.consume([int(mask[0].nonzero()[0]) * 32 + int(mask[0].max()).bit_length() - 1])
    assert time.thread_time() - begin < compiling / 2
    assert grammar.failed and grammar.error == "lexer error: too many expressions constructed"
    with pytest.raises(UsageError, match="cannot be compiled: nothing matches it: no token can come next$"):
        compiler.compile(StructuredOutput(json_schema={"$ref": "#"}))


def test_time_counts_by_tokens(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long once, and little afterwards, goes on."""
    clock = [0.0]
    monkeypatch.setattr(grammars.time, "thread_time", lambda: clock.append(clock[-1] + clock[0]) or clock[-1])
    [grammar] = compiler.compile(StructuredOutput(regex="a*")).copies(1)
    for seconds, ends in ((0.09, False), (0.0, False), (0.015, True)):
        clock[0] = seconds
        for _ in range(30 if seconds < 0.05 else 1):
            grammar.consume([])
        assert grammar.failed is ends


@pytest.mark.parametrize("thinks", [False, True])
def test_choices_of_every_control_character(compiler: GrammarCompiler, thinks: bool) -> None:
    """The dialect refuses some of them as they are, which JSON does not write otherwise."""
    tokenizer = Tokenizer(oracle.MODELS / LLAMA)
    choices = [f"a{chr(code)}b" for code in (*range(32), 127, 128, 0x2028)]
    output = StructuredOutput(choice=choices)
    if thinks:
        output = after_thought(output, thought_rule(("<think>", "</think>"), ChatOptions(), ""))
    grammar = compiler.compile(output)
    for one in choices:
        ids = tokenizer.encode(one, add_special_tokens=False)
        assert grammar.allowed(ids) == len(ids), repr(one)


def test_thousands_of_choices(compiler: GrammarCompiler) -> None:
    """As many rules would be more than a parser takes; those that begin another one are among them."""
    tokenizer = Tokenizer(oracle.MODELS / LLAMA)
    choices = [*(f"value {number}" for number in range(5000)), "value"]
    whole = compiler.compile(StructuredOutput(choice=choices))
    for text, fits in (("value", True), ("value 4999", True), ("value 4", True), ("value 5000", False)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        [_, grammar] = whole.copies(2)
        assert (grammar.allowed(ids) == len(ids)) is fits
        if fits:
            grammar.consume(ids)
            assert not grammar.failed, grammar.error
            assert grammars.next_tokens([grammar], [[]], False)[0, 0].item() >> 2 & 1


CALL = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
}
CALL |= {"additionalProperties": False}
TAGS = {
    "type": "structural_tag",
    "structures": [
        {"begin": "the[add:", "schema": CALL, "end": "]"},
        {"begin": "of(", "schema": json.dumps({"enum": [1, 2]}), "end": ")"},
    ],
    "triggers": ["the", "of"],
}


def test_structural_tags_bind_what_follows_a_trigger(shared: Callable[..., LLM]) -> None:
    """Free text elsewhere; behind each trigger of the output stands a whole tag."""
    llm, whole = shared(LLAMA), re.compile(r'the\[add:\{\s*"n"\s*:\s*\d\d?\s*\}\]|of\([12]\)')
    cut = re.compile(r"(the(\[[^\]]*)?|of(\([12]?)?)$")
    wishes = [
        params(StructuredOutput(structural_tag=tag), seed)
        for tag in (TAGS, json.dumps(TAGS))
        for seed in (None, 1, 2)
    ]
    outputs = llm.generate(
        [prompt(i) for i in range(len(wishes))], [replace(w, max_tokens=120) for w in wishes]
    )
    assert sum(len(whole.findall(one.text)) for one in outputs) > 4
    for one in outputs:
        assert re.search("the|of", cut.sub("", whole.sub("", one.text))) is None, one.text


def test_a_structural_tag_may_begin_with_a_special_token(shared: Callable[..., LLM]) -> None:
    """Text does not hold the token; behind it stands the tag."""
    llm = shared(LLAMA)
    tag = {"structures": [{"begin": "<|bos|>call", "schema": CALL, "end": "!"}], "triggers": ["<|bos|>"]}
    text, call, other = (llm.tokenizer.encode(part) for part in ("some text", 'call{"n":7}!', "another"))
    compiler = GrammarCompiler(
        (oracle.MODELS / LLAMA / "tokenizer.json").read_text(), llm.config.vocab_size, llm.config.eos_ids
    )
    grammar = compiler.compile(StructuredOutput(structural_tag=tag))
    assert grammar.allowed([*text, 0, *call, *text, 1]) == 2 * len(text) + len(call) + 2
    assert grammar.allowed([*text, 0, *other]) == len(text) + 1


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("{", "is not JSON"),
        ({"format": {}}, "other entries"),
        ({"structures": [], "triggers": ["<"]}, "at least one structure"),
        ({"structures": TAGS["structures"], "triggers": "the"}, "triggers are texts"),
        ({"structures": TAGS["structures"], "triggers": ["the", ""]}, "none of them empty"),
        (
            {"structures": TAGS["structures"], "triggers": ["the"]},
            r"starts with a trigger of \['the'\], got 'of\('",
        ),
        ({"structures": [{"begin": "the"}], "triggers": ["the"]}, "a structure, got"),
        (
            {"structures": [{"begin": "the", "schema": 3, "end": ""}], "triggers": ["the"]},
            "schema is a mapping or text",
        ),
        (
            {"structures": [{"begin": "the", "schema": "{} start: TEXT", "end": ""}], "triggers": ["the"]},
            "the schema after 'the' is not JSON",
        ),
    ],
)
def test_mistakes_in_structural_tags(tag: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StructuredOutput(structural_tag=tag)
