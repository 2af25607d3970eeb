"""The engine, step by step: for programs that drive it themselves. `LLM` is the convenient way in.

engine = Engine(model_directory)
engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=16))
while engine.has_unfinished():
    for output in engine.step():
        print(output.id, output.new_ids, output.finish_reason)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gristmill.runtime.errors import UsageError
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import FinishReason, Request, RequestOutput, Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True)
class _Active:
    """A request with what the scheduler need not know of it."""

    request: Request
    params: SamplingParams
    seed: int


class Engine:
    """A scheduler and a runner: requests come in, tokens come out, one step at a time. Not thread-safe.

    runner: the model and its cache. config: budgets of the scheduler; its blocks must be those of the runner's cache.
    seed: where the seeds of requests come from that have none of their own.
    """

    def __init__(self, runner: Runner, config: SchedulerConfig, seed: int = 0) -> None:
        held = (runner.cache.num_blocks, runner.cache.block_size)
        if held != (config.num_blocks, config.block_size):
            raise UsageError(
                f"the cache has {held[0]} blocks of {held[1]} tokens, the scheduler {config.num_blocks} of {config.block_size}"
            )
        if type(seed) is not int:
            raise UsageError(f"seed must be an integer, got {seed!r}")
        self.runner = runner
        self.scheduler = Scheduler(config)
        self._active: dict[str, _Active] = {}
        self._seeds = random.Random(seed)

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt, token ids taken as they are.

        Raises:
            UsageError: an empty prompt, ids outside the vocabulary, an id in use, an argument of another type.
            RequestTooLarge: the prompt and one more token can never fit; it names need and capacity. QueueFull.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(
                f"request {request_id!r}: params must be a SamplingParams, got {type(params).__name__}"
            )
        if not isinstance(request_id, str) or type(priority) is not int:
            raise UsageError(
                f"a request has a text as its id and an integer as its priority, got {request_id!r} and {priority!r}"
            )
        if not isinstance(prompt_ids, Sequence):
            raise UsageError(
                f"request {request_id!r}: the prompt must be a list of token ids, got {type(prompt_ids).__name__}"
            )
        ids = list(prompt_ids)
        if not ids:
            raise UsageError(f"request {request_id!r}: the prompt is empty, at least one token id is needed")
        config = self.runner.model.config
        wrong = next((i for i in ids if type(i) is not int or not 0 <= i < config.vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"request {request_id!r}: prompt ids must be integers from 0 to {config.vocab_size - 1}, got {wrong!r}"
            )
        stop = {*params.stop_token_ids, *(() if params.ignore_eos else config.eos_ids)}
        request = Request(request_id, ids, params.max_tokens, stop, priority)
        self.scheduler.add(request)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        self._active[request_id] = _Active(request, params, seed)

    def step(self) -> list[RequestOutput]:
        """Compute one step; what it brought to whom. [] when nothing was to be done.

        An exception from the model leaves its requests as they were before the step.
        """
        plan = self.scheduler.plan()
        if not plan.entries:
            return []
        self.scheduler.commit(plan)
        rows = [self._row(entry.id) for entry in plan.sampling()]
        try:
            sampled = self.runner.run(plan.entries, rows)
        except BaseException:
            self.scheduler.discard(plan)
            raise
        # A row of NaN, or of nothing finite, ends its own request and no other.
        failed = [entry.id for entry, token in zip(plan.sampling(), sampled, strict=True) if token < 0]
        outputs = self.scheduler.abort(failed, FinishReason.ERROR) + self.scheduler.update(plan, sampled)
        for output in outputs:
            if output.finish_reason is not None:
                del self._active[output.id]
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; what it ended (unknown and finished ids are not in it)."""
        ended = self.scheduler.abort(request_ids)
        for output in ended:
            del self._active[output.id]
        return ended

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_unfinished()

    def _row(self, request_id: str) -> SamplingRow:
        active = self._active[request_id]
        request = active.request
        return SamplingRow(active.params, active.seed, len(request.tokens) - request.prompt_len)
