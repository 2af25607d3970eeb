"""Text to token ids and back, by the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.config import open_checkpoint

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONG_TEXT = 4096
"""Characters, or ids, from which the backend's batches are used: they let other threads run meanwhile, single texts do not."""


SHORT_CONTEXT, LONG_CONTEXT = 4, 24
"""The fewest and the most last ids of a prompt that are decoded with what follows it."""


def require_unicode(*texts: str) -> None:
    """UsageError: a text has half of a surrogate pair, which no encoding of Unicode has: mostly bytes that were no UTF-8 when they were read."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"a text must be Unicode, and has half of a surrogate pair ({text[error.start]!a}) at character {error.start}: "
                "was it read from bytes that are not UTF-8?"
            ) from error


class EncodedText(NamedTuple):
    """Ids of a text or a pair of texts, and the token type of each; None = all 0."""

    ids: list[int]
    types: list[int] | None


class Tokenizer:
    """The tokenizer of a model: tokenizer.json of its directory, else its tekken.json; next to a GGUF file, else the one in that file.

    Raises:
        ConfigError: it cannot be read; its subclass NoTokenizerError: there is none.
    """

    def __init__(self, model: str | Path | Checkpoint) -> None:
        self._backend = open_checkpoint(model).tokenizer()
        # A tokenizer.json may say to cut and pad every text, as the program that wrote it did.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._cutting: dict[int, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, including those that the tokenizer's post-processor adds, if they are wanted. UsageError: `require_unicode`."""
        require_unicode(text)
        if len(text) < LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_inputs(
        self, inputs: Sequence[str | tuple[str, str]], limit: int | None = None
    ) -> list[EncodedText]:
        """Texts, or pairs of texts, with what the post-processor adds.

        Args:
            limit: cut what is longer to so many ids, of a pair the longer text first; the post-processor's ids are kept. None = as it is.

        Raises:
            UsageError: `require_unicode`.
        """
        for one in inputs:
            require_unicode(*(one if isinstance(one, tuple) else (one,)))
        encodings = self._backend_of(limit).encode_batch_fast(list(inputs))
        return [EncodedText(e.ids, e.type_ids if any(e.type_ids) else None) for e in encodings]

    def _backend_of(self, limit: int | None) -> Any:
        """The tokenizer that cuts at `limit`: another one, as other threads use this one at the same time."""
        if limit is None:
            return self._backend
        if limit not in self._cutting:
            backend = type(self._backend).from_str(self._backend.to_str())
            backend.enable_truncation(limit)
            self._cutting[limit] = backend
        return self._cutting[limit]

    def token(self, token_id: int) -> str | None:
        """The token with this id, as the vocabulary has it; None if there is none."""
        text: str | None = self._backend.id_to_token(token_id)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary; None if there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def words(self, text: str) -> list[list[int]]:
        """The ids of a text inside a word and, if they differ, after a space, without the post-processor. UsageError: `require_unicode`."""
        require_unicode(text)
        variants: list[list[int]] = []
        for place in (text, " " + text.lstrip()):
            ids: list[int] = self._backend.encode(place, add_special_tokens=False).ids
            if ids and ids not in variants:
                variants.append(ids)
        return variants

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, without special tokens unless they are wanted."""
        text: str
        if len(ids) < LONG_TEXT:
            text = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> TextStream:
        """A fresh incremental decoder of what follows the ids of a prompt."""
        return TextStream(self, skip_special_tokens, prompt)

    @cached_property
    def _is_byte_level(self) -> bool:
        from tokenizers.decoders import ByteLevel

        return isinstance(self._backend.decoder, ByteLevel)

    def context(self, prompt: Sequence[int], skip_special_tokens: bool = True) -> tuple[list[int], str]:
        """The last ids of a prompt, as few as have a text that ends with a whole character, and that text; ([], "") if there are none, or
        no text depends on what is before it."""
        if self._is_byte_level:
            return [], ""
        for count in range(min(SHORT_CONTEXT, len(prompt)), min(LONG_CONTEXT, len(prompt)) + 1):
            ids = list(prompt[len(prompt) - count :])
            text = self.decode(ids, skip_special_tokens)
            if text and not text.endswith(UNFINISHED):
                return ids, text
        return [], ""


class TextStream:
    """Decodes ids as they come, in pieces that never cut a character; joined, they are `decode` of all the ids.

    Each piece is the difference of two decodings of the last few ids: an id's text can depend on the one before it. Of the first id that is the
    prompt's last: decoders of SentencePiece's vocabularies drop the blank before the first word.

    Args:
        prompt: ids before the first one. They are decoded with the first output, when the engine has checked them.
    """

    __slots__ = ("_ids", "_known", "_prompt", "_skip", "_text", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._prompt = prompt[-LONG_CONTEXT:]
        self._ids: list[int] = []
        self._known = 0  # leading ids of the window whose text was returned
        self._text = ""  # their text

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all ids at once."""
        context, before = self._tokenizer.context(self._prompt, self._skip)
        return self._tokenizer.decode([*context, *ids], self._skip)[len(before) :]

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final; "" while a character is incomplete."""
        if self._prompt:
            self._ids, self._text = self._tokenizer.context(self._prompt, self._skip)
            self._prompt, self._known = (), len(self._ids)
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids, self._skip)
        if text.endswith(UNFINISHED) or len(text) <= len(self._text):
            return ""
        piece = text[len(self._text) :]
        # The window now begins with the ids of this piece: enough to decode the next ones in their place.
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._text = self._tokenizer.decode(self._ids, self._skip)
        return piece

    def finish(self) -> str:
        """The text that was held back: the last character if the ids end inside it (as U+FFFD)."""
        text = self._tokenizer.decode(self._ids, self._skip)
        piece = text[len(self._text) :]
        self._known, self._text = len(self._ids), text
        return piece
