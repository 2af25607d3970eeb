"""Where drafting loses: by the acceptance of each request, and by the measured times of steps with and without drafts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

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
    """The drafts of one request. accepted: mean per verified step, recent ones first. rests: times that it was given up."""

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
