"""Drafts from the target's hidden states, by a small model that reads the target's last layer or layers.

At position i the small model reads the target's state of token i and the embedding of token i + 1, and its output predicts token i + 2.
A further draft is drawn from its own state of the draft before it. Its cache has the target's blocks, so that cached prefixes serve both
models, and blocks of its own for drafts whose positions the target has no blocks for yet.

A draft is drawn with the noise of the output index that verifies it, as a draft model's is (`draft.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.batch import Batch, send
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.decode_graphs import LARGEST
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.speculation import DraftContext, DraftRequest


class HiddenStateModel:
    """The base of models that read the target's states: a `Model` whose `forward` reads the first rows of `inputs`, with the tokens, and
    writes those of `outputs`, so that steps run as graphs. Its `logits` take rows of `outputs`.

    Attributes:
        inputs, outputs: [rows, hidden].
        target_layers: the layers whose outputs it reads; empty = the states after the target's last norm.
    """

    make_layer: ClassVar[Callable[..., Any]]
    target_layers: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, plans: Plans) -> None:
        self.config, self.plans = config, plans
        self.reserve(0)

    def reserve(self, rows: int) -> None:
        """Allocate `inputs` and `outputs`, for steps of up to this many tokens."""
        shape, plans = (rows, self.config.hidden_size), self.plans
        self.inputs, self.outputs = (
            torch.zeros(shape, dtype=plans.dtype, device=plans.device) for _ in range(2)
        )

    def states(self, hidden: Tensor) -> Tensor:
        """States of the target, [rows, width], as rows of `inputs`."""
        return hidden

    def forward(self, batch: Batch, cache: PagedCache) -> Tensor:
        """The states [tokens, hidden] that are the rows of `outputs`. `batch.tokens` follow the positions of `inputs`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Rows of `outputs` -> [rows, vocab of the target]."""
        raise NotImplementedError


def draft_blocks(tokens: int, block_size: int) -> int:
    """Blocks of its own that a request needs for `tokens` drafts: the last one is not fed, and the first is read from the target's."""
    return cdiv(tokens - 1, block_size)


@dataclass(slots=True)
class _Request:
    """What was read of a request: its first `length` - 1 positions, with the tokens that follow them. `place` is that of the output for the last
    one, `block_ids` the request's table.
    """

    place: int
    length: int
    block_ids: list[int]


