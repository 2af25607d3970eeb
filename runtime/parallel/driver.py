"""The driver of a model that generates over several ranks: it has the interface of `Runner`, as far as an engine uses it, and holds neither
weights nor a cache, nor touches a GPU. `RankProcesses` has its processes and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gristmill.runtime.config import ModelConfig
from gristmill.runtime.logprobs import PromptPart
from gristmill.runtime.parallel.rank_processes import LOADING, RankProcesses, RanksConfig
from gristmill.runtime.parallel.wire import Sender
from gristmill.runtime.progress import Progress
from gristmill.runtime.runner import NO_PROMPTS
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest, SchedulerConfig
from gristmill.runtime.step_details import StepResult
from gristmill.runtime.warm_up import WarmUp


@dataclass(frozen=True)
class RemoteCache:
    """The sizes of a cache of one group of layers; `nbytes` is of all ranks together."""

    num_blocks: int
    block_size: int
    nbytes: int
    windows: tuple[int, ...] = (0,)


class ParallelRunner(RankProcesses):
    """A model on several ranks.

    Attributes:
        config: the configuration of the whole model.
        num_blocks, max_seqs, max_batch_tokens: as many as the ranks can hold.
        weight_bytes, cache_bytes: bytes of all ranks together.
        processors: the requests whose logits are processed, by the ranks.
    """

    module = "gristmill.runtime.parallel.rank"

    def __init__(self, config: ModelConfig, ranks: RanksConfig, progress: Progress | None = None) -> None:
        self.processors = Sender()
        self._with_grammars: dict[int, list[str]] = {}  # requests of steps that wait for masks, by the step
        self.num_blocks: int | None = ranks.num_blocks
        super().__init__(config, ranks, progress)

    @property
    def cache(self) -> RemoteCache:
        """Sizes of the cache. Every rank has all blocks, with its own heads, or its own tokens."""
        size = self.ranks.loading["block_size"] * (self.ranks.world if self.ranks.context_parallel else 1)
        return RemoteCache(self.num_blocks or 0, size, self.cache_bytes)

    graph_bytes: None = None
    """Only the ranks know."""

    # As a runner -----------------------------------------------------------------------------------------------------

    def run(self, entries: Sequence[ScheduledRequest], rows: Sequence[SamplingRow]) -> list[int]:
        """As `Runner.run`."""
        return self.collect(self.launch(entries, rows)).ids

    def launch(
        self,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[SamplingRow],
        prompts: Mapping[str, PromptPart] = NO_PROMPTS,
    ) -> int:
        """As `Runner.launch`: the ranks have the step, and do not answer before it is collected. Returns the number of the message."""
        self.ensure_started()
        step = self._number + 1
        self._send("launch", step, self.processors.step(entries, rows), prompts)
        if names := self.processors.with_grammars(entries):
            self._with_grammars[step] = names
        return step

    def complete(self, step: int) -> None:
        """As `Runner.complete`: the ranks get what the grammars of requests allow, and sample their rows."""
        names = self._with_grammars.pop(step, None)
        if names and (masks := self.processors.masks(names)):
            self._send("complete", step, masks)

    def collect(self, step: int) -> StepResult:
        """As `Runner.collect`."""
        self.complete(step)
        result: StepResult = self.call("collect", step)[0]
        return replace(result, errors=self.processors.explained(result.errors)) if result.errors else result

    def drop(self, step: int) -> None:
        """As `Runner.drop`."""
        self._with_grammars.pop(step, None)
        if self._processes:
            self._send("drop", step)

    def logits(self, entries: Sequence[ScheduledRequest]) -> torch.Tensor:
        """As `Runner.logits`, on the CPU."""
        self.ensure_started()
        logits: torch.Tensor = torch.from_numpy(self.call("logits", self.processors.step(entries, ()))[0])
        return logits

    def warm_up(self, config: SchedulerConfig, run: bool, progress: Progress | None = None) -> WarmUp:
        """As `gristmill.runtime.warm_up.warm_up`, on all ranks; then all ranks must have chosen the same kernels."""
        return self._warmed(progress, config, run)

    def explain(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows of `LLM.explain` and of `LLM.explain_graphs`, of rank 0."""
        rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = self.call("explain")[0]
        return rows

    def _reset(self) -> None:
        self._with_grammars.clear()
        self.processors.reset()

    def _load(self, warm: bool) -> None:
        ranks = self.ranks
        loaded = self._loaded(ranks.memory, ranks.max_seqs, ranks.max_batch_tokens, ranks.limit, warm)
        self.max_seqs, self.max_batch_tokens = loaded[0].max_seqs, loaded[0].max_batch_tokens
        if self.num_blocks is None:
            self.num_blocks = min(rank.num_blocks for rank in loaded)
        graphs = ranks.decode_graphs, ranks.prompt_graphs, ranks.graph_memory
        sizes = self.num_blocks, self.max_seqs
        self.cache_bytes = sum(self.call("allocate", *sizes, *graphs, seconds=LOADING * ranks.timeout))
