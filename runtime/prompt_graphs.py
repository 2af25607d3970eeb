"""Steps with prompts as CUDA graphs of what lies between two attention calls: a layer takes two launches instead of ten.

Only attention depends on the lengths of sequences (`Batch.apart`). Everything else depends on the number of tokens alone, so a step is
padded to the next of a few sizes, and its pieces are replayed, with the attention of the actual sequences after each of them. What an
attention reads and writes is at fixed addresses, which all graphs share. Padding reads token 0 at position 0 and writes nothing to the cache.

This pays as long as launches take longer than the arithmetic of a step (`most_tokens`): larger steps run kernel by kernel, unpadded. A graph is
captured when a step first needs it. The first one is, after a run that resolves and loads its kernels; others are run before only if they call a
kernel that has not run yet, or need more memory, and on several ranks. On a CPU the same padded steps run without capture.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.captures import capturing_pieces
from gristmill.autotune.errors import UnpreparedError
from gristmill.runtime.batch import Apart, Batch, Cuts, with_groups
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.graph_memory import (
    OVER_BOUND,
    GraphMemory,
    run_and_capture,
    together,
    why_not_captured,
)
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.models import Model

LOG = logging.getLogger("gristmill")
SMALLEST = 16
"""Tokens of the smallest graph."""
LARGEST = 8192
"""Tokens of the largest one, unless more are asked for."""
LAUNCHES, LAUNCH_US, FLOPS_PER_US = 8, 90.0, 4e8
"""Operations of a layer, what each costs the host, and what a large GPU computes meanwhile. On an H100 steps of Qwen3-0.6B took 15 to 20 ms
of launches, 65 to 90 µs per operation, beside 5 ms of scheduling, and 10.7 ms of kernels at 4,096 tokens (docs/performance/engine.md)."""


def most_tokens(c: ModelConfig) -> int:
    """Tokens of a step whose arithmetic takes as long as its launches."""
    heads = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    inner = c.intermediate_size if c.moe is None else c.moe.top_k * c.moe.intermediate_size
    flops = 2 * c.hidden_size * (heads + 3 * inner)
    return min(LARGEST, int(LAUNCHES * LAUNCH_US * FLOPS_PER_US / flops))


def sizes(most: int) -> list[int]:
    """Tokens of the graphs for steps of up to `most`: each at most a quarter more than the one before it above 64, an eighth above 512."""
    found, size = [], SMALLEST
    while size < most:
        found.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(SMALLEST, octave // (4 if size < 512 else 8))
    return [*found, most] if most > 0 else []


@dataclass
class PromptGraph:
    """Steps of `size` tokens, padding included.

    Attributes:
        pieces: the graphs, one more than `calls`, which lie between them.
        holds: tensors that the graphs use and that must live as long as they do.
        reason: why steps cannot be captured; "" if they can, and on a CPU.
        nbytes: memory that the capture took.
    """

    size: int
    pieces: list[torch.cuda.CUDAGraph] = field(default_factory=list, repr=False)
    calls: list[tuple[Apart, int]] = field(default_factory=list, repr=False)
    holds: tuple[Tensor, ...] = field(default=(), repr=False)
    reason: str = ""
    steps: int = 0
    nbytes: int = 0


class PromptGraphs:
    """The graphs of a model over its cache for steps of up to `most` tokens, made as steps need them. `taken` is the memory that they take.

    Attributes:
        sizes: tokens of the graphs.
    """

    def __init__(self, model: Model, cache: PagedCache, most: int, taken: GraphMemory | None = None) -> None:
        self.model, self.cache = model, cache
        self.device = model.plans.device
        self.sizes = sizes(most)
        self.graphs: dict[int, PromptGraph] = {}
        self.taken = taken or GraphMemory(None, self.device)
        self._memory: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        # Tokens and positions, then the slots of each group.
        self._inputs = torch.zeros(2 + len(cache.windows), most, dtype=torch.int64, device=self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pool: tuple[int, int] | None = None
        self._has_run = False  # a step on the stream

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor | None:
        """The hidden states [tokens, hidden] of a step, valid until the next one; None if no graph fits it."""
        count = len(batch.tokens)
        place = bisect_left(self.sizes, count)
        if place == len(self.sizes) or batch.context_shard is not None:
            return None
        size = self.sizes[place]
        graph = self.graphs.get(size)
        if graph is None:
            graph = self.graphs[size] = self._make(size)
        if graph.reason:
            return None
        graph.steps += 1
        self._write(batch, size)
        parts = (batch, *batch.others)
        if self._stream is None:
            return self._compute(size, lambda call, group: call(parts[group]))[:count]
        for piece, (call, group) in zip(graph.pieces, graph.calls, strict=False):
            piece.replay()
            call(parts[group])
        graph.pieces[-1].replay()
        return self._hidden(size)[:count]

    def _write(self, batch: Batch, size: int) -> None:
        """The inputs of a step, padded to `size` tokens."""
        count, inputs = len(batch.tokens), self._inputs
        slots = [part.slots for part in (batch, *batch.others)]
        for row, values in zip(inputs.unbind(), (batch.tokens, batch.positions, *slots), strict=True):
            row[:count].copy_(values)
        if count < size:
            inputs[:2, count:size] = 0
            inputs[2:, count:size] = -1

    def _batch(self, size: int, apart: Callable[[Apart, int], None]) -> Batch:
        """A step of `size` tokens in these inputs, without sequences."""
        tokens, positions, *slots = self._inputs[:, :size].unbind()
        none = torch.empty(0, dtype=torch.int32, device=self.device)
        table = none.view(0, 0)
        cuts = Cuts(self._take, apart)
        batch = Batch(tokens, positions, slots[0], none, none, table, none, 0, 0, (), cuts=cuts)
        return with_groups(batch, slots, [table] * len(slots))

    def _compute(self, size: int, apart: Callable[[Apart, int], None]) -> Tensor:
        """Run the layers over the inputs; returns the hidden states in memory of their own."""
        hidden = self._hidden(size)
        hidden.copy_(self.model.forward(self._batch(size, apart), self.cache))
        return hidden

    def _hidden(self, size: int) -> Tensor:
        return self._take("hidden", (size, self.model.config.hidden_size), self.model.plans.dtype)

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The first rows of the memory of this name and width, which all graphs and layers share."""
        key = (name, shape[1:])
        memory = self._memory.get(key)
        if memory is None:
            if self._stream is not None and torch.cuda.is_current_stream_capturing():
                raise UnpreparedError(
                    f"{name} of {shape[1:]} has no memory yet: run a step before one is captured"
                )
            whole = (self.sizes[-1], *shape[1:])
            memory = self._memory[key] = torch.zeros(prod(whole), dtype=dtype, device=self.device)
        return memory[: prod(shape)].view(shape)

    def _make(self, size: int) -> PromptGraph:
        made = PromptGraph(size)
        if self._stream is None:
            return made
        if self.taken.is_full:
            made.reason = OVER_BOUND
            return made
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            reason, failure = why_not_captured(partial(self._capture, made, self._stream))
        finally:
            current.wait_stream(self._stream)
        made.reason = self.taken.settled(reason)
        if made.reason:
            self.taken.give_back(made.nbytes)
            made.pieces, made.calls, made.holds, made.nbytes = [], [], (), 0
        if made.reason == OVER_BOUND:
            torch.cuda.empty_cache()
            LOG.warning(
                "%s: steps with prompts of %d tokens, and others whose graphs are not captured yet, run kernel by kernel, which is slower; "
                "a larger graph_memory or a smaller prompt_graphs has all of them",
                self.taken,
                size,
            )
        if failure:
            torch.cuda.empty_cache()
            LOG.warning(
                "there is no memory to capture steps of %d tokens, which run kernel by kernel: %s",
                size,
                failure,
            )
        return made

    def _capture(self, made: PromptGraph, stream: torch.cuda.Stream) -> None:
        """Capture a step of padding on the stream, after a run where one is needed."""
        with torch.cuda.device(self.device):
            with torch.cuda.stream(stream):
                self._hidden(made.size)
                self._inputs[:2, : made.size] = 0
                self._inputs[2:, : made.size] = -1
            run, capture = partial(self._run_before, made, stream), partial(self._record, made, stream)
            run_and_capture(run, capture, self._has_run and self.model.plans.mesh.world == 1)
            with torch.cuda.stream(stream):
                made.holds = self.model.plans.workspaces.held()

    def _run_before(self, made: PromptGraph, stream: torch.cuda.Stream) -> None:
        """Run a step of padding, without attention."""
        with torch.cuda.stream(stream), together(self.model.plans.mesh):
            self._compute(made.size, lambda call, group: None)
        self._has_run = True

    def _record(self, made: PromptGraph, stream: torch.cuda.Stream) -> None:
        """Capture a step in pieces, without attention."""
        if not any(graph.pieces for graph in self.graphs.values()):
            # A pool ends with its last graph, also with one whose capture failed: torch refuses it from then on.
            self._pool = torch.cuda.graph_pool_handle()
        made.pieces, made.calls = [], []
        before = self.taken.used
        # Other threads may use the device during the capture.
        options = {"pool": self._pool, "capture_error_mode": "thread_local"}
        with self.taken.measured(), capturing_pieces(stream, **options) as pieces:

            def cut(call: Apart, group: int) -> None:
                pieces.cut()
                made.calls.append((call, group))

            self._compute(made.size, cut)
        made.pieces = pieces.graphs
        made.nbytes = self.taken.used - before

    def explain(self) -> list[dict[str, Any]]:
        """A row for each graph, with the keys of `DecodeGraphs.explain`."""
        row = dict.fromkeys(("seqs", "tokens_per_seq", "max_ctx"))
        return [
            row
            | {"captured": bool(graph.pieces), "bytes": graph.nbytes, "steps": graph.steps}
            | {"reason": graph.reason or f"up to {graph.size} tokens, in pieces between attention calls"}
            for graph in self.graphs.values()
        ]
