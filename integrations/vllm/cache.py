"""The worker's KV cache as vLLM's cache manager sees it: a spec per layer, groups of layers with their own blocks, and the bytes for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowSpec

from gristmill.autotune.device import cpu_memory
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.groups import KVGroup
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.models import Model
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest

LAYER = "layers."


def layer_specs(model: Model) -> dict[str, KVCacheSpec]:
    """What a block holds in each layer. Layers with a sliding window say so if others have full attention: vLLM gives them groups of their own."""
    config, plans = model.config, model.plans
    if config.layer_attention:
        raise UsageError(
            f"{config.architecture}: layers with heads of several sizes, or with the keys and values of others, are not served by vLLM's worker"
        )
    if config.mla is not None:
        latent = MLAAttentionSpec(
            block_size=plans.block_size,
            num_kv_heads=1,
            head_size=config.mla.latent_dim,
            dtype=plans.dtype,
        )
        return {f"{LAYER}{index}": latent for index in range(config.num_layers)}
    shape = {
        "block_size": plans.block_size,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "dtype": plans.dtype,
    }
    windows = [0] * config.num_layers
    for group in getattr(model, "kv_groups", ()):
        for layer in group.layers:
            windows[layer] = group.window
    return {
        f"{LAYER}{index}": SlidingWindowSpec(**shape, sliding_window=window)
        if window
        else FullAttentionSpec(**shape)
        for index, window in enumerate(windows)
    }


class BlockTables:
    """The groups of a `vllm.v1.kv_cache_interface.KVCacheConfig`, and a request's blocks of them as one list, as the runner reads it.

    Attributes:
        groups: the runtime's, full attention first; () for one group.
    """

    def __init__(self, kv_cache_config: Any) -> None:
        found = []
        for index, group in enumerate(kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            # FullAttentionSpec has a window too, where vLLM's hybrid cache manager is off: blocks are kept then.
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
            layers = sorted(int(name.removeprefix(LAYER)) for name in group.layer_names)
            found.append((window, index, KVGroup(tuple(layers), window)))
        found.sort(key=lambda one: one[:2])
        self._order = [index for _, index, _ in found]
        self.groups = tuple(group for _, _, group in found) if len(found) > 1 else ()

    def interleaved(self, block_ids: Sequence[Sequence[int]]) -> list[int]:
        """The blocks of each of vLLM's groups as entry ``index * groups + group`` of one list. vLLM's null block, 0, stands for blocks that a
        window has left behind; nothing writes it."""
        return [
            block for blocks in zip(*(block_ids[i] for i in self._order), strict=True) for block in blocks
        ]


def cache_bytes(model: Model, vllm_config: Any) -> int:
    """Bytes for the cache: --kv-cache-memory-bytes; or --gpu-memory-utilization of the device, less what is in use after a step of the largest
    size, and less what such a step needs while it runs.

    Raises:
        UsageError: nothing is left.
    """
    given = vllm_config.cache_config.kv_cache_memory_bytes
    if given is not None:
        return int(given)
    share = vllm_config.cache_config.gpu_memory_utilization
    activations = activation_bytes(model, vllm_config)
    free, total = _memory(model.plans.device)
    room = int(total * share) - (total - free) - activations
    if room <= 0:
        raise UsageError(
            f"nothing is left for the cache: {free} of {total} bytes are free, a step needs {activations}, and "
            f"--gpu-memory-utilization is {share}"
        )
    return room


def activation_bytes(model: Model, vllm_config: Any) -> int:
    """What the largest steps need while they run, above what they leave allocated: one of long prompts, one of as many requests as there may be.

    They run over a cache of one block, which every position of every request shares: values do not matter.
    """
    scheduler = vllm_config.scheduler_config
    tokens, length = scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len
    seqs = min(scheduler.max_num_seqs, tokens)
    size, groups = model.plans.block_size, getattr(model, "kv_groups", ())
    runner = Runner(model, make_cache(model, 1, size, groups), decode_graphs=False, max_seqs=seqs)
    blocks = [0] * (cdiv(length, size) * len(runner.cache.windows))
    row = SamplingRow(SamplingParams(temperature=1.0), 0, 0)

    most = (
        0 if vllm_config.speculative_config is None else vllm_config.speculative_config.num_speculative_tokens
    )

    def step(counts: Sequence[int]) -> None:
        entries = [
            ScheduledRequest(
                "profile", length - count, count, True, [0] * count, blocks, [], min(most, count - 1)
            )
            for count in counts
        ]
        runner.run(entries, [row] * sum(1 + entry.drafts for entry in entries))

    prompts, rest = divmod(tokens, length)
    sizes = [
        [length] * min(prompts, seqs) + [rest] * (rest > 0 and prompts < seqs),
        [min(length, tokens // seqs + (i < tokens % seqs)) for i in range(seqs)],
    ]

    def steps() -> None:
        for counts in sizes:
            step(counts)

    return _peak(steps, model.plans.device)


def _peak(run: Callable[[], None], device: torch.device) -> int:
    """The most memory that a call has in use at a time, less what it leaves in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        torch.cuda.empty_cache()
        return peak
    peaks = Path("/proc/self/clear_refs")
    if peaks.exists():  # else the peak is that since the process began, which is no less
        peaks.write_text("5", encoding="ascii")
    run()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, now = (int(status[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS"))
    return peak - now


def _memory(device: torch.device) -> tuple[int, int]:
    """Free and all bytes of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    return cpu_memory()
