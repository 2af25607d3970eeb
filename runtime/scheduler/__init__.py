"""Continuous batching without phases, on the host and without torch.

Every request has *known* tokens (its prompt and what was sampled) and *computed* tokens (those whose KV is in the
cache). A step computes known tokens that are not computed yet, under budgets of tokens, sequences and blocks. Chunked prefill, mixed
batches, prefix hits, preemption by recomputation and speculative drafts are all special cases.

    scheduler = Scheduler(SchedulerConfig(num_blocks=1024))
    scheduler.add(Request("a", prompt_ids=[1, 2, 3], max_tokens=16))
    while scheduler.has_unfinished():
        step = scheduler.schedule()          # pure: does not change the scheduler
        scheduler.commit(step)               # applies it
        sampled = run_the_model(step)        # one id for each entry of step.sampling()
        for output in scheduler.update(step, sampled):
            ...

A step that is dropped before ``commit`` leaves no trace. Admission has three outcomes, ADMIT, WAIT and NEVER: a request that can never fit is
refused when it is added, with its need and the capacity. ``on_preempt`` is called with a request before its blocks are reused, so that they
can be copied elsewhere. After every step free + cached + referenced blocks = all blocks. If requests are unfinished, a step is empty and
no external event is pending, `SchedulerStuck` is raised with a dump of the state.
"""

from gristmill.runtime.scheduler.config import SchedulerConfig
from gristmill.runtime.scheduler.policy import Admission
from gristmill.runtime.scheduler.request import FinishReason, Request, RequestState
from gristmill.runtime.scheduler.scheduler import (
    QueueFull,
    RequestTooLarge,
    Scheduler,
    SchedulerStuck,
)
from gristmill.runtime.scheduler.state import Pause
from gristmill.runtime.scheduler.step import RequestOutput, ScheduledRequest, ScheduledStep, TokenLogprobs

__all__ = [
    "Admission",
    "FinishReason",
    "Pause",
    "QueueFull",
    "Request",
    "RequestOutput",
    "RequestState",
    "RequestTooLarge",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStuck",
    "ScheduledStep",
    "TokenLogprobs",
]
