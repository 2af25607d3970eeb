"""Processes that compute one model together: starts them, sends them messages, and notices when one dies or hangs.

One duplex pipe per rank carries messages, (name, number, arguments), and answers, (number, result). Every wait has a deadline, and also
notices the end of a process.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from gristmill.kernel_registry.policy import Policy, PolicyError
from gristmill.kernel_registry.select import NoKernelError
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import RankError, UsageError
from gristmill.runtime.parallel.child_process import ChildProcess, Failure, end_all, spawn, status
from gristmill.runtime.parallel.choices import difference
from gristmill.runtime.parallel.wire import PROGRESS, REPORT, Job, Loaded
from gristmill.runtime.progress import Progress
from gristmill.runtime.warm_up import WarmUp

LOADING = 10
"""The deadline of loading and of warm-up, as a multiple of that of a step."""
GRACE = 0.5
"""Seconds for the other ranks to report their errors, after one has failed."""


@dataclass(frozen=True)
class RanksConfig:
    """What ranks are started with.

    Attributes:
        loading: arguments of `load_model` other than device and policy.
        limit: tokens of the longest request.
        memory, max_seqs, max_batch_tokens, num_blocks, decode_graphs, prompt_graphs, graph_memory: as in `Engine`.
        timeout: seconds that a step may take.
        context_parallel: as in `Mesh`.
        warm: whether a warm-up follows the start, so that kernels are verified beside loading.
    """

    world: int
    device: str
    policy: Policy
    loading: Mapping[str, Any]
    limit: int
    memory: int | float | None = None
    max_seqs: int | None = None
    max_batch_tokens: int | None = None
    num_blocks: int | None = None
    decode_graphs: bool | None = None
    prompt_graphs: int | None = None
    graph_memory: int | float | None = None
    timeout: float = 300.0
    context_parallel: bool = False
    warm: bool = False


@dataclass(frozen=True)
class RemoteState:
    """The bytes of weights of all ranks together, and the type of their devices, ``cpu`` or ``cuda``. What is selected late, only the ranks know."""

    weight_bytes: int
    device: torch.device
    late: None = None


@dataclass(frozen=True)
class RemoteModel:
    """A model as far as it is known outside its ranks, with the configuration of the whole model."""

    config: ModelConfig
    plans: RemoteState


class RankProcesses:
    """The ranks of a model.

    Args:
        config: the configuration of the whole model.
        progress: told how far rank 0 is, while the ranks load.

    Attributes:
        module: what a rank runs: it answers messages, of them ``load`` by a `Loaded`.
        weight_bytes: bytes of all ranks together.
    """

    module: ClassVar[str]

    def __init__(self, config: ModelConfig, ranks: RanksConfig, progress: Progress | None = None) -> None:
        self.config = config
        self._progress = progress
        self.ranks = ranks
        self._processes: list[ChildProcess] = []
        self._folder: Path | None = None
        self._number = 0
        self._closed = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.weight_bytes = 0
        self._start(warm=ranks.warm)
        self._progress = None

    @property
    def model(self) -> RemoteModel:
        """Sizes of the model."""
        return RemoteModel(self.config, RemoteState(self.weight_bytes, self.device))

    @property
    def device(self) -> torch.device:
        """``cpu`` or ``cuda``."""
        return torch.device(self.ranks.device)

    def close(self) -> None:
        """End the ranks. No step can run afterwards; a second call does nothing."""
        self._closed = True
        self._end()

    # Messages --------------------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any, seconds: float | None = None) -> list[Any]:
        """Call a method of every `Rank`; returns the results in the order of the ranks.

        Args:
            seconds: the deadline; None = that of a step.

        Raises:
            RankError: a rank died, failed, or did not answer within the deadline. All have ended.
        """
        self._send(name, *arguments)
        return self._answers(name, self.ranks.timeout if seconds is None else seconds)

    def _send(self, name: str, *arguments: Any) -> None:
        if self._closed:
            raise RankError("the ranks were closed")
        self._number += 1
        message = pickle.dumps((name, self._number, arguments), pickle.HIGHEST_PROTOCOL)  # once for all ranks
        for process in self._processes:
            with suppress(BrokenPipeError, ConnectionResetError):  # its end is noticed with the answers
                process.connection.send_bytes(message)

    def ensure_started(self) -> None:
        """Start the ranks again after a failure, with an empty cache."""
        if not self._processes and not self._closed:
            self._start()

    def _answers(self, name: str, seconds: float) -> list[Any]:
        """The answers to the last message."""
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        waiting = {process.number: process for process in self._processes}
        while waiting:
            objects = [p.connection for p in waiting.values()] + [p.sentinel for p in self._processes]
            ready = wait(objects, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"{self._late(waiting)} did not answer {name!r} within {seconds:g} s", waiting)
            for process in [p for p in waiting.values() if p.connection in ready]:
                answer = self._receive(process)
                if answer is None:
                    self._fail(f"{name!r} failed", waiting)
                number, result = answer
                if number == REPORT:
                    if self._progress is not None:
                        self._progress(*result)
                    continue
                results[process.number] = result
                if number != self._number:
                    self._fail(
                        f"rank {process.number} answered message {number}, not {self._number}", waiting
                    )
                del waiting[process.number]
            if any(p.sentinel in ready for p in self._processes):
                self._fail(f"{name!r} failed", waiting)
        return [results[rank] for rank in sorted(results)]

    def _receive(self, process: ChildProcess) -> tuple[int, Any] | None:
        """An answer; None if the rank failed, or died."""
        try:
            answer = process.connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        if isinstance(answer, Failure):
            process.failure = answer
            return None
        number, result = answer
        return number, result

    # Start and end ---------------------------------------------------------------------------------------------------

    def _start(self, warm: bool = False) -> None:
        """Start the ranks, and load the model on them; `warm`: a warm-up follows."""
        ranks, world = self.ranks, self.ranks.world
        self._folder = folder = Path(tempfile.mkdtemp(prefix="gristmill-ranks-"))
        (folder / "progress").write_bytes(bytes(PROGRESS.size * world))
        self._finalizer = weakref.finalize(self, _end_all, self._processes, folder)
        self._number = 0
        self._reset()
        questions = [Pipe() for _ in range(1, world)]
        try:
            for rank in range(world):
                choices = [here for here, _ in questions] if rank == 0 else [questions[rank - 1][1]]
                descriptors = tuple(connection.fileno() for connection in choices)
                self._processes.append(spawn(self.module, rank, descriptors))
                job = Job(
                    rank,
                    world,
                    ranks.device,
                    str(folder),
                    LOADING * ranks.timeout,
                    ranks.policy,
                    ranks.loading,
                    descriptors,
                    ranks.context_parallel,
                )
                self._processes[-1].connection.send(job)
        except BaseException:
            self._end()
            raise
        finally:
            for pair in questions:
                for connection in pair:
                    connection.close()
        try:
            self._load(warm)
        except BaseException:
            self._end()
            raise

    def _load(self, warm: bool) -> None:
        """Have the ranks load the model, after each start; `warm`: a warm-up follows."""
        raise NotImplementedError

    def _reset(self) -> None:
        """The ranks are new, and know nothing."""

    def _loaded(self, *arguments: Any) -> list[Loaded]:
        """The answers to ``load``, of ranks that are alike."""
        loaded: list[Loaded] = self.call("load", *arguments, seconds=LOADING * self.ranks.timeout)
        first = loaded[0]
        for rank, other in enumerate(loaded):
            if other.installation != first.installation:
                raise RankError(
                    f"rank {rank} is not like rank 0: {other.installation}, and rank 0 has {first.installation}"
                )
        self._compare([rank.choices for rank in loaded])
        self.weight_bytes = sum(rank.weight_bytes for rank in loaded)
        return loaded

    def _warmed(self, progress: Progress | None, *arguments: Any) -> WarmUp:
        """The report of ``warm_up``, after which all ranks must have chosen the same kernels."""
        self._progress = progress
        try:
            report: WarmUp = self.call("warm_up", *arguments, seconds=LOADING * self.ranks.timeout)[0]
        finally:
            self._progress = None
        self._compare(self.call("choices"))
        return report

    def _compare(self, choices: Sequence[dict[str, str]]) -> None:
        for rank, other in enumerate(choices):
            if different := difference(choices[0], other):
                self._end()
                raise RankError(f"rank {rank} has other kernels than rank 0 for {different}")

    def _late(self, waiting: Mapping[int, ChildProcess]) -> str:
        """The ranks that the others wait for: of those that have not answered, the ones that made the least progress."""
        if self._folder is None:
            return "the ranks"
        data = (self._folder / "progress").read_bytes()
        progress = {rank: PROGRESS.unpack_from(data, rank * PROGRESS.size) for rank in waiting}
        least = min(progress.values())
        late = [str(rank) for rank, place in progress.items() if place == least]
        return f"rank{'s' if len(late) > 1 else ''} {' and '.join(late)}"

    def _fail(self, reason: str, waiting: Mapping[int, ChildProcess]) -> NoReturn:
        """End all ranks, and raise the error of the one that failed first."""
        until = time.monotonic() + GRACE
        open_pipes = {rank: p for rank, p in waiting.items() if p.failure is None}
        closed: list[ChildProcess] = []
        while open_pipes and (left := until - time.monotonic()) > 0:
            for connection in wait([p.connection for p in open_pipes.values()], left):
                process = next(p for p in open_pipes.values() if p.connection is connection)
                while (answer := self._receive(process)) is not None and process.connection.poll():
                    pass
                if answer is None:
                    closed.append(open_pipes.pop(process.number))
        # The pipe of a process that dies closes before its status is known, which on a busy machine takes a while.
        died = {p.number: p for p in closed if p.failure is None}
        until = time.monotonic() + GRACE
        for process in died.values():
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, until - time.monotonic()))
        ends = {p.number: p.process.poll() for p in self._processes if p.failure is None}
        killed = [
            f"rank {rank} died ({'its pipe is closed' if code is None else status(code)})"
            for rank, code in ends.items()
            if code is not None or rank in died
        ]
        failures = sorted(
            ((p.failure.at, p.number, p.failure) for p in self._processes if p.failure is not None),
            key=lambda item: item[:2],
        )
        self._end()
        if killed:
            raise RankError(f"{' and '.join(killed)}: {reason}, all ranks were ended")
        if not failures:
            raise RankError(f"{reason}; all ranks were ended")
        _, rank, failure = failures[0]
        if isinstance(failure.error, UsageError | PolicyError | NoKernelError):
            raise failure.error
        raise RankError(f"rank {rank}: {reason}, all ranks were ended\n{failure.text}") from failure.error

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._processes, self._folder = [], None


def _end_all(processes: list[ChildProcess], folder: Path) -> None:
    """Kill all ranks, also when the program ends or the runner is collected."""
    end_all(processes)
    processes.clear()
    shutil.rmtree(folder, ignore_errors=True)
