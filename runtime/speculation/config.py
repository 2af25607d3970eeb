"""Speculation as users ask for it: a method, the number of drafts, and the draft model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import plain
from gristmill.runtime.speculation import ProposerSpec, failures, proposers

MOST_TOKENS = 64


@dataclass(frozen=True)
class Speculation:
    """How an engine drafts tokens. Drafts do not change ids, only the number of steps and their time.

    Args:
        method: the proposer, by the name that ``gristmill supported`` lists.
        tokens: the most drafts per request and step, 1 to 64; None = the method's default.
        model: for methods that take one, a draft model with the same tokenizer, a Hugging Face directory or a GGUF file.
        adaptive: stop drafting where it loses: for requests whose drafts are rejected, and at numbers of sequences where steps with
            drafts were measured to give fewer tokens per second than steps without. False = always draft.

    Raises:
        UsageError: an unknown method, a number out of range, a model that is missing or superfluous.
    """

    method: str
    tokens: int | None = None
    model: str | Path | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        spec = proposers().get(self.method) if isinstance(self.method, str) else None
        if spec is None:
            others = "".join(f"; {failure}" for failure in failures())
            raise UsageError(
                f"unknown speculation method {self.method!r}; known: {', '.join(proposers())}{others}"
            )
        object.__setattr__(self, "tokens", plain(self.tokens))
        if self.tokens is not None and (type(self.tokens) is not int or not 1 <= self.tokens <= MOST_TOKENS):
            raise UsageError(
                f"speculation drafts 1 to {MOST_TOKENS} tokens per step, got tokens = {self.tokens!r}"
            )
        if spec.takes_model and not self.model:
            raise UsageError(f"speculation by {self.method!r} needs a model: {self.method}:DIR")
        if not spec.takes_model and self.model is not None:
            raise UsageError(f"speculation by {self.method!r} takes no model, got {str(self.model)!r}")
        if type(self.adaptive) is not bool:
            raise UsageError(f"adaptive must be True or False, got {self.adaptive!r}")

    @property
    def spec(self) -> ProposerSpec:
        """The declaration of the method."""
        return proposers()[self.method]

    @property
    def most_tokens(self) -> int:
        """The most drafts per request and step."""
        return self.spec.tokens if self.tokens is None else self.tokens

    @staticmethod
    def parse(text: str | Speculation) -> Speculation:
        """From METHOD[:TOKENS], or METHOD:MODEL[:TOKENS] where the method takes a model: ``ngram:4``, ``draft:DIR``, ``draft:DIR:3``."""
        if isinstance(text, Speculation):
            return text
        if not isinstance(text, str):
            raise UsageError(
                f"speculate must be a Speculation or a text such as 'ngram:4', got {type(text).__name__}"
            )
        method, _, rest = text.partition(":")
        spec = proposers().get(method)
        if spec is None or not rest:
            return Speculation(method)
        model, _, count = rest.rpartition(":") if spec.takes_model else ("", "", rest)
        if spec.takes_model and not (model and count.isdecimal()):
            return Speculation(method, model=rest)
        if not count.isdecimal():
            raise UsageError(f"speculate={text!r}: expected {method} or {method}:TOKENS, such as {method}:4")
        return Speculation(method, int(count), model or None)
