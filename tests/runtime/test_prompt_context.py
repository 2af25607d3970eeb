"""The text of a completion goes on from its prompt's, where decoders drop the blank before the first word of a text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.serve.token_text import TextOffsets, TokenTexts
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.serving import collect, run

WORDS = ["<unk>", "<s>", "▁The", "▁quick", "▁brown", "fox", "▁", "[/INST]"]
BOS, THE, QUICK, BROWN, FOX, BLANK, END = range(1, 8)
FIRST_BYTE = len(WORDS)
EURO = [FIRST_BYTE + byte for byte in "€".encode()]
PROMPT = [BOS, THE, QUICK]
DECODERS: dict[str, Callable[[], Any]] = {
    "metaspace": lambda: decoders.Metaspace(prepend_scheme="first"),
    "llama 2": lambda: decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
}


def written(folder: Path, decoder: str) -> Path:
    """A directory with the tokenizer."""
    vocabulary = {token: number for number, token in enumerate(WORDS)}
    vocabulary |= {f"<0x{byte:02X}>": FIRST_BYTE + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = DECODERS[decoder]()
    backend.add_special_tokens(["<s>", "[/INST]"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary of Llama 2's kind."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(MODELS / LLAMA, folder, dirs_exist_ok=True)
    return written(folder, "llama 2")


CASES: dict[str, tuple[list[int], list[int], bool, str]] = {
    "a word": (PROMPT, [BROWN, FOX, QUICK], True, " brownfox quick"),
    "a part of a word": (PROMPT, [FOX, BROWN], True, "fox brown"),
    "a blank": (PROMPT, [BLANK, BROWN], True, "  brown"),
    "a long prompt": ([THE] * 3000, [BROWN], True, " brown"),
    "no prompt": ([], [BROWN, QUICK], True, "brown quick"),
    "nothing but a special token": ([BOS], [BROWN, QUICK], True, "brown quick"),
    "a special token that is shown": ([BOS], [BROWN], False, " brown"),
    "special tokens after text": ([BOS, THE, *[END] * 6], [BROWN], True, " brown"),
    "a special token before the first word": (PROMPT, [BOS, BROWN], True, " brown"),
    "no tokens": (PROMPT, [], True, ""),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("case", CASES)
def test_text_goes_on_from_its_prompt(tmp_path: Path, decoder: str, case: str) -> None:
    """Whole and streamed."""
    tokenizer = Tokenizer(written(tmp_path, decoder))
    prompt, ids, skip, text = CASES[case]
    stream = tokenizer.stream(skip, prompt)
    assert stream.whole(ids) == text
    assert "".join([*(stream.push([token]) for token in ids), stream.finish()]) == text


def test_a_prompt_may_end_or_be_cut_within_a_character(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    for prompt in ([THE, *EURO, *EURO], [THE, *EURO[1:], THE, QUICK], [THE, *EURO * 3]):
        stream = tokenizer.stream(True, prompt)
        assert stream.whole([BROWN, *EURO]) == " brown€"
        assert "".join([stream.push([token]) for token in [BROWN, *EURO]]) == " brown€"
    assert tokenizer.stream(True, [THE, *EURO[:2]]).whole([BROWN]) == "brown", "its text has no end"


def test_completions_go_on_from_their_prompt(folder: Path) -> None:
    """As a list, in chunks, from an asynchronous engine, and up to a stop string."""
    llm = LLM(folder, device="cpu")
    params = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[BROWN])
    stopped = SamplingParams(max_tokens=3, ignore_eos=True, allowed_token_ids=[BROWN], stop=["n b"])
    brown = " brown" * 3
    assert [one.text for one in llm.generate([PROMPT, [BOS]], params)] == [brown, brown[1:]]
    assert "".join(chunk.text for chunk in llm.stream([PROMPT], params)) == brown
    assert llm.generate([PROMPT], stopped)[0].text == " brow"

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            assert [one.text for one in await engine.generate(PROMPT, params)] == [brown]
            assert "".join(chunk.text for chunk in await collect(engine, PROMPT, params)) == brown
            assert "".join(chunk.text for chunk in await collect(engine, PROMPT, stopped)) == " brow"

    run(main())


def test_tokens_begin_where_the_text_has_them(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    texts = TokenTexts(tokenizer)
    for prompt, begins in ((PROMPT, [0, 6, 9]), ([BOS], [0, 5, 8])):
        assert TextOffsets(tokenizer, texts, True, prompt=prompt).push([BROWN, FOX, QUICK]) == begins
