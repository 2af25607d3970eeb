"""The text and the bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import re
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
