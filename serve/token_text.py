"""The text and the bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from functools import cache

from gristmill.runtime.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in vocabularies of byte-level BPE (Radford et al., 2019, GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenTexts:
    """Bytes of tokens by id: a token may hold a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.token_id("Ġ") is not None
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; those of its name if it is a special one."""
        known = self._known.get(token)
        if known is None:
            if len(self._known) > 1 << 18:
                self._known.clear()
            known = self._known[token] = self._bytes(token)
        return known

    def text_of(self, token: int) -> str:
        """The bytes as text, with U+FFFD for what is no whole character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def name_of(self, token: int) -> str:
        """The bytes as text; where they are not whole characters, as OpenAI's completions write them (``bytes:\\xf0\\x9f``), so that candidates
        for the same place have different names."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.token(token)
        if name is None:
            return b""
        if self._byte_level:
            alphabet = _byte_alphabet()
            if all(character in alphabet for character in name):
                return bytes(alphabet[character] for character in name)
            return name.encode()
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        return name.replace("▁", " ").encode()


class TextOffsets:
    """Where tokens begin in the text that they make: a token that goes on with a character begins where the character does.

    Args:
        skip_special: special tokens are left out of the text.
        begin: characters before the first token.
        prompt: ids before the first token, as of `TextStream`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: TokenTexts,
        skip_special: bool,
        begin: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        self._texts, self._next = texts, begin
        self._stream = tokenizer.stream(skip_special, prompt)
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False

    def push(self, ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token in ids:
            found = b"" if token in self._skipped else self._bytes(token)
            if found and not 0x80 <= found[0] < 0xC0:  # no character goes on: what was begun is U+FFFD
                self._next += len(self._decoder.decode(b"", final=True))
            offsets.append(self._next)
            self._next += len(self._decoder.decode(found))
        return offsets

    def _bytes(self, token: int) -> bytes:
        found = self._texts.bytes_of(token)
        if not self._begun:
            self._begun = True
            # Decoders of SentencePiece's vocabularies drop the blank before the first word of a text.
            if found.startswith(b" ") and not self._stream.whole([token]).startswith(" "):
                return found[1:]
        return found
