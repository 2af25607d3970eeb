"""Speculation: proposers draft tokens, one step of the model verifies them, and ids are those of decoding without drafts.

Each file declares one `PROPOSER`. No other file names a proposer: they are found by walking this package, and installed packages add
theirs under the entry point group ``gristmill.proposers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gristmill.kernel_registry.declarations import Declarations, find_declarations
from gristmill.kernel_registry.plugins import PluginFailure

if TYPE_CHECKING:
    import torch

    from gristmill.kernel_registry.policy import Policy
    from gristmill.kernel_registry.scheme import QuantScheme
    from gristmill.quant.checkpoints.checkpoint import Checkpoint
    from gristmill.runtime.models import Model
    from gristmill.runtime.runner import Runner
    from gristmill.runtime.sampler import SamplingRow
    from gristmill.runtime.scheduler import ScheduledRequest
ENTRY_POINTS = "gristmill.proposers"


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A decoding request that takes drafts.

    Attributes:
        id: the id of the request.
        tokens: its known tokens, prompt and output; read-only, and only during the call.
        prompt_len: the number of prompt tokens.
        count: the most drafts that it takes, at least 1.
        row: how its next token is sampled; draft i is verified by the draw at output index row.index + i.
    """

    id: str
    tokens: Sequence[int]
    prompt_len: int
    count: int
    row: SamplingRow


class Proposer(Protocol):
    """Drafts the tokens that may follow. It may be wrong: drafts change how many steps an output takes, never its ids."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return 0 to `count` token ids for each request. If it raises, the step fails as if the model had."""
        ...

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        """A request has ended with these tokens; one that it never drafted for may be among them."""
        ...

    def reset(self) -> None:
        """Forget all requests and what was learned from them: the engine slept, or has new weights."""
        ...

    @property
    def runner(self) -> Runner | None:
        """The runner of a draft model, whose memory sleeps with the engine's; None without one."""
        ...


@runtime_checkable
class StateReader(Protocol):
    """A proposer that reads what each step of the target has computed."""

    def computed(self, entries: Sequence[ScheduledRequest], following: Sequence[Sequence[int]]) -> None:
        """A step has been computed, and its drafts are verified. Called before the scheduler learns of it. If it raises, the step fails.

        Args:
            following: for each entry the tokens that follow its positions, from the first on, as many as are known by now: after rejected drafts
                there are none.
        """
        ...


LoadDraft = Callable[["Model", "Policy | None", "str | QuantScheme | torch.dtype | None"], "Model"]
"""(target, policy, the scheme that the target's weights are quantized to at load) -> the model that drafts, on the target's device."""


@dataclass(frozen=True)
class ProposerSpec:
    """A kind of proposer.

    Attributes:
        name: the name of the method.
        summary: one line for users.
        tokens: drafts per step unless the user says otherwise.
        make: makes a proposer for an engine.
        takes_model: whether its argument is a model, `Speculation.model`.
        open: for kinds that draft by a model: called before any weight is read, with the target's checkpoint and that argument, to check that
            they go together.
        shares_blocks: whether the cache of that model has the blocks of the target's, with the same numbers, and blocks of its own drafts
            after them (`hidden_drafts`).
    """

    name: str
    summary: str
    tokens: int
    make: Callable[[DraftContext], Proposer]
    takes_model: bool = False
    open: Callable[[Checkpoint, str | Path | None], LoadDraft] | None = None
    shares_blocks: bool = False


@cache
def _declared() -> Declarations[ProposerSpec]:
    return find_declarations(__name__, "PROPOSER", ProposerSpec, ENTRY_POINTS, lambda spec: [spec.name])


def proposers() -> Mapping[str, ProposerSpec]:
    """All proposers by name, including those of plugins."""
    return _declared().by_name


def failures() -> tuple[PluginFailure, ...]:
    """Plugins of ``gristmill.proposers`` that failed to load, with reasons."""
    return _declared().failures


@dataclass(frozen=True)
class DraftContext:
    """The engine that a proposer drafts for.

    Attributes:
        runner: the runner of the target model.
        max_seqs, max_batch_tokens: requests and tokens per step.
        tokens: the most drafts per request and step.
        draft_runner: the runner of the draft model, for methods that take one; None for the others.
    """

    runner: Runner
    max_seqs: int
    max_batch_tokens: int
    tokens: int
    draft_runner: Runner | None = None
