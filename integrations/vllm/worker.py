"""The runtime as a vLLM worker: model, cache and sampler are gristmill's; scheduler, prefix cache and server are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    ModelRunnerOutput,
)
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from gristmill.integrations.vllm.cache import BlockTables, cache_bytes, layer_specs
from gristmill.integrations.vllm.drafts import Drafts
from gristmill.integrations.vllm.options import Options
from gristmill.integrations.vllm.refusals import require_served
from gristmill.integrations.vllm.requests import ActiveRequest, Requests
from gristmill.integrations.vllm.steps import StepOutput, Steps
from gristmill.integrations.vllm.tensor_parallel import join_ranks
from gristmill.integrations.vllm.version import HOST
from gristmill.runtime.errors import UsageError
from gristmill.runtime.explain import explain_plans, summarize
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.models import Model
from gristmill.runtime.residency import Residency
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.runtime.warm_up import warm_up
from gristmill.tools.random_model import random_model

# Below "vllm", whose handlers print.
logger = init_logger(f"vllm.{__name__}")


class Worker(WorkerBase):  # type: ignore[misc]  # vLLM is read without types
    """One device, or one of --tensor-parallel-size: ``vllm serve MODEL --worker-cls gristmill.integrations.vllm.Worker``.

    vLLM hands out the blocks of the cache and chooses the tokens of each step; the worker owns the cache's memory, computes the step
    and samples. Options for gristmill are in `Options`.

    Raises:
        HostError: a version of vLLM that is not served.
        UsageError: a configuration that asks for something that is not served.
    """

    def __init__(self, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        HOST.require()
        super().__init__(vllm_config, *arguments, **named)
        require_served(vllm_config)
        self.options = Options.parse(vllm_config.additional_config)
        self.model: Model | None = None
        self.runner: Runner | None = None
        self.residency: Residency | None = None
        self.steps: Steps | None = None
        self.drafts: Drafts | None = None
        self._launched: StepOutput | None = None
        self._drafted: list[ActiveRequest] = []

    def init_device(self) -> None:
        """The device that vLLM gives this worker."""
        kind = self.current_platform.device_type
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, self.local_rank)
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        self.policy = self.options.load_policy()
        self.mesh = join_ranks(self, self.policy)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model's directory; with ``--load-format dummy`` only its configuration."""
        path, options = self._path(), self.options
        dtype, policy = self.model_config.dtype, self.policy
        block_size = self.cache_config.block_size
        longest = self.model_config.max_model_len
        if load_dummy_weights or self.load_config.load_format == "dummy":
            config = parse_config(*open_checkpoint(path).config()).for_length(longest)
            model = random_model(
                config, dtype, options.quant, self.device, policy, block_size=block_size, mesh=self.mesh
            )
        else:
            model = load_model(
                path,
                dtype,
                options.quant,
                self.device,
                policy,
                block_size,
                mesh=self.mesh,
                max_model_len=longest,
            )
        if longest > model.config.max_position:
            raise UsageError(
                f"--max-model-len {longest} is more than the {model.config.max_position} positions of {path}"
            )
        self.model = model

    def _path(self) -> Path:
        """The model's directory; one of the Hugging Face hub is the downloaded copy."""
        name = self.model_config.model
        if Path(name).is_dir():
            return Path(name)
        return Path(
            snapshot_download(
                name,
                revision=self.model_config.revision,
                cache_dir=self.load_config.download_dir,
                ignore_patterns=self.load_config.ignore_patterns,
            )
        )

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation alone."""
        return ("generate",)

    def get_model(self) -> Any:
        """vLLM calls it for a torch module, which the model is not."""
        raise UsageError(
            "the gristmill worker's model is no torch module: vLLM's apply_model does not reach it"
        )

    def get_model_inspection(self) -> str:
        """The model in a line, as ``repr(llm)`` shows it."""
        model = _loaded(self.model)
        return f"gristmill {model.config.architecture}, {model.config.num_layers} layers, {model.plans.weight_bytes} bytes of weights"

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What a block holds in each layer, as `layer_specs`."""
        return layer_specs(_loaded(self.model))

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """vLLM's name for the order layers, blocks, tokens, heads."""
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        """Bytes for the cache, as `cache_bytes`, which runs the largest steps."""
        return cache_bytes(_loaded(self.model), self.vllm_config)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the cache that vLLM's scheduler hands out."""
        model, tables = _loaded(self.model), BlockTables(kv_cache_config)
        size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        cache = make_cache(model, kv_cache_config.num_blocks, size, tables.groups)
        max_seqs = self.scheduler_config.max_num_seqs
        self.runner = Runner(model, cache, max_seqs=max_seqs)
        self.residency = Residency(self.runner)
        requests = Requests(self.model_config.seed, self.runner.processors, tables, max_seqs)
        self.steps = Steps(self.runner, requests, bool(self.scheduler_config.async_scheduling))
        if self.speculative_config is not None:
            self.drafts = Drafts(self.speculative_config)
            self.runner.expect_drafts(self.drafts.count)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Resolve, verify and load every kernel that a step can need, and capture decode graphs, so that no request waits for one; nothing with
        the option ``warm`` off."""
        if self.options.warm == "off":
            return CompilationTimes(language_model=0.0, encoder=0.0)
        runner, limits = _loaded(self.runner), self.scheduler_config
        tokens = limits.max_num_batched_tokens
        report = warm_up(
            runner,
            SchedulerConfig(
                num_blocks=runner.cache.num_blocks,
                block_size=runner.cache.block_size,
                max_batch_tokens=tokens,
                max_seqs=min(limits.max_num_seqs, tokens),
                max_model_len=self.model_config.max_model_len,
                windows=runner.cache.windows,
            ),
            drafts=0 if self.drafts is None else self.drafts.count,
            run=self.device.type == "cuda",
        )
        logger.info("gristmill: %s", report)
        for row in self.explain():
            formats = f" ({', '.join(row['formats'])})" if row["formats"] else ""
            logger.info("gristmill: %s%s: %s, %s", row["op"], formats, row["kernel"], row["reason"])
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def explain(self) -> list[dict[str, Any]]:
        """The kernels that run, for ``llm.collective_rpc("explain")``: {"op", "kernel", "formats", "reason", "plans"}."""
        return summarize(explain_plans(_loaded(self.model).plans))

    def gristmill_update_weights(self, path: str) -> None:
        """New weights in the memory of the old ones: ``llm.collective_rpc("gristmill_update_weights", args=(path,))``, and then
        ``llm.reset_prefix_cache()``, because vLLM keeps the prefixes of the old ones. Unfinished requests would go on with keys and
        values of the old weights: let them end first.

        Raises:
            CheckpointError: a tensor is missing or of a wrong shape, or the model would change; the old weights stay.
            UsageError: there are several ranks.
        """
        if self.mesh.world > 1:
            raise UsageError("gristmill_update_weights does not reach the ranks of --tensor-parallel-size")
        _loaded(self.residency).update(path, self.options.quant, None)

    def sleep(self, level: int = 1) -> None:
        """``llm.sleep``: give back the cache, decode graphs and the weights, to host memory (1) or discarded (2). On a CPU, level 1 leaves the
        weights where they are."""
        _loaded(self.residency).sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """``llm.wake_up``: tags are ``weights`` and ``kv_cache``; None = both. After level 2 come new weights: `gristmill_update_weights`."""
        _loaded(self.residency).wake_up(["weights", "kv_cache"] if tags is None else tags)

    def discard(self, tags: Sequence[str]) -> None:
        """vLLM's ``release_kv_cache_memory``: UsageError."""
        raise UsageError(
            f"the gristmill worker does not release {', '.join(tags)} alone: sleep(level=1) gives back the cache and the weights"
        )

    def reset_encoder_cache(self) -> None:
        """There is none: multimodal models are refused."""

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        """Launch a step; `sample_tokens` returns its output."""
        reason = _loaded(self.residency).reason
        if (
            reason and scheduler_output.total_num_scheduled_tokens
        ):  # else it only says which requests have ended
            raise UsageError(reason)
        if self.drafts is not None:
            self.drafts.ended(scheduler_output.finished_req_ids)
        self._launched = _loaded(self.steps).launch(scheduler_output)
        return EMPTY_MODEL_RUNNER_OUTPUT if self._launched is None else None

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """The output of the step that was launched last; with asynchronous scheduling without waiting for it. Structured outputs are sampled
        only now, within what vLLM's grammars allow."""
        steps, launched = _loaded(self.steps), self._launched
        self._launched = None
        if launched is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        steps.complete(grammar_output)
        if steps.asynchronous:
            return launched
        output = launched.get_output()
        steps.settle()
        self._drafted = [one.request for one in launched.sampling]
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the requests that have sampled in the last step; None without --speculative-config."""
        return None if self.drafts is None else self.drafts.propose(self._drafted)

    def shutdown(self) -> None:
        """Give the memory of model and cache back."""
        self.runner = self.residency = self.steps = self.model = None
        self._launched, self._drafted = None, []


def _loaded(part: Any) -> Any:
    """A part of the worker that vLLM's order of calls has made."""
    if part is None:
        raise RuntimeError(
            "vLLM called the worker before load_model and initialize_from_config, or after shutdown"
        )
    return part
