"""The tokenizer in a GGUF file, as one of the `tokenizers` package.

========================  ==============================================================================================
tokenizer.ggml.model      ``gpt2``: byte-level BPE; ``llama``: SentencePiece's BPE, where scores order the merges; ``gemma4``: with merges
tokenizer.ggml.tokens     the vocabulary, in order of ids
tokenizer.ggml.merges     of gpt2 and gemma4: pairs to join, in order of priority, "left right"
tokenizer.ggml.scores     of llama: tokens with higher scores are joined first
tokenizer.ggml.token_type 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
tokenizer.ggml.pre        of gpt2: how text is split before merges: PRE
... .add_bos_token        whether bos_token_id goes before every text; absent: true for llama, gemma4 and llama-bpe
... .add_space_prefix     of llama: whether a space goes before every text; absent: true
========================  ==============================================================================================

Source: the key names of ggml's docs/gguf.md; llama.cpp's meaning of ``pre`` (llama-vocab.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.quant.errors import ConfigError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's character for a space."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
    r"\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WHOLE = ("llama-bpe", "llama3", "tekken", "gpt-4o", "llama4")
"""Pre-tokenizers of tokenizers in which a word that is a token is not split."""
PRE: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": "digits",
    "llama-bpe": _WORDS % "{1,3}",
    "llama3": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "glm4": _WORDS % "{1,3}",
    "chatglm-bpe": _WORDS % "{1,3}",
    "tekken": _CASES % ("", "", ""),
    "gpt-4o": _CASES % (_ENDS, _ENDS, "{1,3}"),
    "llama4": _CASES % (_ENDS, _ENDS, "{1,3}"),
    "minimax-m2": _CASES % (_ENDS, _ENDS, "{1,3}"),
}
"""Pre-tokenizers: GPT-2's expression (None), the same with single digits, or another expression."""


def gguf_tokenizer(fields: Mapping[str, Any], where: str) -> Any:
    """A `tokenizers.Tokenizer` of a file's ``tokenizer.*`` pairs. `where` is the file's name in messages.

    Raises:
        ConfigError: the file has none, one of an unsupported kind, or contradictory fields.
    """
    from tokenizers import AddedToken

    ggml = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in fields.items()
        if key.startswith("tokenizer.ggml.")
    }
    if "model" not in ggml:
        raise ConfigError(
            f"{where} holds no tokenizer, and there is no tokenizer.json beside it: pass prompts as lists of token ids"
        )
    kind, tokens = ggml["model"], _strings(ggml, "tokens", where)
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ConfigError(
            f"{where}: tokenizer.ggml.model {kind!r} is not read; known: gpt2, llama, gemma4; or a tokenizer.json beside it"
        )
    types = ggml.get("token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ConfigError(
            f"{where}: tokenizer.ggml.token_type must have {len(tokens)} entries, one for each token"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        if kind == "gpt2":
            backend = _byte_level(ggml, vocabulary, where)
        else:
            backend = _sentence_piece(ggml, vocabulary, types, where)
        backend.add_special_tokens(
            [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == CONTROL]
        )
        backend.add_tokens(
            [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == USER_DEFINED]
        )
        usual = kind != "gpt2" or ggml.get("pre") in ("llama-bpe", "llama3")
        if ggml.get("add_bos_token", usual):
            _put_bos(backend, ggml.get("bos_token_id"), tokens, where)
    except ConfigError:
        raise
    except Exception as error:  # the package raises plain Exception for inconsistent arguments
        raise ConfigError(f"{where}: its tokenizer contradicts itself: {error}") from error
    return backend


def _byte_level(ggml: Mapping[str, Any], vocabulary: Mapping[str, int], where: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = ggml.get("pre", "default")
    if pre not in PRE:
        raise ConfigError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not read; known: {', '.join(PRE)}; or a tokenizer.json beside it"
        )
    backend = Tokenizer(models.BPE(dict(vocabulary), _merges(ggml, where), ignore_merges=pre in WHOLE))
    expression = PRE[pre]
    octets = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression in (None, "digits"))
    if expression == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), octets]
    elif expression is not None:
        steps = [pre_tokenizers.Split(Regex(expression), "isolated"), octets]
    else:
        steps = [octets]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(ggml: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    halves = [merge.partition(" ") for merge in _strings(ggml, "merges", where)]
    if not all(space for _, space, _ in halves):
        raise ConfigError(
            f"{where}: tokenizer.ggml.merges must be pairs with a space between, got {ggml['merges'][:3]!r} ..."
        )
    return [(left, right) for left, _, right in halves]


def _sentence_piece(
    ggml: Mapping[str, Any], vocabulary: Mapping[str, int], types: Sequence[Any], where: str
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if ggml["model"] == "gemma4":
        merges = _merges(ggml, where)
    else:
        scores = ggml.get("scores")
        if not isinstance(scores, list) or len(scores) != len(types):
            raise ConfigError(
                f"{where}: tokenizer.ggml.scores must have {len(types)} entries, one for each token"
            )
        merges = merges_by_score(vocabulary, scores)
    unknown = next((token for token, i in vocabulary.items() if types[i] == UNKNOWN), None)
    backend = Tokenizer(
        models.BPE(
            dict(vocabulary),
            merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(ggml.get("add_space_prefix", ggml["model"] == "llama"))
    steps = [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *steps] if prefix else steps)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE: every pair that forms a token, tokens with higher scores first.

    SentencePiece joins the adjacent pair with the highest score (Kudo and Richardson, 2018), which is BPE with merges in
    this order.
    """
    merges = []
    for token, i in vocabulary.items():
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        halves = [
            (vocabulary[a], vocabulary[b], a, b) for a, b in cuts if a in vocabulary and b in vocabulary
        ]
        merges += [(-scores[i], i, *half) for half in sorted(halves)]
    return [(a, b) for *_, a, b in sorted(merges)]


def _put_bos(backend: Any, bos: Any, tokens: Sequence[str], where: str) -> None:
    from tokenizers import processors

    if not isinstance(bos, int) or not 0 <= bos < len(tokens):
        raise ConfigError(
            f"{where}: tokenizer.ggml.bos_token_id must be an id below {len(tokens)}, got {bos!r}"
        )
    special = {"id": "bos", "ids": [bos], "tokens": [tokens[bos]]}
    backend.post_processor = processors.TemplateProcessing(single=["bos", "$A"], special_tokens=[special])


def _strings(ggml: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = ggml.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise ConfigError(f"{where}: tokenizer.ggml.{name} must be a list of strings")
    return values
