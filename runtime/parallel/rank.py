"""One rank of a model: a process that loads its share of the weights and runs the steps that the driver sends.

Started by the driver as ``python -m gristmill.runtime.parallel.rank``, with the descriptors of its pipes. It decides nothing: requests,
blocks and sizes come with each step, kernels from rank 0. It ends when the driver does.
"""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gristmill import ops
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.collective import symmetric
from gristmill.kernels.collective.groups import rendezvous
from gristmill.runtime.explain import explain_plans
from gristmill.runtime.kv_cache.size import cache_blocks, make_cache, step_limits
from gristmill.runtime.kv_transfer.remote_blocks import copy_shared
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.logprobs import PromptPart
from gristmill.runtime.parallel import child_process
from gristmill.runtime.parallel.choices import Asking, answer_in_thread, digests, installation
from gristmill.runtime.parallel.mesh import Mesh
from gristmill.runtime.parallel.wire import GROUP, PROGRESS, Job, Loaded, Mirror, Step
from gristmill.runtime.residency import Residency
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.runtime.step_details import StepResult
from gristmill.runtime.steps_in_flight import LaunchedStep
from gristmill.runtime.warm_up import WarmUp, warm_up

UNANSWERED = ("launch", "drop")
"""Messages that the driver does not wait for."""


class Rank:
    """A rank: its model, cache and runner. Its methods without an underscore are the messages of the driver."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._entered = 1  # the rendezvous
        self._message = 0
        self._steps: dict[int, LaunchedStep] = {}
        tempfile.tempdir = job.folder  # which the driver removes, however this process ends
        with open(Path(job.folder) / "progress", "r+b") as file:
            self._progress = mmap.mmap(file.fileno(), 0)
        self._note()
        device = "cpu"
        if job.device == "cuda":
            device = f"cuda:{job.rank}"
            torch.cuda.set_device(job.rank)  # before anything else touches a device
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // job.world))
        resolver = ops.resolver(torch.device(device), job.policy)
        connections = [Connection(descriptor) for descriptor in job.choices]
        if job.rank == 0:
            answer_in_thread(resolver, connections)
        else:
            resolver.chooser = Asking(connections[0])
        meeting = str(Path(job.folder) / "rendezvous")
        rendezvous(GROUP, job.rank, job.world, job.device, meeting, job.timeout, self._enter)
        self._resolver = resolver
        self._mesh = Mesh(job.rank, job.world, device, GROUP, job.context_parallel)

    def load(
        self, memory: int | float | None, max_seqs: int | None, max_batch_tokens: int | None, length: int
    ) -> Loaded:
        """Load the model for requests of up to `length` tokens; the other arguments are as in `Engine`."""
        job = self.job
        self._model = load_model(**job.loading, device=self._mesh.device, policy=job.policy, mesh=self._mesh)
        plans = self._model.plans
        max_seqs, max_batch_tokens = step_limits(plans.device, max_seqs, max_batch_tokens)
        length = cdiv(length, job.world) if job.context_parallel else length
        num_blocks = cache_blocks(self._model, plans.block_size, memory, max_seqs, length)
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
        cache = make_cache(self._model, num_blocks, self._model.plans.block_size)
        if self.job.context_parallel:
            prompt_graphs = 0  # each token of a prompt is a sequence of its own
        self._runner = Runner(self._model, cache, decode_graphs, max_seqs, prompt_graphs, graph_memory)
        self._mirror = Mirror(self._runner.processors)
        self._residency = Residency(self._runner)
        return cache.nbytes

    def launch(self, number: int, message: Step, prompts: Mapping[str, PromptPart]) -> None:
        """Launch a step. All ranks sample, with the same result, which the next step may read on the device."""
        self._steps[number] = self._runner.launch(*self._mirror.read(message), prompts)

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
        """As `gristmill.runtime.warm_up.warm_up`."""
        return warm_up(self._runner, config, run=run)

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

    def _enter(self) -> None:
        """Note that a collective call begins."""
        self._entered += 1
        self._note()

    def _begin(self, message: int) -> None:
        self._message = message
        self._note()

    def _note(self) -> None:
        PROGRESS.pack_into(self._progress, self.job.rank * PROGRESS.size, self._message, self._entered)


def serve(connection: Connection) -> None:
    """Answer messages, (name, number, arguments), with (number, result), until the driver closes the pipe. Those in `UNANSWERED` are
    not answered: an exception of theirs is the answer of the next one."""
    job: Job = connection.recv()
    if job.rank:
        warnings.simplefilter("ignore")  # rank 0 prints them
    rank = Rank(job)
    while True:
        try:
            name, number, arguments = connection.recv()
        except EOFError:
            return
        rank._begin(number)
        method: Callable[..., Any] = getattr(rank, name)
        answer = method(*arguments)
        if name not in UNANSWERED:
            connection.send((number, answer))


if __name__ == "__main__":
    child_process.serve(serve)
