"""Mistral's tokenizer, ``tekken.json``, as one of the `tokenizers` package.

The file is byte pair encoding in tiktoken's form: an expression that cuts text into pieces, and the bytes of each token in order of rank. In a
piece, the neighbours whose bytes together have the lowest rank are joined, the leftmost first, until none have one; a piece that is a token
stays whole. The ids from 0 on are those of special tokens, and the token of rank r has the id after them plus r.

===============================================  ================================================================================
config.pattern                                   the expression
config.default_vocab_size                        ids of the model; further tokens of the vocabulary are not used
config.default_num_special_tokens                special tokens, those without a name being ``<SPECIAL_i>``
config.version                                   of the tokenizer: v3, v7, v11, v13 ...
vocab                                            {rank, token_bytes (base64), token_str}, the 256 bytes first
special_tokens                                   {rank, token_str, is_control}; files up to v7 without it have `FIRST_SPECIAL`
===============================================  ================================================================================

A pair of tokens is a merge of the `tokenizers` package where its bytes are a token, so that the pairs in the order of that token's rank are the
joins above. Where one token can be made at two places that overlap, the package cannot be told to prefer the left one: of the pairs that make
one token, that with the longest left part comes first. On 180,000 texts, all pairs of the same token among them, ids of Mistral's two files were
those of tiktoken.

Text of special tokens is read as these tokens, as templates of conversations need it, and ``<s>`` is put before a prompt, as Mistral does.
Sources: the layout of the file and its special tokens, Mistral's mistral-common (tekken.py); the algorithm, tiktoken.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.errors import ConfigError
from gristmill.quant.formats.contract import Fields

FILE = "tekken.json"
MAX_BYTES = 64 << 20
"""The largest file; Mistral's have up to 20 MB."""
MAX_TOKEN = 512
"""The most bytes of a token; those of Mistral's have up to 76."""
MAX_SPECIAL = 1 << 16
BOS, EOS = "<s>", "</s>"
TOKENS = {"bos_token": BOS, "eos_token": EOS}
"""Texts of special tokens by the names that templates of conversations know them by."""
FIRST_SPECIAL = (
    *(
        "<unk>",
        BOS,
        EOS,
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    *(
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
        "[SYSTEM_PROMPT]",
    ),
    *("[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens of files that do not list them."""


class TekkenFields(Fields):
    """Entries of the file; errors are ConfigErrors."""

    error = ConfigError


def tekken_tokenizer(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a tekken.json.

    Raises:
        ConfigError: the file cannot be read, contradicts itself, or is of a kind that is not read.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    data = read_json(path, MAX_BYTES)
    config = TekkenFields(data.get("config"), f"{path}: config")
    special = special_tokens(data, config)
    count = config.get("default_vocab_size", int, least=len(special) + 256) - len(special)
    tokens = _vocabulary(data.get("vocab"), count, str(path))
    ids = {token: len(special) + rank for rank, token in enumerate(tokens)}
    for number, text in enumerate(special):
        if text in ids:
            raise ConfigError(f"{path}: {text!r} is a special token and a token of the vocabulary")
        ids[text] = number
    pattern = config.get("pattern", str)
    try:
        backend = Tokenizer(models.BPE(ids, [*merges(tokens)], ignore_merges=True))
        cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        octets = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([cut, octets])
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        if BOS in special:
            begin = {"id": BOS, "ids": [special.index(BOS)], "tokens": [BOS]}
            backend.post_processor = processors.TemplateProcessing(
                single=[BOS, "$A"], pair=[BOS, "$A", "$B:1"], special_tokens=[begin]
            )
    except Exception as error:  # the package raises plain Exception, as for an expression that is none
        raise ConfigError(f"{path} contradicts itself: {error}") from error
    return backend


def special_tokens(data: Mapping[str, Any], config: TekkenFields) -> list[str]:
    """The texts of the special tokens, in the order of their ids."""
    path, listed = config.origin, data.get("special_tokens")
    count: int = config.get("default_num_special_tokens", int, least=1)
    if listed is None:
        version = config.get("version", str)
        if version not in ("v1", "v2", "v3", "v7"):
            raise ConfigError(
                f"{path}: version {version!r} lists its special tokens, and there is no entry special_tokens"
            )
        texts = list(FIRST_SPECIAL)
    elif isinstance(listed, list):
        entries = [TekkenFields(entry, f"{path}: special_tokens[{i}]") for i, entry in enumerate(listed)]
        ranks = [entry.get("rank", int) for entry in entries]
        if sorted(ranks) != list(range(len(ranks))):
            raise ConfigError(f"{path}: ranks of special_tokens must be 0 to {len(ranks) - 1}, each once")
        texts = [
            text for _, text in sorted(zip(ranks, (e.get("token_str", str) for e in entries), strict=True))
        ]
    else:
        raise ConfigError(f"{path}: special_tokens must be a list, got {type(listed).__name__}")
    if not len(texts) <= count <= MAX_SPECIAL:
        raise ConfigError(
            f"{path}: default_num_special_tokens must be {len(texts)}, the special tokens that are listed, to {MAX_SPECIAL}, got {count}"
        )
    texts += [f"<SPECIAL_{i}>" for i in range(len(texts), count)]
    if len(set(texts)) != count or "" in texts:
        raise ConfigError(f"{path}: special tokens must be different texts")
    return texts


def merges(tokens: Collection[str]) -> Iterator[tuple[str, str]]:
    """The pairs of tokens that make a token, in the order of tokens, which is that of their ranks."""
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in tokens and token[cut:] in tokens:
                yield token[:cut], token[cut:]


def _vocabulary(entries: Any, count: int, path: str) -> dict[str, None]:
    """The first `count` tokens, in order, with a letter for each byte."""
    if not isinstance(entries, list) or len(entries) < count:
        found = len(entries) if isinstance(entries, list) else type(entries).__name__
        raise ConfigError(
            f"{path}: vocab must be a list of at least {count} tokens, as config says, got {found}"
        )
    tokens: dict[str, None] = {}
    letters = _letters()
    for rank, entry in enumerate(entries[:count]):
        fields = TekkenFields(entry, f"{path}: vocab[{rank}]")
        if fields.get("rank", int) != rank:
            raise ConfigError(f"{fields.origin}: its rank must be its place, got {fields.data['rank']}")
        try:
            token = base64.b64decode(fields.get("token_bytes", str), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{fields.origin}: token_bytes is not base64: {error}") from error
        text = token.decode("latin-1").translate(letters)
        if not 1 <= len(token) <= MAX_TOKEN or text in tokens or (rank < 256 and token != bytes([rank])):
            expected = f"the byte {rank}" if rank < 256 else f"1 to {MAX_TOKEN} bytes, unlike those before it"
            raise ConfigError(f"{fields.origin}: a token must be {expected}, got {token[:40]!r}")
        tokens[text] = None
    return tokens


def _letters() -> dict[int, int]:
    """Byte -> the character that stands for it in byte-level vocabularies (GPT-2): itself where it is printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: byte if byte in printable else next(others) for byte in range(256)}
