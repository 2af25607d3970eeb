"""The calls of a model: every operation of a step, from a checkpoint's config.json, the tensor-parallel size and a mix of steps.

Layers are as the runtime builds them: q, k and v fused, gate and up fused with silu_mul in the epilogue, MLA's two
down-projections fused. Shapes are those of one rank. Work that no registered operation does (embedding, the absorbed products
of MLA, communication) is not listed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.kernel_registry.registry import default_registry

MODELS = Path(__file__).parent / "models"
KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")


class ShapeError(ValueError):
    """No shapes can be derived from a model or a mix; the message says what was expected and what was given."""


LINEAR, EXPERT = "model.layers.{}.self_attn.o_proj", "model.layers.{}.mlp.experts.0.gate_proj"
"""Modules that represent the linear layers and the experts of a model. They are of a middle layer, because formats may skip the first ones."""


@dataclass(frozen=True)
class Stored:
    """Schemes of the linear layers and of the experts; with `act_order`, the order of columns does not follow the groups."""

    linear: str = "bf16"
    experts: str = "bf16"
    act_order: bool = False


def stored(config: Mapping[str, Any], layers: int) -> Stored:
    """The schemes of ``quantization_config``; bf16 if there is none. FormatError (a ValueError) for an unsupported method."""
    quant = config.get("quantization_config")
    if not quant:
        return Stored()
    from gristmill.quant.formats import FormatError, open_format
    from gristmill.quant.formats.contract import Fields

    stored = open_format(Fields(quant, "quantization_config").data)
    try:
        linear, experts = (stored.scheme_of(name.format(layers // 2)) for name in (LINEAR, EXPERT))
    except FormatError as error:
        raise FormatError(f"{error}; name the scheme with --weights") from error
    return Stored(str(linear or "bf16"), str(experts or "bf16"), stored.ordered)


@dataclass(frozen=True)
class Step:
    """One kind of step: `seqs` sequences with `new` new tokens each and contexts of `ctx`; `weight` is its relative frequency."""

    seqs: int
    new: int
    ctx: int
    weight: float = 1.0

    @property
    def tokens(self) -> int:
        return self.seqs * self.new

    def __str__(self) -> str:
        return f"decode {self.seqs}x{self.ctx}" if self.new == 1 else f"prefill {self.seqs}x{self.new}"

    @staticmethod
    def decode(text: str) -> Step:
        """``32x2048`` or ``32x2048*9``: 32 sequences that have 2048 tokens each, with weight 9."""
        seqs, ctx, weight = _numbers(text)
        return Step(seqs, 1, ctx, weight)

    @staticmethod
    def prefill(text: str) -> Step:
        """``2x1024`` or ``2x1024*0.5``: two prompts of 1024 tokens."""
        seqs, new, weight = _numbers(text)
        return Step(seqs, new, new, weight)


_DECODE, _PREFILL = (Step(1, 1, 1024), Step(32, 1, 2048)), (Step(1, 2048, 2048),)
MIXES = {
    "decode": _DECODE,
    "prefill": _PREFILL,
    "serve": (*_DECODE, *_PREFILL),
    "long": (Step(1, 1, 32768), Step(1, 8192, 8192)),
}
"""Named mixes: one user and thirty-two, one prompt, both, and long contexts."""

MIX = MIXES["serve"]
"""The mix when none is given."""


@dataclass(frozen=True)
class Call:
    """One problem of one step: its calls per step, and its part of the model."""

    op: str
    problem: str
    count: int
    part: str
    step: Step

    @property
    def weight(self) -> float:
        """Its relative frequency over the mix."""
        return self.count * self.step.weight


def _numbers(text: str) -> tuple[int, int, float]:
    match = re.fullmatch(r"(\d+)x(\d+)(?:\*(\d+(?:\.\d+)?))?", text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise ShapeError(
            f"step {text!r}: expected SEQUENCESxTOKENS, such as 32x2048, or 32x2048*9 for nine times the weight"
        )
    if not (weight := float(match[3] or 1)):
        raise ShapeError(f"step {text!r}: the weight must be positive")
    return int(match[1]), int(match[2]), weight


def model_names() -> list[str]:
    """Models whose configurations are shipped."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def load_config(name: str) -> dict[str, Any]:
    """The configuration of a shipped model, of a config.json, of the directory of a checkpoint, or of a repository of the hub."""
    path = MODELS / f"{name}.json"
    if not path.is_file():
        path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if "/" in name and not path.exists():
        from gristmill.runtime.hub import HubName, local_config

        if HubName.parse(name) is not None:
            path = local_config(name)
    if not path.is_file():
        raise ShapeError(
            f"model {name!r}: expected a config.json, a directory with one, a repository of the Hugging Face hub (org/name), or one of "
            f"{', '.join(model_names())}"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ShapeError(f"{path}: line {error.lineno}: {error.msg}; expected a config.json") from error
    except UnicodeDecodeError as error:
        raise ShapeError(f"{path}: byte {error.start} is not UTF-8 text; expected a config.json") from error
    if not isinstance(config, dict) or config.get("model_type") not in KINDS:
        model_type = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise ShapeError(f"{path}: model_type {model_type!r}; known are {', '.join(KINDS)}")
    return config


def calls(
    config: Mapping[str, Any], tp: int = 1, mix: Sequence[Step] = MIX, weights: str | None = None
) -> list[Call]:
    """Every call of every step of `mix`, with problems checked by their operations. Linear layers are in the scheme `weights` if given, else
    in the checkpoint's.

    Raises:
        ShapeError: `tp` does not divide a size.
        FormatError: the checkpoint's quantization is not known.
    """
    shape = _Shape(config, tp, weights)
    registry = default_registry()
    calls = []
    for step in mix:
        merged: dict[tuple[str, str, str], int] = {}
        for op, text, count, part in shape.step(step):
            problem = str(registry.op(op).problem(text))
            merged[op, problem, part] = merged.get((op, problem, part), 0) + count
        calls += [Call(op, problem, count, part, step) for (op, problem, part), count in merged.items()]
    return calls


class _Shape:
    """Sizes of one rank."""

    def __init__(self, config: Mapping[str, Any], tp: int, weights: str | None) -> None:
        if tp < 1:
            raise ShapeError(f"tensor-parallel size {tp}; expected at least 1")
        self.kind, self.tp, self.config = str(config["model_type"]), tp, config
        self.h, self.layers, self.vocab = (
            self._int("hidden_size"),
            self._int("num_hidden_layers"),
            self._int("vocab_size"),
        )
        heads = self._int("num_attention_heads")
        kv_heads, self.head_dim = (
            self._int("num_key_value_heads", heads),
            self._int("head_dim", self.h // heads),
        )
        self.heads = self._share(heads, "num_attention_heads")
        # Fewer KV heads than ranks: each rank holds a copy of one.
        self.kv_heads = (
            1 if kv_heads < tp and tp % kv_heads == 0 else self._share(kv_heads, "num_key_value_heads")
        )
        own = Stored() if weights else stored(config, self.layers)
        order = ",act_order=true" if own.act_order else ""
        self.w, self.expert_w = ((weights or scheme) + order for scheme in (own.linear, own.experts))

    def step(self, step: Step) -> Iterator[tuple[str, str, int, str]]:
        """(operation, problem, calls, part) of one step."""
        m, layers = step.tokens, self.layers
        yield "rms_norm", f"m={m},n={self.h}", 1, "norm"
        yield "fused_add_rms_norm", f"m={m},n={self.h}", 2 * layers, "norm"
        yield from self._mla(step) if self.kind == "deepseek_v3" else self._attention(step)
        experts = next(
            (
                self._int(n)
                for n in ("num_experts", "n_routed_experts", "num_local_experts")
                if self.config.get(n)
            ),
            0,
        )
        dense = self._int("first_k_dense_replace", 0) if experts else layers
        if dense:
            yield from self._mlp(m, self._int("intermediate_size"), dense, "mlp")
        if experts:
            yield from self._experts(m, experts, layers - dense)
        yield (
            "linear",
            f"m={step.seqs},n={self._share(self.vocab, 'vocab_size')},k={self.h},w=bf16",
            1,
            "lm_head",
        )
        yield "sample", f"m={step.seqs},v={self.vocab}", 1, "sample"

    def _attention(self, step: Step) -> Iterator[tuple[str, str, int, str]]:
        m, d, layers = step.tokens, self.head_dim, self.layers
        every = self.config.get("attention_bias", self.kind == "gpt_oss")
        bias = (
            ",epilogue=bias" if every or self.kind == "qwen2" else ""
        )  # Qwen2 has biases on q, k and v only
        yield (
            "linear",
            f"m={m},n={(self.heads + 2 * self.kv_heads) * d},k={self.h},w={self.w}{bias}",
            layers,
            "qkv",
        )
        norm = ",norm=true" if self.kind in ("qwen3", "qwen3_moe") else ""
        heads = f"heads={self.heads},kv_heads={self.kv_heads},head_dim={d}"
        yield "qk_norm_rope_cache", f"t={m},{heads},rot={d}{norm}", layers, "rope, cache"
        window = self._int("sliding_window", 0) if self.kind == "gpt_oss" else 0
        base = f"{_ragged(step)},heads={self.heads},kv_heads={self.kv_heads},head_dim={d}" + (
            ",sinks=true" if window else ""
        )
        if window:
            yield "paged_attention", f"{base},window={window}", layers - layers // 2, "attention, window"
            layers //= 2
        yield "paged_attention", base, layers, "attention"
        yield (
            "linear",
            f"m={m},n={self.h},k={self.heads * d},w={self.w}{',epilogue=bias' if every else ''}",
            self.layers,
            "out",
        )

    def _mla(self, step: Step) -> Iterator[tuple[str, str, int, str]]:
        m, layers, rank = step.tokens, self.layers, self._int("q_lora_rank")
        latent, rope, nope, v = (
            self._int(n) for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        yield "linear", f"m={m},n={rank + latent + rope},k={self.h},w={self.w}", layers, "latents"
        yield "rms_norm", f"m={m},n={rank}", layers, "q_norm"
        yield "rms_norm", f"m={m},n={latent}", layers, "kv_norm"
        yield "linear", f"m={m},n={self.heads * (nope + rope)},k={rank},w={self.w}", layers, "q"
        yield "rotary_embedding", f"t={m},hq={self.heads},hk=1,d={rope},rot={rope},style=gptj", layers, "rope"
        yield "reshape_and_cache_mla", f"t={m},d={latent + rope}", layers, "cache"
        if step.new == 1:
            yield (
                "mla_attention",
                f"{_ragged(step)},heads={self.heads},latent_dim={latent},rope_dim={rope}",
                layers,
                "attention",
            )
        else:
            yield "linear", f"m={m},n={self.heads * (nope + v)},k={latent},w={self.w}", layers, "kv"
            text = f"{_ragged(step)},heads={self.heads},kv_heads={self.heads},qk_dim={nope + rope},v_dim={v}"
            yield "varlen_attention", text, layers, "attention"
        yield "linear", f"m={m},n={self.h},k={self.heads * v},w={self.w}", layers, "out"

    def _mlp(self, m: int, inner: int, layers: int, part: str) -> Iterator[tuple[str, str, int, str]]:
        i = self._share(inner, "intermediate_size")
        gate, down = ("bias+silu_mul", ",epilogue=bias") if self.config.get("mlp_bias") else ("silu_mul", "")
        yield "linear", f"m={m},n={2 * i},k={self.h},w={self.w},epilogue={gate}", layers, f"{part} gate_up"
        yield "linear", f"m={m},n={self.h},k={i},w={self.w}{down}", layers, f"{part} down"

    def _experts(self, m: int, e: int, layers: int) -> Iterator[tuple[str, str, int, str]]:
        top_k = self._int("num_experts_per_tok")
        inner = (
            self._int("moe_intermediate_size")
            if self.config.get("moe_intermediate_size")
            else self._int("intermediate_size")
        )
        yield "linear_fp32", f"m={m},n={e},k={self.h}", layers, "router"
        groups = ""
        if self.kind == "deepseek_v3":
            groups = f",n_group={self._int('n_group')},topk_group={self._int('topk_group')},scoring=sigmoid,bias=true"
        yield "grouped_topk", f"m={m},e={e},top_k={top_k}{groups}", layers, "choice of experts"
        share = self._share(inner, "the experts' intermediate size")
        text = f"m={m},top_k={top_k},e={e},h={self.h},i={share},w={self.expert_w}"
        if self.kind == "gpt_oss":
            text += ",epilogue=w13_bias+w2_bias+clamp"
        yield "moe", text, layers, "experts"
        if shared := self._int("n_shared_experts", 0):
            yield from self._mlp(m, shared * inner, layers, "shared experts")

    def _int(self, name: str, default: int | None = None) -> int:
        """A positive integer. `default` if the entry is missing or null, or if both are 0."""
        value = self.config.get(name)
        if default is not None and (value is None or (value == 0 and default == 0)):
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"config of a {self.kind}: {name} is {value!r}; expected a positive integer")
        return value

    def _share(self, value: int, name: str) -> int:
        if value % self.tp:
            raise ShapeError(f"{name} is {value}, which {self.tp} ranks cannot share evenly")
        return value // self.tp


def _ragged(step: Step) -> str:
    return f"q_tokens={step.tokens},seqs={step.seqs},max_q={step.new},max_ctx={step.ctx},total_ctx={step.seqs * step.ctx}"
