"""Stop strings are exact wherever pieces, tokens and characters begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.runtime.completion import StopStrings, TextOutput
from gristmill.runtime.errors import UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import FinishReason, RequestOutput
from tests.runtime.oracle import LLAMA

TEXT = "The CREATE INDEX statement"


def by_characters(text: str, strings: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The definition: read character by character until some stop string is complete; if several are, the
    longest counts."""
    for end in range(1, len(text) + 1):
        complete = [s for s in strings if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_any_pieces_give_the_same(text: str, strings: list[str], include: bool, data: st.DataObject) -> None:
    expected, string = by_characters(text, strings, include)
    stop = StopStrings(strings, include)
    out, rest = "", text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:cut], rest[cut:]
        out += stop.push(piece)
        assert expected.startswith(out), "text came out that a stop string takes back"
    out += stop.finish()
    assert (out, stop.matched) == (expected, string)


def pieces(stop: StopStrings, *text: str) -> list[str]:
    return [stop.push(piece) for piece in text]


def test_what_cannot_begin_a_stop_string_is_not_held_back() -> None:
    stop = StopStrings(["</end>"])
    assert pieces(stop, "a<", "b", "</en", "dx", "<", "/end", ">x", "more") == [
        "a",
        "<b",
        "",
        "</endx",
        "",
        "",
        "",
        "",
    ]
    assert stop.matched == "</end>"


def test_a_planted_fault_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: nothing is held back, so that the beginning of a stop string made of two pieces is
    emitted."""
    assert pieces(StopStrings(["ab"]), "xa", "b") == ["x", ""]
    monkeypatch.setattr(StopStrings, "_beginning", lambda self, buffer: 0)
    assert pieces(StopStrings(["ab"]), "xa", "b") != ["x", ""]


@pytest.fixture
def llm(shared: Callable[..., LLM]) -> LLM:
    return shared(LLAMA)


def uncut_completion(llm: LLM, count: int = 24) -> tuple[str, tuple[int, ...]]:
    [result] = llm.generate(TEXT, SamplingParams(max_tokens=count, ignore_eos=True))
    return result.text, result.token_ids


def test_every_cut_of_a_real_completion(llm: LLM) -> None:
    """Stop strings of 1 to 7 characters at every position of a completion, in one batch."""
    text, ids = uncut_completion(llm)
    strings = [text[i : i + 1 + i % 7] for i in range(0, len(text) - 7, 2)]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, stop=string) for string in strings]
    for string, result in zip(strings, llm.generate([TEXT] * len(strings), params), strict=True):
        assert result.text == text[: text.index(string)]
        assert (result.finish_reason, result.stop_reason) == ("stop", string)
        assert result.token_ids == ids[: len(result.token_ids)]
        assert string in llm.tokenizer.decode(result.token_ids)
        assert string not in llm.tokenizer.decode(result.token_ids[:-1])
    assert not llm.engine.has_unfinished()
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.pool.num_referenced == 0


def test_streamed_text_never_takes_anything_back(llm: LLM) -> None:
    text, _ = uncut_completion(llm)
    string = text[20:31]
    chunks = list(
        llm.stream(TEXT, SamplingParams(max_tokens=24, ignore_eos=True, stop=[string, "never there"]))
    )
    out = ""
    for chunk in chunks:
        out += chunk.text
        assert text[: text.index(string)].startswith(out)
    assert out == text[: text.index(string)]
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "stop"]


def test_include_and_min_tokens(llm: LLM) -> None:
    text, ids = uncut_completion(llm)
    string = text[20:23]
    params = {"max_tokens": 24, "ignore_eos": True, "stop": [string]}
    [result] = llm.generate(TEXT, SamplingParams(include_stop_str_in_output=True, **params))  # type: ignore[arg-type]
    assert result.text == text[: text.index(string) + 3]
    least = len(result.token_ids)
    [early] = llm.generate(TEXT, SamplingParams(min_tokens=least - 1, **params))  # type: ignore[arg-type]
    assert early.token_ids == result.token_ids, (
        "the token that completes the string is the one behind min_tokens"
    )
    [late] = llm.generate(TEXT, SamplingParams(min_tokens=least, **params))  # type: ignore[arg-type]
    assert late.text == text if text.count(string) == 1 else len(late.token_ids) > least


def test_a_stop_string_that_the_end_completes(llm: LLM) -> None:
    """Text that was held back is emitted completely at the end."""
    text, _ = uncut_completion(llm)
    [result] = llm.generate(TEXT, SamplingParams(max_tokens=24, ignore_eos=True, stop=[text[-3:] + "more"]))
    assert result.text == text and result.finish_reason == "length" and result.stop_reason is None


def test_a_run_of_tokens_is_cut_at_the_token_that_completes_it(llm: LLM) -> None:
    """Several tokens in one output, as with speculative decoding."""
    ids = llm.tokenizer.encode("one two three four")
    params = SamplingParams(stop=["three"])
    chunk = TextOutput(0, 0, params, llm.tokenizer.stream()).push(
        RequestOutput("r", ids, FinishReason.LENGTH)
    )
    assert chunk.text == "one two " and chunk.finish_reason == "stop"
    decoded = llm.tokenizer.decode(chunk.token_ids)
    assert "three" in decoded and "four" not in decoded


def test_stop_token_ids_are_named(llm: LLM) -> None:
    _, ids = uncut_completion(llm)
    [result] = llm.generate(TEXT, SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=[ids[5]]))
    assert result.finish_reason == "stop" and result.stop_reason == ids[5]


def test_wishes_that_need_text_or_several_completions(llm: LLM) -> None:
    for params in (SamplingParams(stop=["a"]), SamplingParams(n=2)):
        with pytest.raises(UsageError, match="n and stop strings need LLM or AsyncEngine"):
            llm.engine.add_request("a", [1], params)
    for wrong in (5, [""], "", [1], b"a"):
        with pytest.raises(UsageError, match="stop must be"):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]
