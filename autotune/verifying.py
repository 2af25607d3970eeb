"""Verify many candidates of many problems in several child processes, which also compiles them.

Work is distributed by what a worker can reuse. The arguments of a problem serve all kernels that are verified on it, so its
candidates go to one worker. A kernel of a language that is compiled where it runs is compiled once in one configuration for all its
problems, so those go to one worker too, and its configurations to many.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from gristmill.autotune.clock import now
from gristmill.autotune.options import Job, Option
from gristmill.autotune.place import Place
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.store import Verification, config_key, target_key

CHUNK = 32
"""The maximum number of candidates that a worker takes at a time."""

BURST = 24
"""Problems that all workers verify before they are timed on the idle machine: enough to keep every worker busy, and few
enough that at the deadline most verified problems have been timed."""

COMPILED = ("triton", "cutedsl")
"""Languages that are compiled where they run."""

Task = tuple[Job, Option, Problem]
"""A candidate and its problem."""


def key_of(job: Job, option: Option) -> tuple[str, str, str, str]:
    """The key under which problems share a verification: operation, cut-out problem, kernel, configuration."""
    kernel, config = option.kernel, option.config
    return job.op.name, str(job.op.verification(job.problem, kernel, config)), kernel.name, config_key(config)


def verify_all(
    pairs: Sequence[tuple[Job, Option]],
    here: Place,
    pool: Sequence[Any],
    deadline: float,
    end: float = math.inf,
) -> list[Verification]:
    """A record of every verified option, in any order; after `deadline` only defaults are verified, and after `end` nothing but the first.

    Problems that share a verification (the same cut-out of a weight in the same configuration) are verified once.
    """
    waiting, stopped, begun = deque(chunks(pairs, len(pool))), Event(), Event()

    def work(worker: Any) -> list[Verification]:
        verified = []
        while waiting and not stopped.is_set():
            try:
                chunk = waiting.popleft()
            except IndexError:  # another thread took it
                break
            for job, option, small in chunk:
                if stopped.is_set():
                    break
                if now() > deadline and not option.default or now() > end and begun.is_set():
                    continue
                begun.set()
                outcome = worker.verify(job.op, option.kernel, option.config, small, here.device or "cpu")
                if not outcome["judged"]:
                    continue
                verified.append(
                    Verification(
                        op=job.op.name,
                        kernel=option.kernel.name,
                        code=option.kernel.verification_hash(option.config),
                        config=config_key(option.config),
                        problem=str(small),
                        target=target_key(here.target),
                        toolchain=here.build.key(),
                        ok=outcome["ok"],
                        error=outcome["error"],
                        reason=outcome["reason"],
                    )
                )
        return verified

    with ThreadPoolExecutor(len(pool)) as threads:
        try:
            return [record for part in threads.map(work, pool) for record in part]
        except BaseException:  # an interrupt: start nothing more, and do not wait for the workers
            stopped.set()
            for worker in pool:
                worker.close()
            raise


def chunks(pairs: Sequence[tuple[Job, Option]], workers: int) -> list[list[Task]]:
    """The candidates that a worker takes at a time: defaults first, then those to compile, then the rest; in the order of `pairs` otherwise."""
    once: dict[tuple[str, str, str], Task] = {}
    for job, option in sorted(pairs, key=lambda pair: not pair[1].default):
        small = job.op.verification(job.problem, option.kernel, option.config)
        once.setdefault((job.op.name, str(small), option.name), (job, option, small))
    together: dict[tuple[bool, bool, str, str], list[Task]] = {}
    for job, option, small in once.values():
        compiled = option.kernel.language in COMPILED
        alike = option.name if compiled else str(small)
        together.setdefault((not option.default, not compiled, job.op.name, alike), []).append(
            (job, option, small)
        )
    most = max(1, min(CHUNK, cdiv(len(once), workers)))
    order = sorted(together, key=lambda key: key[:2])
    return [together[key][at : at + most] for key in order for at in range(0, len(together[key]), most)]
