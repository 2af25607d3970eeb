"""The three decisions of a scheduler as pure functions: order of service, admission, preemption."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from gristmill.runtime.scheduler.config import SchedulerConfig
from gristmill.runtime.scheduler.request import Request


class Admission(Enum):
    """The three outcomes. A request with none of them would hang."""

    ADMIT = "admit"
    WAIT = "wait"
    NEVER = "never"


def queue_key(config: SchedulerConfig, request: Request) -> tuple[int, int]:
    """Order of requests, smallest first. Total and fixed for a request's life.

    The waiting queue is sorted by it, so a preempted request returns to its place and a skipped one keeps it; and the
    victim is the largest by it, so the smallest running request is never preempted for another and always progresses.

    Under "priority" a level is worth `priority_span` arrivals. A request is passed only by younger ones whose arrival is within
    that many for each level between them: their number is bounded when it arrives, so it cannot starve.
    """
    if config.policy == "fcfs":
        return (0, request.arrival)
    if config.priority_span is None:
        return (request.priority, request.arrival)
    return (request.priority * config.priority_span + request.arrival, request.arrival)


def admission(need: int, available: int, total: int) -> Admission:
    """Whether a request that needs `need` blocks is admitted, with `available` blocks now and at most `total`."""
    if need > total:
        return Admission.NEVER
    return Admission.ADMIT if need <= available else Admission.WAIT


def choose_victim(config: SchedulerConfig, running: Iterable[Request]) -> Request:
    """The running request to preempt: the last in order."""
    return max(running, key=lambda request: queue_key(config, request))
