"""Verifying many candidates of many problems in several child processes at once, which also compiles them.

What a worker keeps decides what it gets next. Arguments of one problem serve all kernels that are verified on it, so its
candidates go to a worker together; a Triton kernel at one configuration is compiled once for all problems that it is verified
on, so those go to a worker together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from gristmill.autotune.clock import now
from gristmill.autotune.place import Place
from gristmill.bench.options import Job, Option
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernel_registry.store import Verification, config_key, target_key

CHUNK = 32
"""Candidates that a worker takes at a time at most."""

Task = tuple[Job, Option, Problem]
"""A candidate, and the problem that it is verified on."""


def verify_all(
    pairs: Sequence[tuple[Job, Option]], here: Place, pool: Sequence[Any], deadline: float
) -> list[Verification]:
    """A record of every option that was verified, in any order; past `deadline` only defaults still are.

    What several problems have in common, the same cut-out of a weight at the same configuration, is verified once.
    """
    waiting, stopped = deque(chunks(pairs, len(pool))), Event()

    def work(worker: Any) -> list[Verification]:
        found = []
        while waiting and not stopped.is_set():
            try:
                chunk = waiting.popleft()
            except IndexError:  # another thread had it
                break
            for job, option, small in chunk:
                if stopped.is_set():
                    break
                if not option.default and now() > deadline:
                    continue
                outcome = worker.verify(job.op, option.kernel, option.config, small, here.device or "cpu")
                if not outcome["judged"]:
                    continue
                found.append(
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
        return found

    with ThreadPoolExecutor(len(pool)) as threads:
        try:
            return [record for part in threads.map(work, pool) for record in part]
        except (
            BaseException
        ):  # an interrupt: nothing more is begun, and what a worker is at is not waited for
            stopped.set()
            for worker in pool:
                worker.close()
            raise


def chunks(pairs: Sequence[tuple[Job, Option]], workers: int) -> list[list[Task]]:
    """What a worker takes at a time: defaults first, then what has to be compiled, then the rest."""
    once: dict[tuple[str, str, str], Task] = {}
    for job, option in sorted(pairs, key=lambda pair: not pair[1].default):
        small = job.op.verification(job.problem)
        once.setdefault((job.op.name, str(small), option.name), (job, option, small))
    together: dict[tuple[bool, bool, str, str], list[Task]] = {}
    for job, option, small in once.values():
        compiled = option.kernel.language == "triton"
        alike = option.name if compiled else str(small)
        together.setdefault((not option.default, not compiled, job.op.name, alike), []).append(
            (job, option, small)
        )
    most = max(1, min(CHUNK, cdiv(len(once), workers)))
    order = sorted(together, key=lambda key: key[:2])
    return [together[key][at : at + most] for key in order for at in range(0, len(together[key]), most)]
