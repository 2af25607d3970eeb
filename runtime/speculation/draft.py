"""Drafts from a smaller model with the same tokenizer, with a paged cache of its own (Leviathan et al., 2023, arXiv:2211.17192).

The draft model draws each draft with the noise of the output index that verifies it, so that it agrees with the target's draw more often
than an independent draw would, and exactly where both models have the same logits (Daliri, Musco, Suresh, 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme, cdiv
from gristmill.quant.checkpoints.checkpoint import Checkpoint, NoTokenizerError
from gristmill.runtime.errors import ConfigError, UsageError
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.models import Model
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.speculation import DraftContext, DraftRequest, LoadDraft, ProposerSpec


def check_draft_model(target: str | Path | Checkpoint, draft: str | Path) -> Checkpoint:
    """The draft's checkpoint; UsageError unless it is a model whose token ids mean what the target's do.

    Their tokenizers have the same tokens with the same ids; where neither has a tokenizer, their vocabularies have the same size.
    """
    target = open_checkpoint(target)
    try:
        opened = open_checkpoint(draft)
        opened.config()
    except ConfigError as error:
        raise ConfigError(f"draft model: {error}") from error
    ours, theirs = _vocabulary(target), _vocabulary(opened)
    if ours is None and theirs is None:
        sizes = [parse_config(*checkpoint.config()).vocab_size for checkpoint in (target, opened)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"draft model {opened.path}: its vocabulary has {sizes[1]} tokens, that of {target.path} {sizes[0]}"
            )
        return opened
    if ours is None or theirs is None:
        raise UsageError(
            f"draft model {opened.path}: its tokenizer cannot be compared with that of {target.path}: one of them has none"
        )
    if ours != theirs:
        differing = sum(1 for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise UsageError(
            f"draft model {opened.path}: its tokenizer is not that of {target.path}: {differing} tokens have another id or are "
            "missing in one of them"
        )
    return opened


def open_draft_model(target: Checkpoint, draft: str | Path | None) -> LoadDraft:
    """The loader of a draft model: on the target's device, in its dtype, as stored, with cache blocks of the same size, for sequences of the
    same length; its KV cache is not quantized. Raises as `check_draft_model`."""
    if draft is None:
        raise UsageError("speculation by a draft model needs its directory: draft:DIR")
    checkpoint = check_draft_model(target, draft)

    def load(model: Model, policy: Policy | None, quant: str | QuantScheme | torch.dtype | None) -> Model:
        plans = model.plans
        longest = model.config.max_position
        return load_model(
            checkpoint, plans.dtype, None, plans.device, policy, plans.block_size, max_model_len=longest
        )

    return load


def _vocabulary(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Token -> id; None without a tokenizer."""
    try:
        tokens: dict[str, int] = checkpoint.tokenizer().get_vocab(with_added_tokens=True)
    except NoTokenizerError:
        return None
    return tokens


@dataclass(slots=True)
class _Sequence:
    """What the draft model's cache holds of a request: KV of its first `known` known tokens, then of the drafts `fed`."""

    block_ids: list[int] = field(default_factory=list)
    known: int = 0
    fed: list[int] = field(default_factory=list)

    def keep_valid(self, tokens: Sequence[int]) -> None:
        """Keep what is a prefix of the known tokens, without the last of them, after which the first draft is drawn."""
        agreed = 0
        for draft, token in zip(self.fed, tokens[self.known :], strict=False):
            if draft != token:
                break
            agreed += 1
        self.known = min(self.known + agreed, len(tokens) - 1)
        self.fed.clear()


@dataclass(slots=True)
class _Draft:
    """A request in one call. `end` is the number of known tokens that the cache holds after the first step."""

    request: DraftRequest
    sequence: _Sequence
    end: int
    drafts: list[int]

    @property
    def complete(self) -> bool:
        return self.end == len(self.request.tokens)


