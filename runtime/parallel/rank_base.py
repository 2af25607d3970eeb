"""What ranks of every kind of model have in common: their place among the others, and messages of the driver.

A rank is a process, with the descriptors of its pipes. It decides nothing: what is computed comes with each message, kernels from rank 0.
It ends when the driver does.
"""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gristmill import ops
from gristmill.kernels.collective.groups import rendezvous
from gristmill.runtime.parallel.choices import Asking
from gristmill.runtime.parallel.mesh import Mesh
from gristmill.runtime.parallel.reporter import Reporter
from gristmill.runtime.parallel.wire import GROUP, PROGRESS, REPORT, Job

UNANSWERED = ("launch", "complete", "drop")
"""Messages that the driver does not wait for."""


class RankBase:
    """A rank. Its methods without an underscore are the messages of the driver."""

    def __init__(self, job: Job, connection: Connection) -> None:
        self.job = job
        # All ranks do the same, and one says so.
        self._report = Reporter(lambda report: connection.send((REPORT, report)) if job.rank == 0 else None)
        self._entered = 1  # the rendezvous
        self._message = 0
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
        self._choices = [Connection(descriptor) for descriptor in job.choices]
        if job.rank > 0:
            self._asking = resolver.chooser = Asking(self._choices[0])
        meeting = str(Path(job.folder) / "rendezvous")
        rendezvous(GROUP, job.rank, job.world, job.device, meeting, job.timeout, self._enter)
        self._resolver = resolver
        self._mesh = Mesh(job.rank, job.world, device, GROUP, job.context_parallel)

    def _enter(self) -> None:
        """Note that a collective call begins."""
        self._entered += 1
        self._note()

    def _begin(self, message: int) -> None:
        self._message = message
        self._note()

    def _note(self) -> None:
        PROGRESS.pack_into(self._progress, self.job.rank * PROGRESS.size, self._message, self._entered)


def serve_rank(connection: Connection, kind: Callable[[Job, Connection], RankBase]) -> None:
    """Answer messages, (name, number, arguments), with (number, result), until the driver closes the pipe. Those in `UNANSWERED` are
    not answered: an exception of theirs is the answer of the next one."""
    job: Job = connection.recv()
    if job.rank:
        warnings.simplefilter("ignore")  # rank 0 prints them
    rank = kind(job, connection)
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
