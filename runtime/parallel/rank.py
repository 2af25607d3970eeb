"""One rank of a model: a process that loads its share of the weights and runs the steps that the driver sends.

Started by the driver as ``python -m gristmill.runtime.parallel.rank``. Requests, blocks and sizes come with each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.collective import symmetric
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.explain import explain_plans
from gristmill.runtime.kv_cache.paged import token_bytes
from gristmill.runtime.kv_cache.size import cache_blocks, make_cache, step_limits
from gristmill.runtime.kv_transfer.remote_blocks import copy_shared
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.logprobs import PromptPart
from gristmill.runtime.parallel import child_process
from gristmill.runtime.parallel.choices import answer_in_threads, digests, installation
from gristmill.runtime.parallel.rank_base import RankBase, serve_rank
from gristmill.runtime.parallel.wire import GROUP, Job, Loaded, Mirror, Step
from gristmill.runtime.residency import Residency
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.runtime.step_details import StepResult
from gristmill.runtime.steps_in_flight import LaunchedStep
from gristmill.runtime.verify_ahead import VerifiedAhead
from gristmill.runtime.warm_up import WarmUp, warm_up


class Rank(RankBase):
    """A rank: its model, cache and runner."""

    def __init__(self, job: Job, connection: Connection) -> None:
        self._ahead: VerifiedAhead | None = None
        self._steps: dict[int, LaunchedStep] = {}
        super().__init__(job, connection)

    def load(
        self,
        memory: int | float | None,
        max_seqs: int | None,
        max_batch_tokens: int | None,
        length: int,
        warm: bool,
    ) -> Loaded:
        """Load the model for requests of up to `length` tokens; the other arguments are as in `Engine`.

        Args:
            warm: a warm-up follows, so rank 0 begins to verify kernels for all ranks.
        """
        job = self.job
        if warm and job.rank == 0:
            self._ahead = VerifiedAhead(max_seqs, max_batch_tokens)
        if job.rank == 0:
            answer_in_threads(self._resolver, self._choices, self._ahead)
        self._model = load_model(
            **job.loading,
            device=self._mesh.device,
            policy=job.policy,
            mesh=self._mesh,
            begin=self._verify_ahead if warm else None,
            progress=partial(self._report, "weights"),
        )
        plans = self._model.plans
        if job.rank > 0:
            plans.on_bind = None
        max_seqs, max_batch_tokens = step_limits(plans.device, max_seqs, max_batch_tokens)
        length = cdiv(length, job.world) if job.context_parallel else length
        self._resolver.flush()  # the driver ends ranks by a signal
        beside = 0 if self._ahead is None else self._ahead.held_bytes()
        num_blocks = cache_blocks(self._model, plans.block_size, memory, max_seqs, length, beside=beside)
        return Loaded(
            num_blocks,
            max_seqs,
            max_batch_tokens,
            plans.weight_bytes,
            installation(self._resolver),
            digests(plans),
        )

    def allocate(
        self,
        num_blocks: int,
        max_seqs: int,
        decode_graphs: bool | None,
        prompt_graphs: int | None,
        graph_memory: int | float | None,
    ) -> int:
        """Allocate the cache, which has as many blocks on every rank; returns its bytes."""
        plans = self._model.plans
        if self._ahead is not None:
            block = plans.block_size * token_bytes(self._model.config, plans.dtype, plans.cache_format)
            self._ahead.make_room(num_blocks * block)
        cache = make_cache(self._model, num_blocks, plans.block_size)
        if self.job.context_parallel:
            prompt_graphs = 0  # what ranks exchange depends on the contexts of a step
        self._runner = Runner(self._model, cache, decode_graphs, max_seqs, prompt_graphs, graph_memory)
        self._mirror = Mirror(self._runner.processors)
        self._residency = Residency(self._runner)
        return cache.nbytes

    def launch(self, number: int, message: Step, prompts: Mapping[str, PromptPart]) -> None:
        """Launch a step. All ranks sample, with the same result, which the next step may read on the device."""
        self._steps[number] = self._runner.launch(*self._mirror.read(message), prompts)

    def complete(self, number: int, masks: Mapping[str, NDArray[np.int32]]) -> None:
        """The rows of a step that wait for their grammars can be sampled; `masks` as of `Sender.masks`."""
        self._mirror.allow(masks)
        self._runner.complete(self._steps[number])

    def collect(self, number: int) -> StepResult | None:
        """Wait for a step that was launched; its results, which only rank 0 sends."""
        result = self._runner.collect(self._steps.pop(number))
        symmetric.check(GROUP)
        return result if self.job.rank == 0 else None

    def drop(self, number: int) -> None:
        """A step will not be collected."""
        self._runner.drop(self._steps.pop(number))

    def logits(self, message: Step) -> Any:
        """As `Runner.logits`, as an array; None on ranks other than 0."""
        entries, _ = self._mirror.read(message)
        logits = self._runner.logits(entries)
        values = logits.cpu().numpy() if self.job.rank == 0 else None
        symmetric.check(GROUP)
        return values

    def warm_up(self, config: SchedulerConfig, run: bool) -> WarmUp:
        """As `gristmill.runtime.warm_up.warm_up`; `verified` counts from the beginning of loading where that verified ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()
        report = warm_up(self._runner, config, self._report, run=run)
        if ahead is not None:
            ahead.close()
            report = replace(report, verified=ahead.verified)
        self._resolver.flush()
        return report

    def sleep(self, level: int) -> None:
        """As `Residency.sleep`."""
        self._residency.sleep(level)

    def wake_up(self, parts: Sequence[Any]) -> None:
        """As `Residency.wake_up`."""
        self._residency.wake_up(parts)

    def explain(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The rows of `LLM.explain` and of `LLM.explain_graphs`."""
        return explain_plans(self._model.plans), self._runner.explain_graphs()

    def copy_shared(self, *arguments: Any) -> int:
        """As `copy_shared`."""
        return copy_shared(self._runner, self.job.rank, self.job.world, *arguments)

    def choices(self) -> dict[str, str]:
        """The digests of all plans as they are now."""
        return digests(self._model.plans)

    def _verify_ahead(self, plans: Plans, config: ModelConfig, weights: Weights) -> None:
        """Rank 0 verifies beside loading what layers call; other ranks, whose parts of a weight may have other sizes, tell it of theirs."""
        if self._ahead is not None:
            self._ahead.start(plans, config, weights)
        else:
            plans.on_bind = self._asking.expect


def serve(connection: Connection) -> None:
    """Answer the driver until it closes the pipe."""
    serve_rank(connection, Rank)


if __name__ == "__main__":
    child_process.serve(serve)
