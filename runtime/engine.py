"""The engine, step by step: for programs that drive it themselves. `LLM` is the convenient way in.

engine = Engine(model_directory)
engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=16))
while engine.has_unfinished():
    for output in engine.step():
        print(output.id, output.new_ids, output.finish_reason)
"""

from __future__ import annotations

import math
import random
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from gristmill.autotune import compilations
from gristmill.autotune.forks import has_device
from gristmill.autotune.worker import forked_workers
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.runtime.devices import notice
from gristmill.runtime.early_start import started_early
from gristmill.runtime.engine_config import EngineConfig, takes_options
from gristmill.runtime.engine_loading import load_engine
from gristmill.runtime.engine_memory import EngineMemory, freeze_before_load, freeze_heap
from gristmill.runtime.errors import RankError, UsageError, explain_memory
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.integers import as_integer, integers
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.start import identity_of, start_transfer
from gristmill.runtime.kv_transfer.transfer import Transfer
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.logprobs import PromptLogprobs
from gristmill.runtime.ownership import Ownership
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.parallel.remote import RemoteResidency
from gristmill.runtime.progress import Progress, progress_bar
from gristmill.runtime.residency import Residency
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams, check_params, check_timeout
from gristmill.runtime.scheduler import (
    Pause,
    Request,
    RequestOutput,
    ScheduledRequest,
    ScheduledStep,
    Scheduler,
    SchedulerConfig,
    TokenLogprobs,
)
from gristmill.runtime.speculation import DraftContext
from gristmill.runtime.speculation.config import Speculation
from gristmill.runtime.speculation.speculator import Speculator
from gristmill.runtime.step_pipeline import StepPipeline
from gristmill.runtime.steps_in_flight import DEPTH
from gristmill.runtime.verify_ahead import VerifiedAhead
from gristmill.runtime.warm_up import WarmUp, warm_up

PauseMode = Literal["abort", "wait", "keep"]


class EngineDraining(RuntimeError):
    """The engine is draining and takes no new requests."""


@dataclass(frozen=True, slots=True)
class _Active:
    """A request with its state outside the scheduler."""

    request: Request
    params: SamplingParams
    seed: int


