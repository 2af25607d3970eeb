"""The token ids of texts for late interaction: prefixes, queries that are filled up with masks, tokens that do not count (ColBERT)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gristmill.runtime.errors import ConfigError
from gristmill.runtime.pooling.engine import PoolingInput
from gristmill.runtime.pooling.modules import LateInteraction
from gristmill.runtime.scheduler import RequestTooLarge
from gristmill.runtime.tokenizer import EncodedText, Tokenizer

Encode = Callable[[Sequence[str], bool, int], Sequence[EncodedText]]
"""`PoolingFront.encode`: texts, whether longer ones are cut, and to what."""
MASKS = ("[MASK]", "<mask>")
"""Mask tokens of encoders."""


class LateTexts:
    """Texts as token ids, of queries and of documents.

    Args:
        longest: tokens that the model takes.
        origin: of the model, for messages.

    Raises:
        ConfigError: the tokenizer lacks a token that `late` names.
    """

    def __init__(self, late: LateInteraction, tokenizer: Tokenizer, longest: int, origin: str) -> None:
        self.late, self.origin = late, origin
        self._prefixes = [self._id(tokenizer, text) for text in (late.document_prefix, late.query_prefix)]
        self._lengths = [min(length, longest) for length in (late.document_length, late.query_length)]
        self._mask = next((found for name in MASKS if (found := tokenizer.token_id(name)) is not None), None)
        if late.expand and self._mask is None:
            raise ConfigError(
                f"{origin}: queries are filled up with the mask token, of {', '.join(MASKS)}, and there is none"
            )
        self._skipped = {tokenizer.token_id(word) for word in late.skipped}

    def _id(self, tokenizer: Tokenizer, prefix: str) -> int | None:
        found = tokenizer.token_id(prefix)
        if prefix and found is None:
            raise ConfigError(f"{self.origin}: the prefix {prefix!r} is no token of its tokenizer")
        return found if prefix else None

    def inputs(self, encode: Encode, texts: Sequence[str], asks: bool, truncate: bool) -> list[PoolingInput]:
        """What the engine computes for queries (`asks`) or documents, which `encode` tokenizes. RequestTooLarge, unless `truncate`, for what is
        longer than these may be."""
        prefix, length = self._prefixes[asks], self._lengths[asks]
        room = length - (prefix is not None)
        return [self._input(ids, prefix, room, asks) for ids, _ in encode(texts, truncate, room)]

    def _input(self, ids: list[int], prefix: int | None, room: int, asks: bool) -> PoolingInput:
        if len(ids) > room:
            kind = "query" if asks else "document"
            raise RequestTooLarge(
                f"a {kind} of {len(ids)} tokens is longer than {room}, which {self.origin} takes: cut it (truncate=True)"
            )
        fill = (
            [self._mask] * (room - len(ids)) if asks and self.late.expand and self._mask is not None else []
        )
        made = [*ids[:1], *([] if prefix is None else [prefix]), *ids[1:], *fill]
        return PoolingInput(made, seen=len(made) - len(fill) if fill and not self.late.attend else None)

    def vectors(self, given: PoolingInput, result: Tensor, asks: bool) -> Tensor:
        """The rows of a result [tokens, columns] that count: those of a document without skipped tokens."""
        if asks:
            return result
        return result[[index for index, token in enumerate(given.ids) if token not in self._skipped]]
