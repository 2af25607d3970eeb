"""Statistics of drafts: what was proposed and accepted, why requests were not drafted for, and where drafting loses, by the acceptance of each
request and by the measured times of steps with and without drafts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """The drafts of an engine since it was made.

    Attributes:
        method: the name of the proposer.
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
        """Tokens per verified run: the accepted drafts and the draw after them; 1 if there were none."""
        return 1 + (self.accepted_tokens / self.drafts if self.drafts else 0.0)


class DraftCounts:
    """The growing counts, for at most `positions` drafts per run."""

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


DECAY = 0.8
"""Weight of the past in a request's mean of accepted drafts, per verified step."""
FIRST_STEPS = 4
"""Verified steps before a request may be given up."""
LEAST_ACCEPTED = 0.25
"""Accepted drafts per step below which a request takes no drafts for a while: verifying them is never free."""
FIRST_REST, LONGEST_REST = 16, 256
"""Tokens that a request decodes without drafts before it tries again; doubled after each failure."""

SAMPLES = 5
"""Steps of a kind whose times are compared; kernels that are compiled in one of them do not move the median."""
WINDOW = 32
"""Steps of a kind that are remembered."""
RETRY = 512
"""Steps after which a number of sequences where drafting lost is tried again."""
REFRESH = 64
"""Steps with drafts after which one without is run, so that the comparison stays true as contexts grow."""


@dataclass(slots=True)
class RequestGain:
    """The drafts of one request.

    Attributes:
        accepted: mean of accepted drafts per verified step, weighted towards recent steps.
        rests: how often drafting was suspended for the request.
    """

    accepted: float = 0.0
    steps: int = 0
    rests: int = 0
    resumes_at: int = 0  # output tokens from which it takes drafts again

    def verified(self, accepted: int, output_tokens: int) -> None:
        """A step verified drafts of the request, which now has this many output tokens."""
        self.steps += 1
        weight = max(1 / self.steps, 1 - DECAY)
        self.accepted += weight * (accepted - self.accepted)
        if self.steps < FIRST_STEPS:
            return
        if self.accepted < LEAST_ACCEPTED:
            self.resumes_at = output_tokens + min(FIRST_REST << self.rests, LONGEST_REST)
            self.rests += 1
            self.steps, self.accepted = 0, 0.0
        elif self.accepted >= 1:
            self.rests = 0


@dataclass(slots=True)
class _Times:
    """Recent steps of one kind: seconds, and tokens per sequence."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: float, tokens: float) -> None:
        self.seconds.append(seconds)
        self.tokens.append(tokens)

    @property
    def speed(self) -> float:
        """Tokens per second and sequence."""
        return sum(self.tokens) / len(self.tokens) / max(median(self.seconds), 1e-9)


@dataclass(slots=True)
class _Size:
    """Steps of up to `seqs` sequences, and over half as many."""

    seqs: int
    with_drafts: _Times = field(default_factory=_Times)
    without: _Times = field(default_factory=_Times)
    rest: int = 0  # steps until drafts are tried again
    since_plain: int = 0

    @property
    def gain(self) -> float | None:
        """Tokens per second with drafts as a multiple of those without; None until both are measured."""
        if min(len(self.with_drafts.seconds), len(self.without.seconds)) < SAMPLES:
            return None
        return self.with_drafts.speed / self.without.speed


class StepGains:
    """Decode steps by number of sequences, in powers of two: drafting goes on where it gives more tokens per second."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def refusal(self, seqs: int) -> str:
        """Why the next step of this many sequences takes no drafts; "" if it does."""
        size = self._size(seqs)
        if size.rest:
            return f"drafting lost at up to {size.seqs} sequences"
        if len(size.without.seconds) < SAMPLES or size.since_plain >= REFRESH:
            return "a step without drafts is measured"
        return ""

    def measured(self, seqs: int, seconds: float, tokens: int, drafted: bool) -> None:
        """A decode step of `seqs` sequences gave `tokens` tokens."""
        size = self._size(seqs)
        (size.with_drafts if drafted else size.without).add(seconds, tokens / seqs)
        size.since_plain = size.since_plain + 1 if drafted else 0
        if size.rest:
            size.rest -= 1
            if not size.rest:
                size.with_drafts = _Times()
        elif drafted and size.gain is not None and size.gain < 1:
            size.rest = RETRY

    def gains(self) -> dict[int, float]:
        """Number of sequences -> tokens per second with drafts as a multiple of those without, where both were measured."""
        return {seqs: size.gain for seqs, size in sorted(self._sizes.items()) if size.gain is not None}

    def _size(self, seqs: int) -> _Size:
        key = 1 << (seqs - 1).bit_length()
        if key not in self._sizes:
            self._sizes[key] = _Size(key)
        return self._sizes[key]
