"""Entries of the configuration of two architectures: small random models, complete, against transformers.

Neither architecture has a sliding window: transformers' generate and its own forward pass disagree about such
an entry, and the loader refuses it (test_loader.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.select import NoKernelError
from gristmill.runtime.errors import CheckpointError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits
from tests.runtime import kernel_sets, oracle
from tests.runtime.oracle import Comparison
from tests.runtime.proofs import GREEDY, proves

LIMIT = 2e-4
LENGTH = 96
PARAMS = SamplingParams(max_tokens=16)

LLAMA = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
DEEPSEEK = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}

THETA = {"rope_theta": 1e4}
LLAMA3 = {
    **THETA,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

LLAMAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "one_kv_head": {"num_key_value_heads": 1},
    "no_grouping": {"num_key_value_heads": 4},
    "head_dim": {"head_dim": 32},
    "theta_and_eps": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rms_norm_eps": 0.1},
    "rope_linear": {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0}},
    "rope_llama3": {"rope_parameters": LLAMA3},
    "rope_yarn": {"rope_parameters": YARN},
    "rope_yarn_factor": {
        "rope_parameters": {**YARN, "attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0}
    },
}
DEEPSEEKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "no_q_lora": {"q_lora_rank": None},
    "no_q_lora_bias": {"q_lora_rank": None, "attention_bias": True},
    "all_layers_sparse": {"first_k_dense_replace": 0},
    "all_layers_dense": {"first_k_dense_replace": 2},
    "one_group": {"n_group": 1, "topk_group": 1},
    "every_group": {"topk_group": 4},
    "weights_as_they_are": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "two_shared_experts": {"n_shared_experts": 2},
    "rope_by_halves": {"rope_interleave": False},
    "rope_yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "rope_yarn_mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "rope_llama3": {"rope_parameters": LLAMA3},
}
CASES = [("llama", name) for name in LLAMAS] + [("deepseek", name) for name in DEEPSEEKS]


def write(folder: Path, family: str, changes: dict[str, Any]) -> Path:
    """Writes a random float32 model of a configuration, with weights large enough for every part to matter."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))
    else:
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**DEEPSEEK, **changes}))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        if tensor.ndim == 1:
            tensor.data.uniform_(-0.5, 0.5).add_(1.0 if "norm" in name else 0.0)
        else:
            tensor.data.normal_(0, tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def ids(count: int) -> list[int]:
    return torch.randint(2, 160, (count,), generator=torch.Generator().manual_seed(3)).tolist()


def largest_error(llm: LLM, prompt: list[int], expected: torch.Tensor) -> float:
    return float((window_logits(llm.engine, prompt) - expected).abs().max())


@proves(
    "logits and ids", GREEDY, {"llama": "LlamaForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}, by="family"
)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_configuration(family: str, name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    plain, changes = (LLAMA, LLAMAS[name]) if family == "llama" else (DEEPSEEK, DEEPSEEKS[name])
    folder = write(tmp_path / family, family, changes)
    llm, model, prompt = make(folder, num_blocks=32), oracle.load(folder), ids(LENGTH)
    expected = oracle.logits(model, prompt)
    assert largest_error(llm, prompt, expected) <= LIMIT
    # One token after another, from the cache, which a single window does not test.
    actual = Comparison(f"{family}, {name}")
    (done,) = llm.generate([prompt[:21]], PARAMS)
    actual.add(done.token_ids, oracle.answer_along(model, prompt[:21], done.token_ids, PARAMS.max_tokens))
    if name == "plain":
        return
    # Planted fault: the same weights read by a configuration that lacks the entry.
    config = json.loads((folder / "config.json").read_text())
    for entry in changes:
        config.pop(entry)
        if entry in plain:
            config[entry] = plain[entry]
    (folder / "config.json").write_text(json.dumps(config))
    try:
        fault = largest_error(make(folder, num_blocks=32), prompt, expected)
    except CheckpointError:
        return  # the weights do not fit without the entry: refused before anything runs
    assert fault > LIMIT


@pytest.mark.parametrize("kernel_set", kernel_sets.KERNEL_SETS)
@pytest.mark.parametrize(("family", "changes"), [("llama", {"attention_bias": True}), ("deepseek", {})])
def test_every_way(
    family: str, changes: dict[str, Any], kernel_set: str, make_strict: Callable[..., LLM], tmp_path: Path
) -> None:
    """Each strict policy serves whole models correctly: a prompt at once, then token by token."""
    folder = write(tmp_path / family, family, changes)
    llm, model, prompt = (
        make_strict(folder, kernel_set, num_blocks=8),
        oracle.load(folder),
        ids(5 if kernel_set == "triton" else 24),
    )
    assert largest_error(llm, prompt, oracle.logits(model, prompt)) <= LIMIT
    actual = Comparison(f"{family}, {kernel_set}")
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=2))
    actual.add(done.token_ids, oracle.answer_along(model, prompt, done.token_ids, 2))
    kernel_sets.check(llm, kernel_set)


def test_a_kernel_of_another_way_is_seen(make: Callable[..., LLM], policy: Policy, tmp_path: Path) -> None:
    """Planted fault: the policy is not strict, and one kernel is missing."""
    folder = write(tmp_path / "llama", "llama", {})
    loose = dataclasses.replace(
        kernel_sets.strict("torch", policy), strict=False, exclude=("rms_norm_torch", "fused_*_torch")
    )
    llm = make(folder, policy=loose, num_blocks=8)
    llm.generate([ids(4)], SamplingParams(max_tokens=1))
    with pytest.raises(AssertionError, match="torch: fused_add_rms_norm_cpu ran$"):
        kernel_sets.check(llm, "torch")
    with pytest.raises(NoKernelError, match="strict policy"):
        make(folder, policy=dataclasses.replace(loose, strict=True), num_blocks=8).generate([ids(4)])
