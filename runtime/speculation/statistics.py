"""Counts of drafts: what was proposed, what was accepted, and why requests were not drafted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """The drafts of an engine since it was made.

    Attributes:
        method: of the proposer.
        drafts: verified runs of drafts, one per request and step.
        draft_tokens: drafted tokens that were verified.
        accepted_tokens: those that were the request's own draw.
        accepted_by_position: accepted tokens by their place in the run, from its first.
        reasons: why a decoding request took no drafts in a step, or fewer than proposed -> how often.
        gains: number of sequences, up to the next power of two -> tokens per second of steps with drafts as a multiple of those without.
        draft_bytes: bytes of the proposer's weights and cache on the device.
    """

    method: str
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    reasons: Mapping[str, int]
    gains: Mapping[int, float]
    draft_bytes: int

    @property
    def acceptance(self) -> float:
        """Accepted drafts as a fraction of those verified; 0 if there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_run(self) -> float:
        """Tokens per verified run: the accepted drafts and the draw behind them; 1 if there were none."""
        return 1 + (self.accepted_tokens / self.drafts if self.drafts else 0.0)


class DraftCounts:
    """The growing counts. positions: the most drafts of a run."""

    def __init__(self, positions: int) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted = [0] * positions
        self.reasons: Counter[str] = Counter()

    def verified(self, drafts: int, accepted: int) -> None:
        """A run of drafts was verified."""
        self.drafts += 1
        self.draft_tokens += drafts
        for position in range(accepted):
            self.accepted[position] += 1
