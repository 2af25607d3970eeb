"""From texts to what the engine computes, and from its results to embeddings: what `LLM` and `AsyncEngine` have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gristmill.quant.checkpoints.checkpoint import NoTokenizerError
from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import as_integer, as_prompt, described, is_integers
from gristmill.runtime.pooling.classes import ClassActivation, Classes, Classification
from gristmill.runtime.pooling.engine import PoolingInput, PoolingQueue
from gristmill.runtime.pooling.late_texts import LateTexts
from gristmill.runtime.pooling.modules import Modules
from gristmill.runtime.pooling.pairs import Scorer
from gristmill.runtime.scheduler import RequestTooLarge
from gristmill.runtime.tokenizer import EncodedText, Tokenizer

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Embedding:
    """The embedding of a text.

    Attributes:
        vector: float32 [dimensions]; of models of late interaction, [tokens, dimensions].
        prompt_tokens: tokens of the text, with its prompt and what the tokenizer adds.
    """

    vector: NDArray[np.float32]
    prompt_tokens: int


@dataclass(frozen=True)
class Job(Generic[R]):
    """Sequences to compute, and what becomes of their results: `finish` takes those of the inputs, in order."""

    inputs: list[PoolingInput]
    finish: Callable[[list[Tensor]], R]


@dataclass(frozen=True)
class PoolingShape:
    """What is known of a model before it is loaded.

    Attributes:
        max_length: tokens of the longest sequence.
        vocab_size: token ids are below it.
        columns: of a result.
        embeds: whether results are embeddings, and not scores.
    """

    max_length: int
    vocab_size: int
    columns: int
    embeds: bool


class PoolingFront:
    """Prepares texts for an engine, and its results for callers.

    Args:
        shape: of what the engine computes.
        tokenizer: of the model, or why it has none: then inputs must be token ids.
        modules: what follows the model.
        widths: the `dimensions` that the model was trained for; empty = any.
        name: of the model, in messages.
        scorer: how it scores pairs of texts; None = not at all.
        late: how it tokenizes texts, where it has a vector for each token; None = it has one for a text.
        classes: of a classifier with several; None = it is none.
    """

    def __init__(
        self,
        shape: PoolingShape,
        tokenizer: Tokenizer | NoTokenizerError,
        modules: Modules,
        widths: Sequence[int],
        name: str,
        scorer: Scorer | None,
        late: LateTexts | None = None,
        classes: Classes | None = None,
    ) -> None:
        self.shape, self.modules, self.widths, self.name = shape, modules, tuple(widths), name
        self.scorer, self.late, self.classes = scorer, late, classes
        self.given_tokenizer = tokenizer
        self._engine: PoolingQueue | None = None

    @property
    def engine(self) -> PoolingQueue:
        """The engine in this process. RuntimeError if there is none here."""
        if self._engine is None:
            raise RuntimeError(f"the engine of {self.name} is not in this process")
        return self._engine

    @engine.setter
    def engine(self, engine: PoolingQueue) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; NoTokenizerError if there is none."""
        if isinstance(self.given_tokenizer, NoTokenizerError):
            raise self.given_tokenizer
        return self.given_tokenizer

    def embeddings(
        self,
        texts: Any,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
    ) -> Job[list[Embedding]]:
        """The job of `LLM.embed`."""
        if self.late is not None:
            if prompt is not None:
                raise UsageError(
                    f"{self.name} has prefixes and no prompts: prompt_name is 'query' or 'document'"
                )
            return self._token_vectors(self.late, texts, dimensions, normalize, prompt_name, truncate)
        if not self.shape.embeds:
            what = "scores pairs of texts" if self.classes is None else "has classes of texts"
            instead = "score or rerank" if self.classes is None else "classify"
            raise UsageError(f"{self.name} {what} and has no embeddings: call {instead}")
        width = self._width(dimensions)
        unit = self.modules.normalize if normalize is None else normalize
        inputs = self.inputs(texts, self._prompt(prompt, prompt_name), truncate)

        def finish(results: list[Tensor]) -> list[Embedding]:
            vectors = shaped(torch.stack(results), width, unit).numpy()
            return [Embedding(row, len(each.ids)) for row, each in zip(vectors, inputs, strict=True)]

        return Job(inputs, finish)

    def classifications(
        self, texts: Any, *, activation: ClassActivation | None = None, truncate: bool = False
    ) -> Job[list[Classification]]:
        """The job of `LLM.classify`."""
        classes = self.classes
        if classes is None:
            raise UsageError(
                f"{self.name} has no classifier, it makes embeddings: call embed"
                if self.shape.embeds
                else f"{self.name} has one label, which is a score: call score or rerank"
            )
        if activation not in (None, *get_args(ClassActivation)):
            raise UsageError(
                f"activation must be one of {', '.join(get_args(ClassActivation))}, or None, got {activation!r}"
            )
        inputs = self.inputs(texts, "", truncate, pairs=True)

        def finish(results: list[Tensor]) -> list[Classification]:
            values = classes.values(torch.stack(results), activation).numpy()
            return [
                Classification(classes.labels[int(row.argmax())], row, classes.labels, len(each.ids))
                for row, each in zip(values, inputs, strict=True)
            ]

        return Job(inputs, finish)

    def _token_vectors(
        self,
        late: LateTexts,
        texts: Any,
        dimensions: int | None,
        normalize: bool | None,
        role: str | None,
        truncate: bool,
    ) -> Job[list[Embedding]]:
        """The vectors of each token, of documents if `role` does not say that they are queries."""
        if role not in (None, "query", "document"):
            raise UsageError(f"prompt_name of {self.name} is 'query' or 'document', got {role!r}")
        listed = [texts] if isinstance(texts, str) else texts
        if (
            not isinstance(listed, Sequence)
            or not listed
            or not all(isinstance(text, str) for text in listed)
        ):
            raise UsageError(
                f"{self.name} takes a text or a list of at least one text, got {described(texts)}"
            )
        asks, width = role == "query", self._width(dimensions)
        inputs = late.inputs(self.encode, listed, asks, truncate)

        def finish(results: list[Tensor]) -> list[Embedding]:
            rows = (late.vectors(each, result, asks) for each, result in zip(inputs, results, strict=True))
            made = (shaped(vectors, width, normalize is not False).numpy() for vectors in rows)
            return [Embedding(vectors, len(each.ids)) for vectors, each in zip(made, inputs, strict=True)]

        return Job(inputs, finish)

    def _width(self, dimensions: int | None) -> int | None:
        most, count = self.shape.columns, as_integer(dimensions)
        if dimensions is None:
            return None
        if count is None or not 1 <= count <= most:
            raise UsageError(f"dimensions must be from 1 to {most}, those of {self.name}, got {dimensions!r}")
        if self.widths and count not in (*self.widths, most):
            raise UsageError(
                f"{self.name} was trained for {', '.join(map(str, self.widths))} dimensions, got {count}"
            )
        return count

    def _prompt(self, prompt: str | None, name: str | None) -> str:
        """The text before others: `prompt`, or the one with this name, or the model's own."""
        prompts = self.modules.prompts
        if prompt is not None:
            if name is not None or not isinstance(prompt, str):
                raise UsageError(
                    f"give prompt, a text, or prompt_name, and not both; got {prompt!r} and {name!r}"
                )
            return prompt
        name = self.modules.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            raise UsageError(f"{self.name} has no prompt {name!r}; it has: {', '.join(prompts) or 'none'}")
        return prompts[name]

    def inputs(self, texts: Any, prompt: str, truncate: bool, *, pairs: bool = False) -> list[PoolingInput]:
        """Texts or token ids as the engine takes them; with `pairs`, one of several may be a tuple of two texts."""
        several = not isinstance(texts, str) and not is_integers(texts)
        if several and (not isinstance(texts, Sequence)):
            raise UsageError(
                f"texts are text, token ids (a list, or an array of one dimension), or a list of such, got {described(texts)}"
            )
        given = [
            text if pairs and _is_pair(text) else as_prompt(text) for text in (texts if several else [texts])
        ]
        if not given:
            raise UsageError("no texts were given")
        skip = self._skip(prompt)
        written = [
            prompt + text if isinstance(text, str) else text for text in given if not isinstance(text, list)
        ]
        encoded = iter(self.encode(written, truncate))
        inputs = []
        for text in given:
            if isinstance(text, list):
                inputs.append(PoolingInput(text))
            else:
                ids, types = next(encoded)
                inputs.append(PoolingInput(ids, types, skip))
            self.check(inputs[-1].ids)
        return inputs

    def _skip(self, prompt: str) -> int:
        """Tokens of a prompt that are not pooled: all but the last special one, which ends the text."""
        if not prompt or self.modules.pooling is None or self.modules.pooling.include_prompt:
            return 0
        text = prompt.lower() if self.modules.lowercase else prompt
        with_special, bare = (self.tokenizer.encode(text, special) for special in (True, False))
        ends = bool(bare) and with_special[-1] != bare[-1]
        return len(with_special) - ends

    def encode(
        self, texts: Sequence[str | tuple[str, str]], truncate: bool, room: int | None = None
    ) -> list[EncodedText]:
        """Ids of texts or pairs of texts, with `truncate` cut to `room`; None = to what the model takes."""
        if not texts:
            return []
        if self.modules.lowercase:
            texts = [
                text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower())
                for text in texts
            ]
        return self.tokenizer.encode_inputs(texts, (room or self.shape.max_length) if truncate else None)

    def check(self, ids: Sequence[int]) -> None:
        """UsageError if there are none or one is outside the vocabulary; RequestTooLarge if they are too many."""
        vocabulary, most = self.shape.vocab_size, self.shape.max_length
        if not ids:
            raise UsageError("the text is empty: at least one token is needed")
        if len(ids) > most:
            raise RequestTooLarge(
                f"a text of {len(ids)} tokens is longer than {most}, which {self.name} takes: cut it "
                "(truncate=True), or divide it"
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise UsageError(f"token ids must be from 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}")


def _is_pair(text: Any) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and all(isinstance(part, str) for part in text)


def shaped(vectors: Tensor, width: int | None, unit: bool) -> Tensor:
    """Vectors [rows, columns] cut to `width` columns, and then of length 1 if `unit`."""
    vectors = vectors if width is None else vectors[:, :width].contiguous()
    return torch.nn.functional.normalize(vectors, dim=-1) if unit else vectors
