"""A small random model of each family, as transformers makes and saves it: classes, and what differs from `SIZES`."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
THETA = {"rope_type": "default", "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [4.0 + i for i in range(6)],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2,
}
SCOUT = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
"""As of Llama 4 Scout, whose two bounds are one."""
FACTORS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 8.0,
}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.6, "factor": 2.0}
LATENTS = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 32}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
        | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24, "head_dim": 16}
        | {"rope_parameters": {**THETA, "rope_type": "default"}},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "ministral": (
        "Ministral",
        {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "ministral-3": (
        "Ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 60}},
    ),
    "phi-3": ("Phi3", {"sliding_window": 40}),
    "phi-4-mini": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 400,
        },
    ),
    "glm-4.5": ("Glm4Moe", {**EXPERTS, "use_qk_norm": True, "attention_bias": True, "head_dim": 24}),
    "glm-4.5-air": ("Glm4Moe", {**EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_local_experts": 8,
            "head_dim": 32,
            "rope_parameters": {**THETA, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENTS, **EXPERTS, "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0}
        | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENTS, **EXPERTS, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    ),
    "kimi-k2": (
        "DeepseekV3",
        {**LATENTS, **EXPERTS, "q_lora_rank": 48, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.827},
    ),
    "olmo-2": ("Olmo2", {}),
    "olmo-3": (
        "Olmo3",
        {"sliding_window": 24, "num_hidden_layers": 8, "rope_parameters": {"full_attention": YARN}},
    ),
    "glm-4": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm-4-0414": ("Glm4", {"head_dim": 24}),
    "granite": ("Granite", FACTORS),
    "granite-moe": ("GraniteMoe", {**FACTORS, "num_local_experts": 6, "intermediate_size": 32}),
    "granite-moe with a shared expert": (
        "GraniteMoeShared",
        {**FACTORS, "num_local_experts": 6, "shared_intermediate_size": 80, "tie_word_embeddings": True},
    ),
    "llama-4": (
        "Llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "num_hidden_layers": 5}
        | {"intermediate_size": 48, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 64, "floor_scale": 40, "rope_parameters": SCOUT},
    ),
    "llama-4 with two experts of a token": (
        "Llama4",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "intermediate_size_mlp": 80}
        | {"attention_chunk_size": 32, "use_qk_norm": False, "no_rope_layers": [1, 0, 0, 1]},
    ),
    "gemma-2": ("Gemma2", {"head_dim": 24, "sliding_window": 24, "query_pre_attn_scalar": 20, **CAPS}),
    "gemma-3": (
        "Gemma3",
        {"head_dim": 32, "sliding_window": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 20}
        | {"tie_word_embeddings": True, "rope_parameters": {"full_attention": LINEAR}},
    ),
    "gemma-4-e2b": (
        "Gemma4",
        {"head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 6, "num_kv_shared_layers": 3}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {"sliding_window": 24, "use_double_wide_mlp": True, "tie_word_embeddings": True}
        | {
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 310,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma-4-31b": (
        "Gemma4",
        {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 4, "num_global_key_value_heads": 1}
        | {"attention_k_eq_v": True, "num_hidden_layers": 7, "sliding_window": 24}
        | {"hidden_size_per_layer_input": 0, "tie_word_embeddings": True},
    ),
    "gemma-4-26b-a4b": (
        "Gemma4",
        {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
        | {"num_hidden_layers": 4, "sliding_window": 24, "hidden_size_per_layer_input": 0}
        | {"tie_word_embeddings": True},
    ),
    "gemma-4 with biases and narrow full attention": (
        "Gemma4",
        {"head_dim": 24, "global_head_dim": 16, "num_key_value_heads": 1, "attention_bias": True}
        | {"attention_k_eq_v": True, "num_hidden_layers": 5, "num_kv_shared_layers": 1, "sliding_window": 40}
        | {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"]}
        | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 300}
        | {"rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": THETA}},
    ),
    "command-r": ("Cohere", {"logit_scale": 0.25, "tie_word_embeddings": True, "layer_norm_eps": 1e-2}),
    "command-r+": ("Cohere", {"logit_scale": 0.8, "use_qk_norm": True, "tie_word_embeddings": True}),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 2}
        | {"shared_expert_intermediate_size": 80},
    ),
    "afmoe": (
        "Afmoe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_dense_layers": 1}
        | {"head_dim": 32, "num_shared_experts": 1, "sliding_window": 24, "route_scale": 1.5}
        | {"mup_enabled": True, "num_hidden_layers": 5},
    ),
    "command-a": ("Cohere2", {"sliding_window": 24, "num_hidden_layers": 8, "num_key_value_heads": 4}),
}
ARCHITECTURES = {name: f"{family}ForCausalLM" for name, (family, _) in CASES.items()}
WRITTEN = {"kimi-k2": {"model_type": "kimi_k2"}}
"""What the repositories of a family say otherwise in config.json than transformers does."""


def build(name: str, folder: Path, **changes: Any) -> Any:
    """Saves the model of a case, and returns it: a copy, which a test may change. No parameter has its initial value: norms, biases and
    biases of routers are random too."""
    key = name + json.dumps(changes, sort_keys=True)
    if key not in _made:
        _made[key] = _make(name, changes)
    model, files, state = _made[key]
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    torch.set_rng_state(state)  # tests draw numbers after it
    return copy.deepcopy(model)


_made: dict[str, tuple[Any, dict[str, bytes], torch.Tensor]] = {}
"""The model, its files, and the state of the random numbers after it was made."""


def _make(name: str, changes: dict[str, Any]) -> tuple[Any, dict[str, bytes], torch.Tensor]:
    import transformers

    family, settings = CASES[name]
    torch.manual_seed(5)
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**{**SIZES, **settings, **changes})
    config._attn_implementation = "eager"  # the others leave out soft caps
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                tensor += (0.05 if "correction" in key else 0.3) * torch.randn_like(tensor)
            else:
                tensor.normal_(0, 1.5 / tensor.shape[-1] ** 0.5)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model.save_pretrained(folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | WRITTEN.get(name, {})))
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
    return model, files, torch.get_rng_state()


def prompt(length: int, start: int = 0) -> list[int]:
    """Token ids that do not repeat with a short period."""
    return [(7 * i * i + 3 * i + 11) % VOCABULARY for i in range(start, start + length)]
