"""What of a vLLM configuration the worker does not serve: each with the option that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gristmill.integrations.vllm.admission import ADMISSION
from gristmill.integrations.vllm.drafts import METHODS
from gristmill.runtime.errors import UsageError

LOAD_FORMATS = ("auto", "hf", "safetensors", "dummy")


def require_served(config: Any) -> None:
    """UsageError with everything that a `vllm.config.VllmConfig` asks for and the worker does not serve."""
    reasons = list(_reasons(config))
    if reasons:
        raise UsageError("the gristmill worker does not serve this configuration: " + "; ".join(reasons))


def _reasons(config: Any) -> Iterator[str]:
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "data_parallel_size",
    ):
        if getattr(parallel, name) > 1:
            yield f"--{name.replace('_', '-')} {getattr(parallel, name)} (its ranks share each layer: --tensor-parallel-size)"
    if parallel.nnodes > 1:
        yield f"--nnodes {parallel.nnodes} (its ranks are on one host)"
    for name, what in {
        "lora_config": "LoRA (--enable-lora)",
        "kv_transfer_config": "KV transfer (--kv-transfer-config)",
        "ec_transfer_config": "encoder cache transfer (--ec-transfer-config)",
        "diffusion_config": "diffusion language models (--diffusion-config)",
        "watermark_config": "watermarks (--watermark-config)",
    }.items():
        if getattr(config, name, None) is not None:
            yield what
    drafts = config.speculative_config
    if drafts is not None and drafts.method not in METHODS:
        yield f"--speculative-config with the method {drafts.method} (known: {', '.join(METHODS)})"
    if model.runner_type != "generate":
        yield f"--runner {model.runner_type}"
    if model.is_multimodal_model:
        yield "multimodal models"
    for name in (
        "enable_prompt_embeds",
        "enable_return_routed_experts",
        "enable_trace_replay",
        "return_sampling_mask",
    ):
        if getattr(model, name, False):
            yield f"--{name.replace('_', '-')}"
    if model.hf_overrides:
        yield "--hf-overrides (it reads config.json itself)"
    if model.logprobs_mode != "raw_logprobs":
        yield f"--logprobs-mode {model.logprobs_mode} (its log-probabilities are of the logits as they are: raw_logprobs)"
    if cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        yield f"--kv-cache-dtype {cache.cache_dtype} (its cache has the dtype of the model)"
    if config.load_config.load_format not in LOAD_FORMATS:
        yield f"--load-format {config.load_config.load_format} (known: {', '.join(LOAD_FORMATS)})"
    others = [name for name in model.logits_processors or () if name != ADMISSION]
    if others:
        yield f"--logits-processors {' '.join(map(str, others))}"
    if ADMISSION not in (model.logits_processors or ()):
        yield (
            f"a start without --logits-processors {ADMISSION}, which refuses requests that it cannot sample (the plugin "
            "'gristmill' adds it; VLLM_PLUGINS may have left the plugin out)"
        )
