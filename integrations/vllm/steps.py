"""A step of the worker: launched by `execute_model`, its results taken when vLLM asks for them, by whatever thread.

With asynchronous scheduling vLLM sends step t + 1 before it takes the results of t, and takes them in another thread where the worker has a
process of its own. That thread only waits and translates (`StepOutput.get_output`). The state of requests changes in the worker's thread,
before the next step (`Steps.settle`): what a step in flight samples is `pending` until then, and read on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from gristmill.integrations.vllm import logprobs
from gristmill.integrations.vllm.requests import Requests, Sampling
from gristmill.kernels.collective import symmetric
from gristmill.runtime.errors import INVALID_LOGITS
from gristmill.runtime.logprobs import PromptLogprobs, PromptPart, prompt_parts
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import ScheduledRequest
from gristmill.runtime.speculation.speculator import accepted_runs, sampling_rows
from gristmill.runtime.step_details import StepResult
from gristmill.runtime.steps_in_flight import DEPTH, LaunchedStep

logger = init_logger(f"vllm.{__name__}")


class StepOutput(AsyncModelRunnerOutput):  # type: ignore[misc]  # vLLM is read without types
    """The output of a step that was launched.

    Attributes:
        step: the runner's.
        entries: what is computed.
        sampling: the requests that sample, in order.
    """

    def __init__(
        self,
        runner: Runner,
        step: LaunchedStep,
        entries: Sequence[ScheduledRequest],
        sampling: Sequence[Sampling],
        prompts: Mapping[str, tuple[PromptLogprobs, PromptPart]],
        complete: Mapping[str, PromptLogprobs],
    ) -> None:
        self._runner, self.step, self.entries = runner, step, entries
        self.sampling = sampling
        self._prompts, self._complete = prompts, complete
        self._lock = threading.Lock()
        self._result: StepResult | None = None
        self._runs: list[list[int]] = []

    @property
    def done(self) -> bool:
        """Whether its results are there."""
        return self._result is not None

    def runs(self) -> list[list[int]]:
        """The new ids of each request that samples; waits for the step.

        A request for which there is none gets an end token, which ends it: vLLM has no answer of a worker that fails one request.
        """
        self._wait()
        end = next(iter(self._runner.model.config.eos_ids), 0)
        return [[end] if run == [-1] else run for run in self._runs]

    def _wait(self) -> StepResult:
        with self._lock:
            if self._result is None:
                result = self._runner.collect(self.step)
                symmetric.check(self._runner.model.plans.mesh.group)
                self._runs = accepted_runs([entry for entry in self.entries if entry.samples], result.ids)
                for name, (prompt, part) in self._prompts.items():
                    prompt.add(part, result.prompts[name])
                self._result = result
            return self._result

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step, and say what vLLM's scheduler has to know."""
        result, vocab = self._wait(), self._runner.model.config.vocab_size
        names = [entry.id for entry in self.entries]
        runs = dict(zip((one.request.id for one in self.sampling), self.runs(), strict=True))
        failed = [one.request.id for one, run in zip(self.sampling, self._runs, strict=True) if run == [-1]]
        for name in failed:
            logger.error("gristmill: request %s ends here: %s", name, result.errors.get(name, INVALID_LOGITS))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[runs.get(name, []) for name in names],
            logprobs=logprobs.sampled([(name, len(runs.get(name, []))) for name in names], result.logprobs),
            prompt_logprobs_dict={
                name: logprobs.of_prompt(prompt.logprobs, min(prompt.top, vocab))
                for name, prompt in self._complete.items()
            },
            num_nans_in_logits=dict.fromkeys(failed, vocab) if failed else None,
        )

    def get_kv_connector_output(self) -> None:
        """None: there is no connector. Asked for since vLLM 0.33."""


class Steps:
    """The steps of a worker in flight.

    Args:
        asynchronous: whether vLLM sends a step before it has the results of the last one.
    """

    def __init__(self, runner: Runner, requests: Requests, asynchronous: bool) -> None:
        self.runner, self.requests, self.asynchronous = runner, requests, asynchronous
        self._in_flight: list[StepOutput] = []

    def launch(self, scheduler_output: Any) -> StepOutput | None:
        """Launch a step of vLLM's scheduler; None if it has no tokens."""
        self.settle()
        requests = self.requests
        entries = requests.step(scheduler_output)
        if not entries:
            return None
        rows = [row for entry, first in requests.rows(entries) for row in sampling_rows(entry, first)]
        prompts = requests.prompts(entries)
        parts = prompt_parts(entries, prompts)
        step = self.runner.launch(entries, rows, parts)
        output = StepOutput(
            self.runner,
            step,
            entries,
            requests.sampling(entries),
            {name: (prompts[name], part) for name, part in parts.items()},
            requests.complete_prompts(entries),
        )
        self._in_flight.append(output)
        return output

    def complete(self, grammar_output: Any) -> None:
        """Launch the rest of the step that was launched last: the rows of structured outputs, which what vLLM's grammars allow limits."""
        last = self._in_flight[-1]
        limited = self.requests.allow(last.entries, grammar_output)
        if not limited:
            return
        # vLLM has the results of the steps whose tokens the grammars had to know.
        while (first := self._in_flight[0]) is not last and (
            first.done or any(one.request.id in limited for one in first.sampling)
        ):
            self._settle_oldest()
        self.runner.complete(last.step)

    def settle(self) -> None:
        """Let requests have the results that are there. Waits if vLLM scheduled without results that it has, or no more steps can be in flight."""
        while self._in_flight:
            oldest = self._in_flight[0]
            if self.asynchronous and not oldest.done and len(self._in_flight) < DEPTH:
                return
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        oldest = self._in_flight[0]
        self.requests.sampled(oldest.sampling, oldest.runs())
        del self._in_flight[0]
