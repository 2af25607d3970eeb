"""Mistral's tekken.json: ids are those of byte pair encoding by its definition, and of transformers' own reading of such files."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import regex

from gristmill.quant.checkpoints import tekken
from gristmill.quant.checkpoints.tekken import tekken_tokenizer
from gristmill.runtime.chat import Chat, Message
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer
from tests.runtime.family_cases import VOCABULARY, build
from tests.runtime.test_native import write

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The expression of Mistral's files."""
TEXT = (
    "The quick brown fox jumps over the lazy dog; the other foxes there bother them further. Là-bas, l'été et les élèves, "
    "aaaaaaaaaaa   bananabanana 中文字中文字 的的的 \n\n\n    return the_value == other_value  # the value\n"
    + (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text(encoding="utf-8")[:6000]
)
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]


@cache
def learned(count: int) -> list[bytes]:
    """The bytes, and `count` tokens by the most frequent neighbours of a text, as such vocabularies are made."""
    tokens = [bytes([byte]) for byte in range(256)]
    pieces = [[bytes([byte]) for byte in piece.encode()] for piece in regex.findall(PATTERN, TEXT)]
    for _ in range(count):
        pairs = Counter(pair for piece in pieces for pair in zip(piece, piece[1:], strict=False))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        tokens.append(left + right)
        for piece in pieces:
            at = 0
            while at < len(piece) - 1:
                if (piece[at], piece[at + 1]) == (left, right):
                    piece[at : at + 2] = [left + right]
                at += 1
    return [*dict.fromkeys(tokens)]


def contents(count: int = 150, used: int = 120, special: int = 20, **changes: Any) -> dict[str, Any]:
    """A file with `count` tokens after the bytes, of which `used` are the model's, and room for `special` tokens."""
    tokens = learned(count)
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": special + 256 + used,
        "default_num_special_tokens": special,
        "version": "v11",
    }
    listed = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)]
    return {"config": config, "vocab": vocab, "special_tokens": listed} | changes


def saved(folder: Path, data: Mapping[str, Any]) -> Path:
    path = folder / "tekken.json"
    path.write_text(json.dumps(data))
    return path


def by_definition(text: str, data: Mapping[str, Any]) -> list[int]:
    """Joins the neighbours of the lowest rank, the leftmost first, in each piece of the text."""
    special, size = (data["config"][f"default_{name}"] for name in ("num_special_tokens", "vocab_size"))
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in data["vocab"][: size - special]}
    ids = []
    for piece in regex.findall(data["config"]["pattern"], text):
        parts = [piece.encode()] if piece.encode() in ranks else [bytes([b]) for b in piece.encode()]
        while joins := [
            (ranks[a + b], at)
            for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in ranks
        ]:
            at = min(joins)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [special + ranks[part] for part in parts]
    return ids


def texts() -> list[str]:
    rng = random.Random(4)
    alphabets = (
        "ab",
        "an b",
        "the ",
        " \n\t",
        "0123 4",
        "éàl' ",
        "中文字的 ",
        "Tt hE",
        "=_#",
        TEXT,
        "👍🏽e\u0301x\x00",
    )
    made = ["".join(rng.choice(a) for _ in range(rng.randint(0, 40))) for a in alphabets for _ in range(60)]
    return [TEXT, *(letter * n for letter in "a bn=" for n in range(1, 30)), *made]


def test_ids_are_those_of_the_definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = contents()
    path = saved(tmp_path, data)
    backend = tekken_tokenizer(path)
    expected = [by_definition(text, data) for text in texts()]
    assert [backend.encode(text, add_special_tokens=False).ids for text in texts()] == expected
    assert (
        max(map(max, filter(None, expected))) > 20 + 256 + 100 and backend.get_vocab_size() == 20 + 256 + 120
    )
    for text, ids in zip(texts(), expected, strict=True):
        assert backend.decode(ids) == text
    # Planted faults: the last joins first; a vocabulary with the tokens that the model does not have.
    right = tekken.merges
    monkeypatch.setattr(tekken, "merges", lambda tokens: reversed([*right(tokens)]))
    other = tekken_tokenizer(path)
    assert [other.encode(text, add_special_tokens=False).ids for text in texts()] != expected
    monkeypatch.undo()
    data["config"]["default_vocab_size"] += 30
    longer = tekken_tokenizer(saved(tmp_path, data))
    assert [longer.encode(text, add_special_tokens=False).ids for text in texts()] != expected


