"""What an engine is made of: runners, with their models and caches, and the limits of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.runtime.engine_config import EngineConfig
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.groups import KVGroup
from gristmill.runtime.kv_cache.paged import token_bytes
from gristmill.runtime.kv_cache.size import cache_blocks, make_cache, step_limits
from gristmill.runtime.loader.config import open_checkpoint
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.parallel.remote import start_ranks
from gristmill.runtime.progress import Progress
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.runtime.speculation.hidden_drafts import draft_blocks
from gristmill.runtime.verify_ahead import VerifiedAhead


def load_engine(
    model: str | Path | Checkpoint, options: EngineConfig, ahead: VerifiedAhead, progress: Progress
) -> tuple[Runner | ParallelRunner, Runner | None, SchedulerConfig]:
    """The runner of a model, that of its draft model if it has one, and the limits of their scheduler. With ``warm="auto"`` kernels are verified by
    `ahead` meanwhile, which the caller closes; over several ranks, by rank 0."""
    if options.tensor_parallel > 1:
        return _ranks(model, options, progress)
    return _one_process(model, options, ahead, progress)


def _ranks(
    model: str | Path | Checkpoint, options: EngineConfig, progress: Progress
) -> tuple[ParallelRunner, None, SchedulerConfig]:
    """The processes that share a model, and the limits of their scheduler."""
    loading = {
        "dtype": options.dtype,
        "quant": options.quant,
        "block_size": options.block_size,
        "kv_dtype": options.kv_dtype,
        "quant_head": options.quant_head,
        "max_model_len": options.max_model_len,
    }
    runner = start_ranks(
        model,
        options.tensor_parallel,
        options.rank_timeout,
        options.device,
        options.loaded_policy,
        options.max_model_len,
        loading,
        progress,
        memory=options.memory,
        max_seqs=options.max_seqs,
        max_batch_tokens=options.max_batch_tokens,
        num_blocks=options.num_blocks,
        decode_graphs=options.decode_graphs,
        prompt_graphs=options.prompt_graphs,
        graph_memory=options.graph_memory,
        context_parallel=options.context_parallel,
        warm=options.warm != "off",
    )
    limits = (runner.max_seqs, runner.max_batch_tokens, runner.ranks.limit)
    return runner, None, _scheduler_config(options, runner.cache.num_blocks, runner.cache.block_size, *limits)


def _one_process(
    model: str | Path | Checkpoint, options: EngineConfig, ahead: VerifiedAhead, progress: Progress
) -> tuple[Runner, Runner | None, SchedulerConfig]:
    """The runner of a model in this process, that of its draft model, and the limits of their scheduler."""
    speculation, policy, block_size = options.speculation, options.loaded_policy, options.block_size
    load_draft = draft_model = draft = None
    if speculation is not None and speculation.spec.open is not None:
        model = open_checkpoint(model)
        load_draft = speculation.spec.open(model, speculation.model)
    loaded = load_model(
        model,
        options.dtype,
        options.quant,
        options.device,
        policy,
        block_size,
        options.kv_dtype,
        options.quant_head,
        begin=None if options.warm == "off" else ahead.start,
        progress=partial(progress, "weights"),
        max_model_len=options.max_model_len,
    )
    draft_model = None if load_draft is None else load_draft(loaded, policy, options.quant)
    longest = loaded.config.max_position
    limit = min(options.max_model_len or longest, longest)
    max_seqs, max_batch_tokens = step_limits(loaded.plans.device, options.max_seqs, options.max_batch_tokens)
    spare = 0
    if speculation is not None and speculation.spec.shares_blocks:
        spare = max_seqs * draft_blocks(speculation.most_tokens, block_size)
    # The cache of a draft model has the blocks of one table.
    groups: Sequence[KVGroup] = getattr(loaded, "kv_groups", ()) if draft_model is None else ()
    num_blocks = options.num_blocks
    if num_blocks is None:
        num_blocks = cache_blocks(
            loaded,
            block_size,
            options.memory,
            max_seqs,
            limit,
            draft_model,
            groups,
            spare,
            ahead.held_bytes(),
        )
    windows = tuple(group.window for group in groups) or (0,)
    config = _scheduler_config(options, num_blocks, block_size, max_seqs, max_batch_tokens, limit, windows)
    of_token = token_bytes(loaded.config, loaded.plans.dtype, loaded.plans.cache_format, groups)
    ahead.make_room(num_blocks * block_size * of_token)
    cache = make_cache(loaded, num_blocks, block_size, groups)
    runner = Runner(
        loaded, cache, options.decode_graphs, max_seqs, options.prompt_graphs, options.graph_memory
    )
    if draft_model is not None:
        draft_cache = make_cache(draft_model, num_blocks + spare, block_size)
        draft = Runner(draft_model, draft_cache, options.decode_graphs, max_seqs, 0, options.graph_memory)
    return runner, draft, config


def _scheduler_config(
    options: EngineConfig,
    num_blocks: int,
    block_size: int,
    max_seqs: int,
    max_batch_tokens: int,
    max_model_len: int,
    windows: tuple[int, ...] = (0,),
) -> SchedulerConfig:
    try:
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_seqs=max_seqs,
            max_model_len=max_model_len,
            max_chunk=options.max_chunk,
            prefix_caching=options.enable_prefix_cache,
            policy=options.queue_order,
            priority_span=options.priority_span,
            max_queued=options.max_queued,
            max_queued_tokens=options.max_queued_tokens,
            max_bypass=options.max_bypass,
            inter_prefill_budget=options.inter_prefill_budget,
            windows=windows,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
