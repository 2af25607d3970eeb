"""Speculation: proposers draft tokens, one step of the model verifies them, and ids are those of decoding without drafts.

Each file declares one `PROPOSER`. No other file names a proposer: they are found by walking this package, and installed packages add
theirs under the entry point group ``gristmill.proposers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol

from gristmill.kernel_registry.declarations import Declarations, find_declarations
from gristmill.kernel_registry.plugins import PluginFailure

if TYPE_CHECKING:
    from gristmill.runtime.runner import Runner
    from gristmill.runtime.sampler import SamplingRow
    from gristmill.runtime.speculation.context import DraftContext

ENTRY_POINTS = "gristmill.proposers"


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A decoding request that takes drafts.

    id: of the request. tokens: its known tokens, prompt and output; read-only, and only during the call. prompt_len: those of the
    prompt. count: the most drafts that it takes, at least 1. row: how its next token is sampled; draft i is verified by the draw at
    output index row.index + i.
    """

    id: str
    tokens: Sequence[int]
    prompt_len: int
    count: int
    row: SamplingRow


class Proposer(Protocol):
    """Drafts the tokens that may follow. It may be wrong: drafts change how many steps an output takes, never its ids."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each request 0 to `count` token ids. If it raises, the step fails as if the model had."""
        ...

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        """A request has ended with these tokens; one that it never drafted for may be among them."""
        ...

    def reset(self) -> None:
        """Forget all requests and what was learned from them: the engine slept, or has new weights."""
        ...

    @property
    def runner(self) -> Runner | None:
        """Of a draft model, whose memory sleeps with the engine's; None without one."""
        ...


@dataclass(frozen=True)
class ProposerSpec:
    """A kind of proposer.

    name: of the method. summary: one line for users. tokens: drafts per step unless the user says otherwise. make: a proposer for an
    engine. takes_model: its argument is a model, `Speculation.model`.
    """

    name: str
    summary: str
    tokens: int
    make: Callable[[DraftContext], Proposer]
    takes_model: bool = False


@cache
def _declared() -> Declarations[ProposerSpec]:
    return find_declarations(__name__, "PROPOSER", ProposerSpec, ENTRY_POINTS, lambda spec: [spec.name])


def proposers() -> Mapping[str, ProposerSpec]:
    """All proposers by name, including those of plugins."""
    return _declared().by_name


def failures() -> tuple[PluginFailure, ...]:
    """Plugins of ``gristmill.proposers`` that failed to load, with reasons."""
    return _declared().failures
