"""Sizes of public models, and the static problems of their layers on one of so many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gristmill.bench.shapes import load_config, model_names


class Experts(NamedTuple):
    """Routed experts, those of a token, the intermediate size of one, and of the shared ones together."""

    count: int
    top_k: int
    inner: int
    shared: int = 0


class Latent(NamedTuple):
    """Multi-head latent attention: ranks of queries (0: not compressed) and of keys, sizes of a head."""

    q_rank: int
    rank: int = 512
    rope: int = 64
    nope: int = 128
    v: int = 128


class Model(NamedTuple):
    """Sizes as in a config.json. inner: of the dense layers, 0 if there are none."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: Experts | None = None
    latent: Latent | None = None
    epilogue: str = "none"


def _stored(name: str) -> Model:
    """A model of bench/models."""
    c = load_config(name)
    heads = c["num_attention_heads"]
    count = next((c[n] for n in ("num_experts", "n_routed_experts", "num_local_experts") if c.get(n)), 0)
    one = c.get("moe_intermediate_size") or c["intermediate_size"]
    experts = (
        Experts(count, c["num_experts_per_tok"], one, c.get("n_shared_experts", 0) * one) if count else None
    )
    return Model(
        c["hidden_size"],
        0 if count and not c.get("first_k_dense_replace") else c["intermediate_size"],
        heads,
        c["num_key_value_heads"],
        c.get("head_dim", c["hidden_size"] // heads),
        c["vocab_size"],
        experts,
        Latent(c["q_lora_rank"]) if "kv_lora_rank" in c else None,
        "w13_bias+w2_bias+clamp" if c["model_type"] == "gpt_oss" else "none",
    )


MODELS = {
    **{name: _stored(name) for name in model_names()},
    "command-r-plus": Model(12288, 33792, 96, 8, 128, 256000),
    "dbrx": Model(6144, 0, 48, 8, 128, 100352, Experts(16, 4, 10752)),
    "deepseek-v2": Model(5120, 12288, 128, 128, 128, 102400, Experts(160, 6, 1536, 3072), Latent(1536)),
    "deepseek-v2-lite": Model(2048, 10944, 16, 16, 128, 102400, Experts(64, 6, 1408, 2816), Latent(0)),
    "ernie-4.5-300b": Model(8192, 28672, 64, 8, 128, 103424, Experts(64, 8, 3584)),
    "gemma-2-2b": Model(2304, 9216, 8, 4, 256, 256000),
    "gemma-2-9b": Model(3584, 14336, 16, 8, 256, 256000),
    "gemma-2-27b": Model(4608, 36864, 32, 16, 128, 256000),
    "gemma-3-1b": Model(1152, 6912, 4, 1, 256, 262144),
    "gemma-3-4b": Model(2560, 10240, 8, 4, 256, 262208),
    "gemma-3-12b": Model(3840, 15360, 16, 8, 256, 262208),
    "gemma-3-27b": Model(5376, 21504, 32, 16, 128, 262208),
    "glm-4.5": Model(5120, 12288, 96, 8, 128, 151552, Experts(160, 8, 1536, 1536)),
    "glm-4.5-air": Model(4096, 10944, 96, 8, 128, 151552, Experts(128, 8, 1408, 1408)),
    "granite-3.1-1b-a400m": Model(1024, 0, 16, 8, 64, 49155, Experts(32, 8, 512)),
    "granite-3.1-3b-a800m": Model(1536, 0, 24, 8, 64, 49155, Experts(40, 8, 512)),
    "grok-1": Model(6144, 0, 48, 8, 128, 131072, Experts(8, 2, 32768)),
    "jamba-1.5-large": Model(8192, 24576, 64, 8, 128, 65536, Experts(16, 2, 24576)),
    "jamba-1.5-mini": Model(4096, 14336, 32, 8, 128, 65536, Experts(16, 2, 14336)),
    "kimi-k2": Model(7168, 18432, 64, 64, 112, 163840, Experts(384, 8, 2048, 2048), Latent(1536)),
    "llama-2-7b": Model(4096, 11008, 32, 32, 128, 32000),
    "llama-2-13b": Model(5120, 13824, 40, 40, 128, 32000),
    "llama-3.1-405b": Model(16384, 53248, 128, 8, 128, 128256),
    "llama-3.2-1b": Model(2048, 8192, 32, 8, 64, 128256),
    "llama-3.2-3b": Model(3072, 8192, 24, 8, 128, 128256),
    "llama-4-maverick": Model(5120, 16384, 40, 8, 128, 202048, Experts(128, 1, 8192, 8192)),
    "llama-4-scout": Model(5120, 0, 40, 8, 128, 202048, Experts(16, 1, 8192, 8192)),
    "minimax-m2": Model(3072, 0, 48, 8, 128, 200064, Experts(256, 8, 1536)),
    "minimax-text-01": Model(6144, 0, 64, 8, 128, 200064, Experts(32, 2, 9216)),
    "mistral-7b": Model(4096, 14336, 32, 8, 128, 32000),
    "mistral-large": Model(12288, 28672, 96, 8, 128, 32768),
    "mistral-nemo": Model(5120, 14336, 32, 8, 128, 131072),
    "mistral-small-24b": Model(5120, 32768, 32, 8, 128, 131072),
    "mixtral-8x7b": Model(4096, 0, 32, 8, 128, 32000, Experts(8, 2, 14336)),
    "mixtral-8x22b": Model(6144, 0, 48, 8, 128, 32768, Experts(8, 2, 16384)),
    "olmoe-1b-7b": Model(2048, 0, 16, 16, 128, 50304, Experts(64, 8, 1024)),
    "phi-3-mini": Model(3072, 8192, 32, 32, 96, 32064),
    "phi-3.5-moe": Model(4096, 0, 32, 8, 128, 32064, Experts(16, 2, 6400)),
    "phi-4": Model(5120, 17920, 40, 10, 128, 100352),
    "qwen1.5-moe-a2.7b": Model(2048, 0, 16, 16, 128, 151936, Experts(60, 4, 1408, 5632)),
    "qwen2-57b-a14b": Model(3584, 0, 28, 4, 128, 151936, Experts(64, 8, 2560, 20480)),
    "qwen2.5-0.5b": Model(896, 4864, 14, 2, 64, 151936),
    "qwen2.5-1.5b": Model(1536, 8960, 12, 2, 128, 151936),
    "qwen2.5-7b": Model(3584, 18944, 28, 4, 128, 152064),
    "qwen2.5-32b": Model(5120, 27648, 40, 8, 128, 152064),
    "qwen2.5-72b": Model(8192, 29568, 64, 8, 128, 152064),
    "qwen3-0.6b": Model(1024, 3072, 16, 8, 128, 151936),
    "qwen3-1.7b": Model(2048, 6144, 16, 8, 128, 151936),
    "qwen3-4b": Model(2560, 9728, 32, 8, 128, 151936),
    "qwen3-14b": Model(5120, 17408, 40, 8, 128, 151936),
    "qwen3-32b": Model(5120, 25600, 64, 8, 128, 151936),
    "qwen3-30b-a3b": Model(2048, 0, 32, 4, 128, 151936, Experts(128, 8, 768)),
    "qwen3-coder-480b": Model(6144, 0, 96, 8, 128, 151936, Experts(160, 8, 2560)),
    "qwen3-next-80b": Model(2048, 0, 16, 2, 256, 151936, Experts(512, 10, 512, 512)),
    "smollm2-135m": Model(576, 1536, 9, 3, 64, 49152),
}
RANKS = (1, 2, 4, 8)


def linears(model: Model, ranks: int) -> Iterator[tuple[int, int, str]]:
    """(N, K, epilogue) of the linear layers of a rank, as the runtime fuses them."""
    h = model.hidden
    if (latent := model.latent) is None:
        heads, kv_heads = _share(model.heads, ranks), _share(model.kv_heads, ranks)
        yield (heads + 2 * kv_heads) * model.head_dim, h, "none"
        yield h, heads * model.head_dim, "none"
    else:
        heads = _share(model.heads, ranks)
        yield latent.q_rank + latent.rank + latent.rope, h, "none"
        yield heads * (latent.nope + latent.rope), latent.q_rank or h, "none"
        yield heads * (latent.nope + latent.v), latent.rank, "none"
        yield h, heads * latent.v, "none"
    for inner in (model.inner, model.experts.shared if model.experts else 0):
        if inner:
            yield 2 * _share(inner, ranks), h, "silu_mul"
            yield h, _share(inner, ranks), "none"
    yield _share(model.vocab, ranks), h, "none"


def experts(model: Model, ranks: int) -> Iterator[Experts]:
    """The experts of a rank that has a part of each, and of one that has some of them whole."""
    if model.experts is not None:
        yield model.experts._replace(inner=_share(model.experts.inner, ranks))
        if ranks > 1 and model.experts.count % ranks == 0:
            yield model.experts._replace(count=model.experts.count // ranks)


def _share(size: int, ranks: int) -> int:
    return max(1, size // ranks)
