"""Text to token ids and back, by the `tokenizers` package: of tokenizer.json, or of what a GGUF file says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gristmill.runtime.errors import ConfigError
from gristmill.runtime.loader.gguf import GgufCheckpoint, is_gguf
from gristmill.runtime.loader.gguf_tokenizer import gguf_tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """tokenizer.json of a model directory; or beside a GGUF file, else the tokenizer in it.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """

    def __init__(self, model: str | Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = (Path(model).parent if is_gguf(model) else Path(model)) / "tokenizer.json"
        if not path.is_file() and is_gguf(model):
            self._backend = gguf_tokenizer(GgufCheckpoint(model).tokenizer(), str(model))
            return
        if not path.is_file():
            raise ConfigError(f"{path.parent} has no tokenizer.json: pass prompts as lists of token ids")
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises plain Exception for a file it cannot read
            raise ConfigError(f"cannot read {path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with what the tokenizer's own post-processor adds and nothing else."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self)


class TextStream:
    """Decodes ids as they come, in pieces that never cut a character; joined, they are `decode` of all the ids.

    Each piece is the difference of two decodings of the last few ids: an id's text can depend on the one before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0  # leading ids of the window whose text is out
        self._text = ""  # their text

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain; "" while a character is unfinished."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNFINISHED) or len(text) <= len(self._text):
            return ""
        piece = text[len(self._text) :]
        # The window now begins with the ids of this piece: enough to decode the next ones in their place.
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        self._text = self._tokenizer.decode(self._ids)
        return piece

    def finish(self) -> str:
        """What was held back: the last character if the ids end inside it (as U+FFFD)."""
        text = self._tokenizer.decode(self._ids)
        piece = text[len(self._text) :]
        self._known, self._text = len(self._ids), text
        return piece