class HiddenStateProposer:
    """Reads what each step of the target has computed, and drafts from there: one step per further draft.

    Raises:
        UsageError: the cache of the small model does not have the blocks described above, or the target's has several groups.
    """

    def __init__(self, context: DraftContext) -> None:
        if context.draft_runner is None:
            raise UsageError(
                "the drafts need the runner of their model: Engine.from_parts(..., draft=Runner(...))"
            )
        self.runner, self._target = context.draft_runner, context.runner
        model = self._model = cast(HiddenStateModel, self.runner.model)
        self._draft_blocks = draft_blocks(context.tokens, self.runner.cache.block_size)
        self._first_draft_block = self._target.cache.num_blocks
        needed = self._first_draft_block + context.max_seqs * self._draft_blocks
        if self.runner.cache.num_blocks < needed:
            raise UsageError(
                f"the drafts need a cache of {needed} blocks, the target's and {self._draft_blocks} per request; theirs has "
                f"{self.runner.cache.num_blocks}"
            )
        if len(self._target.cache.windows) > 1:
            raise UsageError("drafts from hidden states need a cache with one group of layers")
        self._target.keep_hidden(model.target_layers)
        model.reserve(max(context.max_batch_tokens, LARGEST))
        self._states = torch.zeros_like(model.outputs[: self._target.max_seqs])
        self._free = list(range(self._target.max_seqs))
        self._requests: dict[str, _Request] = {}  # those read last at the end

    @torch.inference_mode()
    def computed(self, entries: Sequence[ScheduledRequest], following: Sequence[Sequence[int]]) -> None:
        """Read the positions of a step whose following tokens are known."""
        hidden = self._target.hidden
        work = [
            (entry, first, [*tokens])
            for entry, first, tokens in zip(
                entries, [] if hidden is None else hidden.firsts, following, strict=True
            )
            if tokens
        ]
        if hidden is None or not work:
            return
        rows = [first + i for _, first, tokens in work for i in range(len(tokens))]
        model, device = self._model, self.runner.device
        model.inputs[: len(rows)] = model.states(hidden.values[send(rows, torch.int64, device)])
        read = [_entry(entry.id, entry.start, tokens, entry.block_ids, False) for entry, _, tokens in work]
        self.runner.drop(self.runner.launch(read, []))
        ends = accumulate(len(tokens) for _, _, tokens in work)
        named = {entry.id for entry in entries}
        kept = [
            (self._place(entry, len(tokens), named), end - 1)
            for (entry, _, tokens), end in zip(work, ends, strict=True)
        ]
        places, rows = ([pair[i] for pair in kept] for i in range(2))
        self._states[send(places, torch.int64, device)] = model.outputs[send(rows, torch.int64, device)]

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """The small model's own draws; none for a request whose last known token was not read."""
        drafts: dict[str, list[int]] = {request.id: [] for request in requests}
        taking = [
            (request, known)
            for request in requests
            if (known := self._requests.get(request.id)) is not None and known.length == len(request.tokens)
        ]
        places = [known.place for _, known in taking]
        first = {
            request.id: self._first_draft_block + i * self._draft_blocks
            for i, (request, _) in enumerate(taking)
        }
        states = self._states[send(places, torch.int64, self.runner.device)]
        if taking:
            logits = self._model.logits(states)
            ids = self.runner.sampler(logits, [request.row for request, _ in taking])
        step = 1
        while taking:
            for (request, _), token in zip(taking, ids, strict=True):
                if token >= 0:
                    drafts[request.id].append(token)
            growing = [
                place
                for place, (request, _) in enumerate(taking)
                if len(drafts[request.id]) == step < request.count
            ]
            if not growing:
                break
            taking = [taking[place] for place in growing]
            self._model.inputs[: len(growing)] = states[send(growing, torch.int64, self.runner.device)]
            entries, rows = [], []
            for request, known in taking:
                own = range(first[request.id], first[request.id] + self._draft_blocks)
                token = drafts[request.id][-1]
                entries.append(
                    _entry(request.id, known.length - 2 + step, [token], [*known.block_ids, *own], True)
                )
                rows.append(SamplingRow(request.row.params, request.row.seed, request.row.index + step))
            ids = self.runner.run(entries, rows)
            states = self._model.outputs
            step += 1
        return [drafts[request.id] for request in requests]

    def ended(self, request_id: str, tokens: Sequence[int], prompt_len: int) -> None:
        """Forget the request."""
        known = self._requests.pop(request_id, None)
        if known is not None:
            self._free.append(known.place)

    def reset(self) -> None:
        """Forget all requests."""
        for request_id in [*self._requests]:
            self.ended(request_id, (), 0)

    def _place(self, entry: ScheduledRequest, count: int, named: set[str]) -> int:
        """Where the state after the entry's first `count` positions goes: the place of a request that waits if none is free."""
        known = self._requests.pop(entry.id, None)
        if known is None:
            if not self._free:
                self.ended(next(name for name in self._requests if name not in named), (), 0)
            known = _Request(self._free.pop(), 0, entry.block_ids)
        known.length, known.block_ids = entry.start + count + 1, entry.block_ids
        self._requests[entry.id] = known
        return known.place


def _entry(name: str, start: int, tokens: list[int], block_ids: list[int], samples: bool) -> ScheduledRequest:
    return ScheduledRequest(name, start, len(tokens), samples, tokens, block_ids, [])
