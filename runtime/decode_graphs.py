"""Decode steps as CUDA graphs: one new token per sequence; one launch runs everything from the embedding to the sampled ids.

Two such steps differ only in their inputs. One copy writes these into buffers at fixed addresses, and a graph that was captured
over the buffers is replayed. There is one graph per power of two of sequences and per power of two of the context
bound, because launches are sized by bounds that the host knows (for example, the number of parts of a context in split attention). A step
uses the smallest graph that fits; padding slots read token 0 at position 0 and write nothing. A step whose logits are processed
before they are sampled (penalties, bans) uses a graph that ends with the logits.

A graph is captured when a step first needs it. The step runs once, which resolves and loads its kernels and sizes their scratch
memory, and a second time under capture. On a CPU the same step runs over the same buffers, without capture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gristmill.autotune.captures import capturing
from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.batch import Batch
from gristmill.runtime.cache import PagedCache
from gristmill.runtime.models import Model
from gristmill.runtime.sampler import Sampler, SamplingRow, SamplingTensors
from gristmill.runtime.scheduler import ScheduledRequest

LARGEST = 256
"""Sequences of the largest graph. In larger steps kernels are so long that their launches are hidden."""
SHORTEST = 512
"""The smallest context bound of a graph."""


class Buffers:
    """Inputs and outputs of decode steps of up to `seqs` sequences with up to `width` cache blocks each.

    All inputs are parts of one allocation, with a twin on the host from which one copy fills them.
    """

    def __init__(self, seqs: int, width: int, device: torch.device) -> None:
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            **dict.fromkeys(("tokens", "positions", "slots", "seed", "index"), (torch.int64, (seqs,))),
            **dict.fromkeys(("seq_lens", "top_k"), (torch.int32, (seqs,))),
            **dict.fromkeys(("temperature", "top_p", "min_p"), (torch.float32, (seqs,))),
            "table": (torch.int32, (seqs, width)),
        }
        # Tensors of 8-byte elements first, so that each part is aligned.
        sizes = {name: dtype.itemsize * torch.Size(shape).numel() for name, (dtype, shape) in shapes.items()}
        pinned = device.type == "cuda"
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device) if pinned else self._host
        parts: dict[str, Tensor] = {}
        self.host: dict[str, Any] = {}
        start = 0
        for name, (dtype, shape) in shapes.items():
            stop = start + sizes[name]
            parts[name] = self._device[start:stop].view(dtype).view(shape)
            self.host[name] = self._host[start:stop].view(dtype).view(shape).numpy()
            start = stop
        self.seqs = seqs
        self.parts = parts
        self.query_start = torch.arange(seqs + 1, dtype=torch.int32, device=device)
        self.rows = torch.arange(seqs, device=device)
        self.ids = torch.zeros(seqs, dtype=torch.int64, device=device)
        self.sampling = SamplingTensors(
            *(parts[name] for name in ("temperature", "top_p", "min_p", "seed", "index", "top_k"))
        )

    def batch(self, bound: int) -> Batch:
        """The step for the layers; no context is longer than `bound`."""
        parts = self.parts
        return Batch(
            parts["tokens"],
            parts["positions"],
            parts["slots"],
            self.query_start,
            parts["seq_lens"],
            parts["table"],
            self.rows,
            max_q=1,
            max_ctx=bound,
            fresh=False,
        )

    def fill(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        block_size: int,
        top_k: Callable[[SamplingRow], int],
    ) -> None:
        """Send the inputs of a step to the device. The previous step has ended, because its ids were read."""
        host, count = self.host, len(entries)
        host["tokens"][:count] = [entry.tokens[0] for entry in entries]
        host["positions"][:count] = [entry.start for entry in entries]
        host["slots"][:count] = [entry.slots(block_size)[0] for entry in entries]
        host["seq_lens"][:count] = [entry.context for entry in entries]
        table = host["table"]
        for place, entry in enumerate(entries):
            table[place, : len(entry.block_ids)] = entry.block_ids
        host["seed"][:count] = [row.seed for row in rows]
        host["index"][:count] = [row.index for row in rows]
        host["top_k"][:count] = [top_k(row) for row in rows]
        for name in ("temperature", "top_p", "min_p"):
            host[name][:count] = [getattr(row.params, name) for row in rows]
        self._idle(count)
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def _idle(self, count: int) -> None:
        """Pad the slots from `count` on: a query that reads one key, writes none, and takes the most likely token."""
        host = self.host
        for name in ("tokens", "positions", "temperature", "min_p", "seed", "index", "top_k"):
            host[name][count:] = 0
        host["slots"][count:] = -1
        host["seq_lens"][count:] = 1
        host["top_p"][count:] = 1
        host["table"][count:, 0] = 0


@dataclass
class DecodeGraph:
    """Steps of `seqs` sequences and contexts up to `bound`. samples: the graph ends with sampled ids, in its buffers; else with
    logits. reason: why steps cannot be captured; "" if they can, and on a CPU. holds: objects that the graph uses and that must
    live as long."""

    seqs: int
    bound: int
    samples: bool
    buffers: Buffers
    logits: Tensor | None = field(default=None, repr=False)
    reason: str = ""
    graph: Any = None
    steps: int = 0
    holds: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def captured(self) -> bool:
        return self.graph is not None


class DecodeGraphs:
    """The decode graphs of a model over its cache, made as steps need them."""

    def __init__(self, model: Model, cache: PagedCache, sampler: Sampler) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        self.device = model.plans.device
        self.graphs: dict[tuple[int, int, bool], DecodeGraph] = {}
        self.refused: Counter[str] = Counter()
        self._limit = min(model.config.max_position, cache.num_blocks * cache.block_size)
        self._cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None

    def run(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int] | None:
        """The sampled ids of a decode step; None if no graph fits the step, with the reason counted in `refused`."""
        graph = self._run(entries, rows, samples=True)
        return None if graph is None else graph.buffers.ids[: len(entries)].tolist()

    def logits(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> Tensor | None:
        """The logits [entries, vocab] of a decode step, valid until the next one; None as in `run`."""
        graph = self._run(entries, rows, samples=False)
        return None if graph is None or graph.logits is None else graph.logits[: len(entries)]

    def _run(
        self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow], samples: bool
    ) -> DecodeGraph | None:
        if reason := self.why_not(entries):
            self.refused[reason] += 1
            return None
        graph = self.graph(len(entries), max(entry.context for entry in entries), samples)
        if graph.reason:
            self.refused[graph.reason] += 1
            return None
        graph.buffers.fill(entries, rows, self.cache.block_size, self.sampler.top_k)
        if graph.graph is not None:
            graph.graph.replay()
        else:
            self.compute(graph)
        graph.steps += 1
        return graph

    def why_not(self, entries: Sequence[ScheduledRequest]) -> str:
        """Why a step cannot run as a graph; "" if it can."""
        if any(entry.count != 1 for entry in entries):
            return "a sequence has several new tokens"
        if not all(entry.samples for entry in entries):
            return "a sequence is inside its prompt"
        return f"over {LARGEST} sequences" if len(entries) > LARGEST else ""

    def bound(self, context: int) -> int:
        """The longest context of the graph for contexts up to `context`."""
        return min(max(SHORTEST, 1 << (context - 1).bit_length()), max(self._limit, context))

    def graph(self, seqs: int, context: int, samples: bool = True) -> DecodeGraph:
        """The graph for steps of `seqs` sequences and contexts up to `context`; made if there is none."""
        key = (1 << (seqs - 1).bit_length(), self.bound(context), samples)
        if key not in self.graphs:
            self.graphs[key] = self._make(*key)
        return self.graphs[key]

    def explain(self) -> list[dict[str, Any]]:
        """A row for each graph, {"seqs", "max_ctx", "samples", "captured", "steps", "reason"}, and one for each kind of step
        without a graph, whose seqs, max_ctx and samples are None. samples: the graph includes sampling; otherwise it ends with the
        logits, for steps whose logits are processed."""
        rows = [
            {
                "seqs": g.seqs,
                "max_ctx": g.bound,
                "samples": g.samples,
                "captured": g.captured,
                "steps": g.steps,
                "reason": g.reason,
            }
            for g in self.graphs.values()
        ]
        return rows + [
            {
                "seqs": None,
                "max_ctx": None,
                "samples": None,
                "captured": False,
                "steps": count,
                "reason": reason,
            }
            for reason, count in self.refused.items()
        ]

    @torch.inference_mode()
    def _make(self, seqs: int, bound: int, samples: bool) -> DecodeGraph:
        made = DecodeGraph(
            seqs, bound, samples, Buffers(seqs, cdiv(bound, self.cache.block_size), self.device)
        )
        made.buffers.fill([], [], self.cache.block_size, self.sampler.top_k)
        if self._stream is None:
            return made
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            self.compute(made)
            made.holds = self.model.plans.arenas.held()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device during the capture.
            with capturing(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self.compute(made)
        except UnpreparedError as error:
            made.reason = str(error)
            return made
        except RuntimeError as error:
            raise RuntimeError(
                f"a decode step of {seqs} sequences could not be captured, though its kernels are declared to be "
                f"capturable: {error}; decode_graphs=False runs steps kernel by kernel"
            ) from error
        made.graph = graph
        return made

    def compute(self, made: DecodeGraph) -> None:
        """Run the step of a graph kernel by kernel."""
        with torch.cuda.device(self.device) if self._cuda else nullcontext():
            hidden = self.model.forward(made.buffers.batch(made.bound), self.cache)
            logits = self.model.logits(hidden)
            if made.samples:
                self.sampler.draw(logits, made.buffers.sampling, made.buffers.ids)
            else:
                made.logits = logits