class DraftModelProposer:
    """Runs the draft model: one step that reads what is new of all requests, then one per further draft.

    Args:
        runner: the runner of the draft model.
        max_batch_tokens: tokens of a step; a longer prompt is read in several calls, and has no drafts before it is complete.
    """

    def __init__(self, runner: Runner, max_batch_tokens: int) -> None:
        self.runner = runner
        self._max_batch_tokens = max_batch_tokens
        self._free = list(range(runner.cache.num_blocks))
        self._sequences: dict[str, _Sequence] = {}  # those used last at the end

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The draft model's own draws; fewer where its length, cache or vocabulary ends."""
        named = {request.id for request in requests}
        budget = self._max_batch_tokens
        work: dict[str, _Draft] = {}
        for request in requests:
            draft = self._prepare(request, budget, named)
            if draft is not None:
                work[request.id] = draft
                budget -= draft.end - draft.sequence.known
        self._read([*work.values()])
        growing = [draft for draft in work.values() if draft.drafts]
        while growing := [d for d in growing if len(d.drafts) < self._most(d.request) and d.drafts[-1] >= 0]:
            self._extend(growing)
        return [
            [token for token in work[request.id].drafts if token >= 0] if request.id in work else []
            for request in requests
        ]

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        """Free the request's blocks."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._free += sequence.block_ids

    def reset(self) -> None:
        """Free all blocks."""
        for request_id in [*self._sequences]:
            self.ended(request_id, (), 0)

    def _most(self, request: DraftRequest) -> int:
        """Drafts of a request: the last one is not fed, so its position is one past the cache's."""
        return min(request.count, self.runner.model.config.max_position - len(request.tokens) + 1)

    def _prepare(self, request: DraftRequest, budget: int, named: set[str]) -> _Draft | None:
        """What the first step reads of a request; None if it takes no part."""
        tokens, config = request.tokens, self.runner.model.config
        sequence = self._sequences.pop(request.id, None) or _Sequence()
        self._sequences[request.id] = sequence  # now the one used last
        sequence.keep_valid(tokens)
        end = min(len(tokens), sequence.known + budget)
        most = self._most(request)
        new = tokens[sequence.known : end]
        if most < 1 or not new or max(new) >= config.vocab_size:
            return None
        positions = len(tokens) + most - 1 if end == len(tokens) else end
        if not self._reserve(sequence, positions, named):
            return None
        return _Draft(request, sequence, end, [])

    def _reserve(self, sequence: _Sequence, positions: int, named: set[str]) -> bool:
        """Give the sequence blocks for these positions, of requests that are not drafted for now if none is free."""
        lacking = cdiv(positions, self.runner.cache.block_size) - len(sequence.block_ids)
        if lacking > len(self._free):
            for other in [name for name in self._sequences if name not in named]:
                self.ended(other, (), 0)
                if lacking <= len(self._free):
                    break
        if lacking > len(self._free):
            return False
        for _ in range(lacking):
            sequence.block_ids.append(self._free.pop())
        return True

    def _read(self, drafts: Sequence[_Draft]) -> None:
        """Feed what is new of each request, and draw the first draft of those that are complete."""
        if not drafts:
            return
        entries = []
        for draft in drafts:
            start = draft.sequence.known
            tokens = list(draft.request.tokens[start : draft.end])
            entries.append(_entry(draft, start, tokens, draft.complete))
        complete = [draft for draft in drafts if draft.complete]
        ids = self.runner.run(entries, [draft.request.row for draft in complete])
        for draft in drafts:
            draft.sequence.known = draft.end
        for draft, token in zip(complete, ids, strict=True):
            draft.drafts.append(token)

    def _extend(self, drafts: Sequence[_Draft]) -> None:
        """Feed the last draft of each request, and draw the next."""
        entries = [_entry(d, len(d.request.tokens) + len(d.drafts) - 1, [d.drafts[-1]], True) for d in drafts]
        rows = [
            SamplingRow(d.request.row.params, d.request.row.seed, d.request.row.index + len(d.drafts))
            for d in drafts
        ]
        for draft, token in zip(drafts, self.runner.run(entries, rows), strict=True):
            draft.sequence.fed.append(draft.drafts[-1])
            draft.drafts.append(token)


def _entry(draft: _Draft, start: int, tokens: list[int], samples: bool) -> ScheduledRequest:
    return ScheduledRequest(
        draft.request.id, start, len(tokens), samples, tokens, draft.sequence.block_ids, []
    )


def make(context: DraftContext) -> DraftModelProposer:
    """A proposer over the draft model that the engine has loaded."""
    if context.draft_runner is None:
        raise UsageError(
            "speculation by a draft model needs the draft's runner: Engine.from_parts(..., draft=Runner(...))"
        )
    return DraftModelProposer(context.draft_runner, context.max_batch_tokens)


PROPOSER = ProposerSpec(
    name="draft",
    summary="a smaller model with the same tokenizer: draft:DIR, draft:DIR:TOKENS",
    tokens=4,
    make=make,
    takes_model=True,
    open=open_draft_model,
)