class Engine(EngineMemory):
    """A model with its scheduler and paged cache: add requests, then run it step by step. Not thread-safe: while an `AsyncEngine`
    serves it, methods that change it raise UsageError in other threads.

    Args:
        model: a Hugging Face directory, a GGUF file, or either as `open_checkpoint` returned it.
        options: those of `EngineConfig`, by name.

    Raises:
        UsageError: an invalid argument; a model that does not fit in memory; for an invalid directory, its kinds ConfigError or CheckpointError.
        PolicyError: a policy that is unreadable, or that this machine cannot satisfy.
        NoKernelError: no kernel can run an operation of the model here under the policy.
    """

    @takes_options(EngineConfig)
    def __init__(self, model: str | Path | Checkpoint, **options: Any) -> None:
        self._load(model, EngineConfig.of(options))

    @classmethod
    def from_config(cls, model: str | Path | Checkpoint, config: EngineConfig) -> Engine:
        """As the constructor, with the options as one object."""
        engine = cls.__new__(cls)
        engine._load(model, config)
        return engine

    def _load(self, model: str | Path | Checkpoint, options: EngineConfig) -> None:
        speculation, transfer = options.speculation, options.transfer
        model = open_checkpoint(model)
        if options.task not in ("auto", "generate"):
            raise UsageError(
                f"an Engine generates; LLM(..., task={options.task!r}) makes embeddings or scores"
            )
        if transfer is not None:
            transfer = identity_of(transfer, model.path, options.quant, options.quant_head)
        begin, before = time.perf_counter(), compilations.total()
        ahead = VerifiedAhead(options.max_seqs, options.max_batch_tokens)
        warms_device = options.warm != "off" and str(options.device) != "cpu" and has_device()
        begins_early = warms_device and options.tensor_parallel == 1
        forks = forked_workers() if begins_early else nullcontext()
        early = started_early(options.device, options.loaded_policy) if begins_early else nullcontext()
        if warms_device:
            freeze_before_load(self)
        with forks, progress_bar() as progress, ahead, explain_memory(str(model.path), options.device):
            progress("weights", 0, 0)
            with early:
                runner, draft, config = load_engine(model, options, ahead, progress)
            self._start(
                runner,
                config,
                options.seed,
                options.async_steps,
                options.quant,
                speculation,
                draft,
                transfer,
            )
            if options.warm == "off":
                return
            ahead.stop()
            seconds = {"weights": time.perf_counter() - begin}
            try:
                report = self._warm_up(progress, run=runner.device.type == "cuda")
            except BaseException:
                self.close()
                raise
        verified = max(ahead.verified, report.verified)  # that of ranks counts what rank 0 did ahead
        compiled, reused = (now - then for now, then in zip(compilations.total(), before, strict=True))
        self.warmed = replace(
            report, seconds=seconds | report.seconds, verified=verified, compiled=compiled, reused=reused
        )
        notice(f"{model.path}: {self.warmed}")

    @classmethod
    def from_parts(
        cls,
        runner: Runner,
        config: SchedulerConfig,
        seed: int = 0,
        speculate: Speculation | str | None = None,
        async_steps: bool | None = None,
        draft: Runner | None = None,
        kv_transfer: KVTransfer | str | None = None,
    ) -> Engine:
        """An engine with an existing runner, for models that are not loaded from files, or share weights.

        Args:
            config: budgets of the scheduler.
            draft: the runner of the draft model, if `speculate` takes one; its token ids must be the model's.
            kv_transfer: as in the constructor, with an identity.

        Raises:
            UsageError: the scheduler's blocks are not those of the runner's cache, or its max_seqs is more than the runner's.
        """
        engine = cls.__new__(cls)
        speculation = None if speculate is None else Speculation.parse(speculate)
        transfer = None if kv_transfer is None else KVTransfer.parse(kv_transfer)
        engine._start(
            runner, config, seed, async_steps, speculation=speculation, draft=draft, transfer=transfer
        )
        return engine

    def _start(
        self,
        runner: Runner | ParallelRunner,
        config: SchedulerConfig,
        seed: int,
        async_steps: bool | None,
        quant: str | QuantScheme | torch.dtype | None = None,
        speculation: Speculation | None = None,
        draft: Runner | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        held = (runner.cache.num_blocks, runner.cache.block_size)
        if held != (config.num_blocks, config.block_size):
            raise UsageError(
                f"the cache has {held[0]} blocks of {held[1]} tokens, the scheduler {config.num_blocks} of {config.block_size}"
            )
        windows = runner.cache.windows
        if windows != config.windows:
            raise UsageError(
                f"the cache has groups with the windows {windows}, the scheduler {config.windows}: windows=cache.windows"
            )
        if config.max_seqs > runner.max_seqs:
            raise UsageError(
                f"the runner has rows for {runner.max_seqs} requests, and max_seqs of the scheduler is {config.max_seqs}"
            )
        if async_steps not in (True, False, None):
            raise UsageError(f"async_steps must be True, False or None, got {async_steps!r}")
        if async_steps is None:
            async_steps = runner.model.plans.device.type == "cuda"
        if (start := as_integer(seed)) is None:
            raise UsageError(f"seed must be an integer, got {seed!r}")
        self.runner = runner
        self.ownership = Ownership()
        self.residency = Residency(runner) if isinstance(runner, Runner) else RemoteResidency(runner)
        self.scheduler = Scheduler(config)
        self.transfer: Transfer | None = None
        if transfer is not None:
            self.transfer = start_transfer(transfer, runner, self.scheduler, speculation)
        self._quant = quant
        self._active: dict[str, _Active] = {}
        self.late_compilations = 0
        self.warmed: WarmUp | None = None
        """The report of the last warm-up; None before the first, and after `sleep`."""
        self._followers: dict[
            str, list[str]
        ] = {}  # id -> requests held until the prompt of that id is computed
        self._draining = False
        self._abort_at: float | None = (
            None  # time (time.monotonic) from which a step ends all unfinished requests
        )
        self._clock = time.monotonic
        self.last_step: ScheduledStep | None = None
        """The step that the last outputs are of, for metrics; None before the first."""
        self.last_launched = 0.0
        """When that step was launched, by time.monotonic."""
        self._with_logprobs: set[str] = set()
        self._prompts: dict[str, PromptLogprobs] = {}
        self._seeds = random.Random(start)
        self.speculator = None
        if speculation is not None:
            if isinstance(runner, ParallelRunner):
                raise UsageError(
                    "speculate cannot be combined with tensor_parallel: drafts are not sent to ranks"
                )
            self.speculator = self._make_speculator(runner, speculation, draft)
        self._pipeline = StepPipeline(
            runner,
            self.scheduler,
            DEPTH if async_steps else 1,
            partial(
                _sampling_rows, self._active
            ),  # not a bound method: the engine is freed with its last reference
            self._prompts,
            self.speculator,
        )

    def _make_speculator(self, runner: Runner, speculation: Speculation, draft: Runner | None) -> Speculator:
        config = self.scheduler.config
        runner.expect_drafts(speculation.most_tokens)
        context = DraftContext(
            runner, config.max_seqs, config.max_batch_tokens, speculation.most_tokens, draft
        )
        return Speculator(
            speculation,
            speculation.spec.make(context),
            self.scheduler,
            runner.processors,
            runner.model.config.vocab_size,
            partial(_next_row, self._active),
        )

    def warm_up(self, progress: Progress | None = None) -> WarmUp:
        """Select, verify, compile and load every kernel that steps within the limits call, and capture the decode graphs.

        An engine made with ``warm="auto"`` has done so at load: then this returns the report of that at once. On a CPU it runs the steps, too,
        which loading leaves out. After `sleep` it captures the graphs again.

        From then on a kernel that is selected while requests wait is reported by a warning, and counted in
        `EngineStatus.late_kernels`. After `sleep`, graphs are captured when needed. On
        a GPU this takes from seconds (with a filled store) to over a minute.

        Where steps run, Python's garbage collection then leaves out what is alive (`gc.freeze`) until the engine is freed: a full
        collection takes as long as up to a hundred steps.

        Args:
            progress: called with a phase, what is done of it, and what there is in all.

        Raises:
            UsageError: a request has begun and not ended, or the engine sleeps.
            NoKernelError: no kernel can run a size of an operation here under the policy.
        """
        self._require_none_started("warm_up")
        if self.residency.reason:
            raise UsageError(f"warm_up needs weights and cache: {self.residency.reason}")
        if self.warmed is None or not self.warmed.ran:
            self.reset_prefix_cache()
            self.warmed = self._warm_up(progress, run=True)
        return self.warmed

    def _warm_up(self, progress: Progress | None, run: bool) -> WarmUp:
        report = self._warm_models(progress, run)
        if run:
            freeze_heap(self)
        return report

    def _warm_models(self, progress: Progress | None, run: bool) -> WarmUp:
        speculator, config = self.speculator, self.scheduler.config
        if isinstance(self.runner, ParallelRunner):
            return self.runner.warm_up(config, run, progress)
        drafts = 0 if speculator is None else speculator.config.most_tokens
        report = warm_up(self.runner, config, progress, drafts=drafts, run=run)
        draft = None if speculator is None else speculator.proposer.runner
        return report if draft is None else report.with_draft_model(warm_up(draft, config, progress, run=run))

    def close(self) -> None:
        """End the processes of `tensor_parallel`, after which no step can run, and close the stores of `kv_transfer`. Nothing happens in
        other engines."""
        if self.transfer is not None:
            self.transfer.close()
        if isinstance(self.runner, ParallelRunner):
            self.runner.close()

    def add_request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        priority: int = 0,
        after: str | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """Queue a prompt of token ids: a list, or an array or tensor of one dimension.

        Args:
            params: without anything that needs text (stop strings, bad words as texts), and with n = 1.
            after: an unfinished request with the same prompt, such as another choice: the new request is held until that one has computed the
                prompt, and shares its blocks.
            grammar: the grammar of its output, made for this request alone by a `GrammarCompiler`.

        Raises:
            UsageError: an empty prompt, ids outside the vocabulary, an id in use, an argument of the wrong type.
            RequestTooLarge: the prompt and one more token can never fit; the message states need and capacity.
            QueueFull: the waiting queue is full.
            EngineDraining: the engine takes no more requests.
        """
        self.ownership.check()
        if self._draining:
            raise EngineDraining(f"request {request_id!r} refused: the engine is draining")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UsageError(
                f"request {request_id!r}: params must be a SamplingParams, got {type(params).__name__}"
            )
        level = as_integer(priority)
        if not isinstance(request_id, str) or level is None:
            raise UsageError(
                f"a request has a text as its id and an integer as its priority, got {request_id!r} and {priority!r}"
            )
        ids = integers(prompt_ids, f"request {request_id!r}: the prompt")
        if not ids:
            raise UsageError(f"request {request_id!r}: the prompt is empty, at least one token id is needed")
        config = self.runner.model.config
        if min(ids) < 0 or max(ids) >= config.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < config.vocab_size)
            raise UsageError(
                f"request {request_id!r}: prompt ids must be integers from 0 to {config.vocab_size - 1}, got {wrong}"
            )
        stop = {*params.stop_token_ids, *(() if params.ignore_eos else config.eos_ids)}
        check_params(request_id, params, stop, config.vocab_size)
        request = Request(request_id, ids, params.max_tokens, stop, level)
        request.reads_cache = params.prompt_logprobs is None
        follows = self._computes_prompt(after)
        loads = not follows and self.transfer is not None and self.transfer.expects(request)
        self.scheduler.add(request, held=follows or loads)
        if loads and self.transfer is not None:
            self.transfer.matched(request)
        if follows and after is not None:
            self._followers.setdefault(after, []).append(request_id)
        if params.edits_logits or grammar is not None:
            self.runner.processors.add(
                request_id, params, request.tokens, request.prompt_len, sorted(stop), grammar
            )
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._with_logprobs.add(request_id)
        if params.prompt_logprobs is not None:
            self._prompts[request_id] = PromptLogprobs(ids, params.prompt_logprobs, [None] * len(ids))
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        self._active[request_id] = _Active(request, params, seed)

    def step(self) -> list[RequestOutput]:
        """Outputs of the next step by request; [] if there was nothing to do, or no request got a token.

        With asynchronous steps it also launches the step after that one, and returns while that one runs: a request that is
        added then is computed by the step after both. A step with drafts is not launched before the outputs of the step before it are
        there; while drafting rests, steps run ahead.

        An exception from the model leaves its requests as they were before the steps in flight.
        """
        self.ownership.check()
        if self._abort_at is not None and self._clock() >= self._abort_at:
            self._abort_at = None
            self.last_step = None
            return self.abort()
        if self.residency.reason:
            self.last_step = None
            return []
        compiled = compilations.of_this_thread()
        try:
            return self._advance()
        except RankError:  # the caches of the ranks are gone
            self.warmed = None
            self.abort()
            for request_id in list(self._active):  # those that the step has ended
                self._forget(request_id)
            self.reset_prefix_cache()
            raise
        finally:
            if self.warmed is not None and compilations.of_this_thread() > compiled:
                self._report_late(compilations.names_since(compiled))

    def _report_late(self, names: Sequence[str]) -> None:
        """Triton has compiled kernels, or loaded compiled ones, in a step after the warm-up."""
        self.late_compilations += len(names)
        warnings.warn(
            f"Triton compiled or loaded {', '.join(names)} while serving: the warm-up did not cover it",
            RuntimeWarning,
            stacklevel=3,
        )

    def _advance(self) -> list[RequestOutput]:
        if self.transfer is not None:
            self.transfer.load()
        outputs, logprobs = self._pipeline.advance()
        self.last_step, self.last_launched = self._pipeline.last_step, self._pipeline.last_launched
        if self._with_logprobs:
            self._attach(outputs, logprobs)
        if self.transfer is not None and not self.scheduler.running and not outputs:
            self.transfer.wait()
        for output in outputs:
            if self._followers:
                self._release_followers(output.id)
            if self.transfer is not None:
                self.transfer.computed(self._active[output.id].request, output)
            if output.finish_reason is not None:
                self._forget(output.id)
        self._pipeline.drop_idle()
        return outputs

    def abort(self, request_ids: Iterable[str] | None = None) -> list[RequestOutput]:
        """Abort requests; None = all. Returns the aborted ones (without unknown and finished ids).

        Raises:
            UsageError: one text, whose characters would be taken for ids.
        """
        self.ownership.check()
        if isinstance(request_ids, str):
            raise UsageError(f"abort takes a list of request ids, got the text {request_ids!r}")
        ended = self.scheduler.abort(list(self._active) if request_ids is None else request_ids)
        for output in ended:
            self._forget(output.id)
        self._pipeline.drop_idle()
        return ended

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop, until `resume`; requests may be added meanwhile, and wait. May be called in a signal handler.

        Args:
            mode: ``wait``: requests that have begun run to their end, no other is admitted. ``keep``: nothing runs; requests and their
                blocks stay as they are. ``abort``: the next step ends all unfinished requests and returns them. Call `step` until `paused`
                is true.
        """
        if mode not in get_args(PauseMode):
            raise UsageError(f"unknown mode {mode!r}, expected one of {', '.join(get_args(PauseMode))}")
        self.scheduler.pause(Pause.NEW if mode == "wait" else Pause.ALL)
        if mode == "abort" and self._active:
            self._abort_at = -math.inf

    def resume(self) -> None:
        """Go on after `pause`."""
        self.scheduler.pause(None)

    @property
    def paused(self) -> bool:
        """Whether the engine is paused, and nothing runs: a step would do nothing."""
        if self._pipeline.in_flight or (self._abort_at is not None and self._abort_at <= self._clock()):
            return False
        pause = self.scheduler.paused
        return (
            bool(self.residency.reason)
            or pause is Pause.ALL
            or (pause is Pause.NEW and not self.scheduler.has_started())
        )

    def drain(self, timeout: float | None = None) -> None:
        """Take no more requests; unfinished ones run to their end. May be called in a signal handler; it cannot be undone.

        Args:
            timeout: seconds after which the next step ends those still unfinished, and returns them; None = no limit. A second call
                changes the limit: 0 ends them at once.
        """
        check_timeout(timeout)
        self._draining = True
        if self._abort_at != -math.inf:  # otherwise the next step ends all requests anyway
            self._abort_at = None if timeout is None else self._clock() + timeout
        self.scheduler.pause(None)

    @property
    def draining(self) -> bool:
        """Whether `drain` was called: `add_request` refuses."""
        return self._draining

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_unfinished()

    def dump(self) -> str:
        """The state as text: queues, blocks, requests, memory of graphs."""
        graphs = f"decode graphs: {self.runner.graph_bytes or 0} bytes"
        draining = ", draining" if self._draining else ""
        return f"{len(self._active)} requests{draining}\n{graphs}\n{self.scheduler.dump()}"

    def _attach(self, outputs: Sequence[RequestOutput], logprobs: Mapping[str, list[TokenLogprobs]]) -> None:
        for output in outputs:
            if output.id in logprobs:
                output.logprobs = tuple(logprobs[output.id][: len(output.new_ids)])
            if output.new_ids and output.id in self._prompts:
                output.prompt_logprobs = tuple(self._prompts.pop(output.id).logprobs)
                self._active[output.id].request.reads_cache = True  # for example after a preemption

    def _computes_prompt(self, request_id: str | None) -> bool:
        """Whether to wait for a request: its blocks can be shared, but are not computed yet."""
        active = None if request_id is None else self._active.get(request_id)
        return (
            active is not None
            and self.scheduler.cache is not None
            and len(active.request.tokens) == active.request.prompt_len
        )

    def _release_followers(self, request_id: str) -> None:
        for follower in self._followers.pop(request_id, ()):
            if follower in self.scheduler.held:
                self.scheduler.requests[follower].started = True  # like its leader: a pause lets both end
                self.scheduler.resume(follower)

    def _forget(self, request_id: str) -> None:
        active = self._active.pop(request_id)
        if self.speculator is not None:
            self.speculator.ended(active.request)
        self.runner.processors.remove(request_id)
        if self.transfer is not None:
            self.transfer.finished(request_id)
        self._with_logprobs.discard(request_id)
        self._prompts.pop(request_id, None)
        self._release_followers(request_id)


def _next_row(active: Mapping[str, _Active], request_id: str) -> SamplingRow:
    """How the token after the known ones is sampled."""
    one = active[request_id]
    return SamplingRow(one.params, one.seed, len(one.request.tokens) - one.request.prompt_len)


def _sampling_rows(active: Mapping[str, _Active], entries: Sequence[ScheduledRequest]) -> list[SamplingRow]:
    """How the first token that each of these entries samples is sampled, which a step in flight may precede."""
    rows = []
    for entry in entries:
        one = active[entry.id]
        index = entry.start + entry.count - entry.drafts - one.request.prompt_len
        rows.append(SamplingRow(one.params, one.seed, index))
    return rows
