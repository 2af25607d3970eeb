"""The tokenizers of GGUF files: ids and text are those of a tokenizer.json, or of SentencePiece's definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.quant.checkpoints.gguf_tokenizer import PRE, SPACE, gguf_tokenizer
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.tokenizer import Tokenizer
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.test_tekken import PATTERN


def byte_level() -> dict[str, Any]:
    """The example model's tokenizer as key-value pairs; ggml calls its pre-tokenizer smollm."""
    data = json.loads((MODELS / LLAMA / "tokenizer.json").read_text())
    vocabulary = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in data["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "smollm",
        "tokenizer__ggml__tokens": [t for t, _ in vocabulary],
        "tokenizer__ggml__token_type": [3 if i in special else 1 for _, i in vocabulary],
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__eos_token_id": 1,
        "tokenizer__ggml__bos_token_id": 0,
    }


def fields(**changes: Any) -> dict[str, Any]:
    return {
        key.replace("__", "."): value
        for key, value in {**byte_level(), **changes}.items()
        if value is not None
    }


TEXTS = (
    "The index of 1234 tables",
    "  two  spaces\n\n\ttab",
    "naïve café ☕ 中文",
    "it's we'll <|eos|> end",
    "",
)


def test_byte_level_ids_are_those_of_tokenizer_json() -> None:
    actual, reference = gguf_tokenizer(fields(), "m.gguf"), Tokenizer(MODELS / LLAMA)
    for text in TEXTS:
        assert actual.encode(text).ids == reference.encode(text)
        assert actual.decode(reference.encode(text), skip_special_tokens=True) == reference.decode(
            reference.encode(text)
        )
    merges = byte_level()["tokenizer__ggml__merges"][::-1]
    # Planted fault: the last merges first.
    other = gguf_tokenizer(fields(tokenizer__ggml__merges=merges), "m.gguf")
    assert any(other.encode(text).ids != reference.encode(text) for text in TEXTS)
    bos = gguf_tokenizer(fields(tokenizer__ggml__add_bos_token=True), "m.gguf")
    assert bos.encode("The").ids == [0, *reference.encode("The")]


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "ĠWE", "'", "LL", "Ġ:=", "ĊĠĠ", "Ġx"]),
        ("smollm", ["It", "'s", "Ġ", *"12345", "ĠWE", "'", "LL", "Ġ:=", "ĊĠĠ", "Ġx"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("qwen2", ["It", "'s", "Ġ", *"12345", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("glm4", ["It", "'s", "Ġ", "123", "45", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("chatglm-bpe", ["It", "'s", "Ġ", "123", "45", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("tekken", ["It", "'s", "Ġ", *"12345", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("gpt-4o", ["It's", "Ġ", "123", "45", "ĠWE'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("minimax-m2", ["It's", "Ġ", "123", "45", "ĠWE'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("llama4", ["It's", "Ġ", "123", "45", "ĠWE'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
    ],
)
def test_how_text_is_cut(pre: str, parts: list[str]) -> None:
    """Compares with results worked out by hand from the models' regular expressions."""
    cut = gguf_tokenizer(fields(tokenizer__ggml__pre=pre), "m.gguf").pre_tokenizer.pre_tokenize_str(
        "It's 12345 WE'LL :=\n   x"
    )
    assert [part for part, _ in cut] == parts


def test_how_words_of_two_cases_are_cut() -> None:
    """Mistral's expression, as its files have it."""
    assert PRE["tekken"] == PATTERN
    cut = gguf_tokenizer(fields(tokenizer__ggml__pre="tekken"), "m.gguf").pre_tokenizer
    given = "camelCase HTTPServer/path ÉTÉ中文x\r\n// Ǆungla"
    parts = ["camel", "Case", " HTTPServer", "/path", " ÉTÉ中文x", "\r\n", "//", " Ǆungla"]
    assert [given[begin:end] for _, (begin, end) in cut.pre_tokenize_str(given)] == parts


def pieces() -> tuple[list[str], list[float], list[int]]:
    """Returns a vocabulary as SentencePiece writes it: control tokens, bytes, characters and merges, with
    scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [2, 3, 3, *([6] * 256)]
    words = [
        SPACE,
        *"abcdehlort",
        "he",
        "ll",
        "lo",
        "hel",
        "llo",
        "hello",
        SPACE + "h",
        SPACE + "t",
        SPACE + "the",
        "th",
        "the",
        "or",
        "ld",
    ]
    scores = (
        [0.0] * len(tokens) + [-100.0] * 11 + [-float(3 * i % 13) - i / 50 for i in range(len(words) - 11)]
    )
    return tokens + words, scores, kinds + [1] * len(words)


def by_definition(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Applies SentencePiece's BPE by its definition: merge the neighbours with the highest score, the
    leftmost first."""
    rank = {token: i for i, token in enumerate(tokens)}
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        joins = [
            (-scores[rank[a + b]], at)
            for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in rank
        ]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [rank[part]] if part in rank else [rank[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_the_tokenizer_of_gemma_4_has_merges(tmp_path: Path) -> None:
    """SentencePiece's text, BPE in the order of the file: ids and text of a tokenizer.json as Gemma's are."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = ["<pad>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|tool_call>"]
    merges = ["t h", "th e", f"{SPACE} the", "h e", "l l", "he ll", "hell o", f"{SPACE} {SPACE}"]
    tokens += [*dict.fromkeys([SPACE, *"abcdehlortw", *(merge.replace(" ", "") for merge in merges)])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    reference = Tokenizer(models.BPE(vocabulary, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    reference.normalizer = normalizers.Replace(" ", SPACE)
    reference.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": [3, 3, 2] + [6] * 256 + [4] + [1] * (len(tokens) - 260),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = gguf_tokenizer(metadata, "m.gguf")
    generator = np.random.default_rng(0)
    for text in [
        "hello the world",
        "the  hello",
        "é the",
        *("".join(generator.choice(list("abcdehlort ☕"), 24)) for _ in range(60)),
    ]:
        assert tokenizer.encode(text).ids == [1, *reference.encode(text).ids], text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    assert vocabulary["<|tool_call>"] in tokenizer.encode("a<|tool_call>b").ids
    # Planted fault: another order of merges.
    turned = gguf_tokenizer(metadata | {"tokenizer.ggml.merges": merges[::-1]}, "m.gguf")
    assert turned.encode("hello the").ids != tokenizer.encode("hello the").ids
    with pytest.raises(ConfigError, match="merges must be a list"):
        gguf_tokenizer({key: value for key, value in metadata.items() if "merges" not in key}, "m.gguf")


def test_sentence_piece_ids_are_those_of_the_definition() -> None:
    tokens, scores, kinds = pieces()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = gguf_tokenizer(metadata, "m.gguf")
    generator = np.random.default_rng(0)
    for text in [
        "hello the world",
        "the hello",
        "é the",
        *("".join(generator.choice(list("abcdehlort ☕"), 24)) for _ in range(60)),
    ]:
        assert tokenizer.encode(text).ids == [1, *by_definition(text, tokens, scores)], text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    # Planted fault: the lowest score first.
    turned = gguf_tokenizer(metadata | {"tokenizer.ggml.scores": [-s for s in scores]}, "m.gguf")
    assert turned.encode("hello the world").ids != tokenizer.encode("hello the world").ids
    bare = gguf_tokenizer(
        metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, "m.gguf"
    )
    assert (
        tokens[bare.encode("the hello").ids[0]] == "the"
        and bare.decode(bare.encode("the hello").ids) == "the hello"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer__ggml__model": None},
            "m.gguf holds no tokenizer, and there is no tokenizer.json beside it",
        ),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not read; known: gpt2, llama"),
        ({"tokenizer__ggml__pre": "deepseek-v3"}, "pre 'deepseek-v3' is not read; known: default, gpt-2"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokens must be a list of strings"),
        ({"tokenizer__ggml__token_type": [1]}, "token_type must have 4096 entries"),
        ({"tokenizer__ggml__merges": ["a"]}, "merges must be pairs with a space between"),
        ({"tokenizer__ggml__merges": ["qqq zzz"]}, "its tokenizer contradicts itself"),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 5000},
            "bos_token_id must be an id below 4096",
        ),
        ({"tokenizer__ggml__model": "llama"}, "scores must have 4096 entries"),
    ],
)
def test_tokenizers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gguf_tokenizer(fields(**changes), "m.gguf")