@pytest.mark.parametrize("listed", [True, False])
def test_as_transformers_reads_it(listed: bool, tmp_path: Path) -> None:
    """It reads files that list their special tokens; of the others, which are Mistral's first, ids are pinned."""
    from transformers.integrations.mistral.tokenizer import MistralConverter

    data = contents()
    path = saved(tmp_path, data)
    theirs = MistralConverter(str(path)).converted()
    given = [*texts(), "<s>[INST] the fox [/INST]</s><SPECIAL_7> <s", " <pad> "]
    if not listed:
        del data["special_tokens"]
        data["config"]["version"] = "v3"
        saved(tmp_path, data)
    ours = tekken_tokenizer(path)
    if listed:
        assert ours.get_vocab() == theirs.get_vocab()
        for text in given:
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text).ids
            ids = theirs.encode(text).ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )
    else:
        names = {
            "<unk>": 0,
            "<s>": 1,
            "</s>": 2,
            "[INST]": 3,
            "[TOOL_CALLS]": 9,
            "<pad>": 11,
            "[TOOL_CONTENT]": 19,
        }
        assert {name: ours.token_to_id(name) for name in names} == names
    assert ours.encode("the").ids == [1, *ours.encode("the", add_special_tokens=False).ids]
    pair = [1, *(i for word in ("the", "fox") for i in ours.encode(word, add_special_tokens=False).ids)]
    assert ours.encode("the", "fox").ids == pair


def changed(name: str, **entries: Any) -> dict[str, Any]:
    """The file with entries of an object changed; None = left out."""
    data = contents()
    merged = {**data[name], **entries} if name else {**data, **entries}
    merged = {key: value for key, value in merged.items() if value is not None}
    return {**data, name: merged} if name else merged


def at(place: int, /, **entries: Any) -> dict[str, Any]:
    """The file with entries of a token changed."""
    data = contents()
    data["vocab"][place] |= entries
    return data


TWICE = base64.b64encode(b"th").decode()
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({}, "config must be an object, got None"),
    (changed("config", pattern=None), "config: entry 'pattern' is missing"),
    (changed("config", pattern="(a"), "contradicts itself: "),
    (changed("config", default_vocab_size=200), "'default_vocab_size' must be at least 276"),
    (
        changed("config", default_vocab_size=5000),
        "vocab must be a list of at least 4980 tokens, as config says, got",
    ),
    (
        changed("config", default_num_special_tokens=5),
        "must be 6, the special tokens that are listed, to 65536, got 5",
    ),
    (changed("", vocab={"a": 1}), "vocab must be a list of at least 376 tokens, as config says, got dict"),
    (
        changed("", special_tokens=None),
        "version 'v11' lists its special tokens, and there is no entry special_tokens",
    ),
    (changed("", special_tokens="<s>"), "special_tokens must be a list, got str"),
    (changed("", special_tokens=[{"rank": 1, "token_str": "<s>"}]), "ranks of special_tokens must be 0 to 0"),
    (
        changed("", special_tokens=[{"rank": 0, "token_str": "<SPECIAL_1>"}]),
        "special tokens must be different texts",
    ),
    (
        changed("", special_tokens=[{"rank": 0, "token_str": "a"}]),
        "'a' is a special token and a token of the vocab",
    ),
    (at(300, rank=301), r"vocab\[300\]: its rank must be its place, got 301"),
    (at(300, token_bytes="!!"), r"vocab\[300\]: token_bytes is not base64"),
    (at(300, token_bytes=None), r"vocab\[300\]: entry 'token_bytes' is missing"),
    (
        at(300, token_bytes=""),
        r"vocab\[300\]: a token must be 1 to 512 bytes, unlike those before it, got b''",
    ),
    (at(300, token_bytes=base64.b64encode(b"x" * 513).decode()), "must be 1 to 512 bytes"),
    (at(370, token_bytes=base64.b64encode(b"a").decode()), "unlike those before it, got b'a'"),
    (at(65, token_bytes=TWICE), r"vocab\[65\]: a token must be the byte 65, got b'th'"),
]


@pytest.mark.parametrize(("data", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_malformed_files(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tekken_tokenizer(saved(tmp_path, data))


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tekken.json"
    with pytest.raises(ConfigError, match=r"cannot read .*tekken\.json"):
        tekken_tokenizer(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, got list"):
        tekken_tokenizer(path)
    monkeypatch.setattr(tekken, "MAX_BYTES", 2)
    with pytest.raises(ConfigError, match="has more than 2 bytes"):
        tekken_tokenizer(path)


@pytest.mark.parametrize("layout", ["params.json", "config.json"])
def test_prompts_are_text(layout: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Mistral's own directories, and those of Hugging Face without a tokenizer.json."""
    model, folder = build("mistral", tmp_path / "plain"), tmp_path / "plain"
    if layout == "params.json":
        folder = write(model, tmp_path / "native")
    data = contents(count=30, used=VOCABULARY - 276)
    saved(folder, data)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    llm = make(folder)
    done = llm.generate("the fox", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))[0]
    assert [*done.prompt_ids] == [1, *by_definition("the fox", data)] and len(done.token_ids) == 5
    tokenizer = Tokenizer(folder)
    assert done.text == tokenizer.decode(done.token_ids)
    ids = Chat(folder, tokenizer).encode([Message("user", "the fox")])
    assert ids == [1, 3, *by_definition("the fox", data), 4]
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match="config must be an object"):
        Tokenizer(folder)
