"""What a proposer is made from."""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.runtime.runner import Runner


@dataclass(frozen=True)
class DraftContext:
    """The engine that a proposer drafts for.

    runner: of the target model. max_seqs, max_batch_tokens: requests and tokens per step. tokens: the most drafts per request and step.
    draft_runner: of the draft model, for methods that take one; None for the others.
    """

    runner: Runner
    max_seqs: int
    max_batch_tokens: int
    tokens: int
    draft_runner: Runner | None = None
