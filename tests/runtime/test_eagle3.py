"""Drafts of an EAGLE-3 head are those of its definition, and change no id."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime import warm_up
from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.speculation import eagle3
from gristmill.runtime.speculation.config import Speculation
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA
from tests.runtime.proofs import proves
from tests.runtime.test_mtp import GREEDY, normed, proposer_of, record, worst
from tests.runtime.test_speculation import PARAMS, PROMPTS, STATES, content

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB, DRAFT_VOCAB = 256, 4, 2, 64, 320, 4096, 3000
LAYERS = (1, 2, 4)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
}


def layer_outputs(ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The outputs of the three layers side by side, and of the last one, in float64, by transformers."""
    model = oracle.oracle(LLAMA).double()
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, x, out, i=i: seen.update({i: out[0] if isinstance(out, tuple) else out})
        )
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model.model(torch.tensor([list(ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    rows = {i: out.reshape(len(ids), HIDDEN) for i, out in seen.items()}
    model.float()
    return torch.cat([rows[i] for i in LAYERS], -1), rows[5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head for docs-llama: a random layer behind a projection that was fitted to the text, for 3,000 of the 4,096 tokens."""
    made: Path = tmp_path_factory.mktemp("eagle3")
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (HEADS * SIZE, 2 * HIDDEN),
        "self_attn.k_proj": (KV_HEADS * SIZE, 2 * HIDDEN),
        "self_attn.v_proj": (KV_HEADS * SIZE, 2 * HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    tensors = {
        f"midlayer.{name}": 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    for name in (
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
        "norm",
    ):
        tensors[name] = 1 + 0.3 * torch.randn(HIDDEN, generator=generator)
    x, y = (
        torch.cat(parts) for parts in zip(*(layer_outputs(oracle.window(i)) for i in range(4)), strict=True)
    )
    gram = x[:-1].T @ x[:-1] + 20 * torch.eye(3 * HIDDEN)
    tensors["fc"] = torch.linalg.solve(gram, x[:-1].T @ y[1:]).T.contiguous()
    tensors = {f"{name}.weight": value.bfloat16() for name, value in tensors.items()}
    known = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    model = oracle.oracle(LLAMA)
    head = model.lm_head.weight[known] * model.model.norm.weight / tensors["norm.weight"].float()
    tensors["lm_head.weight"] = head.detach().bfloat16()
    tensors["d2t"] = known - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, value=True)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


class Definition:
    """The head in float64, over whole sequences."""

    def __init__(self, folder: Path) -> None:
        self.w = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        self.norm_before_residual = bool(
            json.loads((folder / "config.json").read_text()).get("norm_before_residual")
        )
        self.embedding = oracle.oracle(LLAMA).model.embed_tokens.weight.detach().double()
        self.places = (self.w["d2t"] + torch.arange(DRAFT_VOCAB)).long()

    def rotated(self, x: Tensor) -> Tensor:
        """x [positions, heads, size]: element i and i + size / 2 are a pair."""
        angles = torch.arange(len(x)).double()[:, None] * 10000.0 ** (
            -torch.arange(0, SIZE, 2).double() / SIZE
        )
        cos, sin, (a, b) = angles.cos()[:, None], angles.sin()[:, None], x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def layer(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        def w(name: str) -> Tensor:
            return self.w[f"midlayer.{name}.weight"]

        length, group = len(tokens), HEADS // KV_HEADS
        above = normed(states, w("hidden_norm"))
        residual = above if self.norm_before_residual else states
        x = torch.cat((normed(self.embedding[list(tokens)], w("input_layernorm")), above), -1)
        q, k, v = ((x @ w(f"self_attn.{part}_proj").T).view(length, -1, SIZE) for part in "qkv")
        k, v = (part.repeat_interleave(group, 1) for part in (self.rotated(k), v))
        scores = torch.einsum("ihd,jhd->hij", self.rotated(q), k) * SIZE**-0.5
        scores += torch.full((length, length), -torch.inf).triu(1)
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(length, -1)
        residual = residual + attended @ w("self_attn.o_proj").T
        y = normed(residual, w("post_attention_layernorm"))
        gated = torch.nn.functional.silu(y @ w("mlp.gate_proj").T) * (y @ w("mlp.up_proj").T)
        return residual + gated @ w("mlp.down_proj").T

    def drafts(self, tokens: Sequence[int], count: int) -> tuple[list[int], Tensor]:
        """Greedy drafts behind known tokens, and the logits [count, vocab] of each."""
        known, drafts, rows = list(tokens), list[int](), list[Tensor]()
        states = layer_outputs(known[:-1])[0] @ self.w["fc.weight"].T
        for _ in range(count):
            out = self.layer(states, known[1:])[-1:]
            own = normed(out, self.w["norm.weight"])[0] @ self.w["lm_head.weight"].T
            rows.append(torch.full((VOCAB,), -torch.inf, dtype=torch.float64).index_copy(0, self.places, own))
            drafts.append(int(rows[-1].argmax()))
            known.append(drafts[-1])
            states = torch.cat((states, out))
        return drafts, torch.stack(rows)


@pytest.fixture(scope="module")
def definition(folder: Path) -> Definition:
    return Definition(folder)


def drafted(folder: Path, tokens: int = 3) -> Speculation:
    return Speculation("eagle3", tokens, folder, adaptive=False)


@pytest.mark.parametrize(
    "options", [{}, STATES["chunks"], {"decode_graphs": True}], ids=["plain", "chunks", "graphs"]
)
def test_drafts_are_those_of_the_definition(
    make: Callable[..., LLM], folder: Path, definition: Definition, options: dict[str, Any]
) -> None:
    llm = make(LLAMA, speculate=drafted(folder), **options)
    calls = record(llm)
    llm.generate(PROMPTS[:4], GREEDY)
    difference, wrong = worst(calls, definition)
    assert difference < 1e-4 and wrong == 0 and len(calls) > 30
    status = llm.engine.status().speculation
    assert status is not None and 0.05 < status.acceptance < 0.9


def test_a_norm_before_the_residual(make: Callable[..., LLM], folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "head"
    shutil.copytree(folder, other)
    (other / "config.json").write_text(json.dumps({**CONFIG, "norm_before_residual": True}))
    llm = make(LLAMA, speculate=drafted(other))
    calls = record(llm)
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))
    difference, wrong = worst(calls, Definition(other))
    assert difference < 1e-4 and wrong == 0 and calls


def test_faults_show(
    make: Callable[..., LLM], folder: Path, definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults: norms exchanged, halves exchanged, other layers or another order of them, states one off, a vocabulary one off."""
    cat = torch.cat

    def exchanged(head: Any) -> None:
        head.token_norm, head.hidden_norm = head.hidden_norm, head.token_norm

    def halves(head: Any) -> None:
        monkeypatch.setattr(
            eagle3.torch, "cat", lambda parts, dim=0: cat([*parts][::-1] if len(parts) == 2 else parts, dim)
        )

    def order(head: Any) -> None:
        states = head.states
        head.states = lambda hidden: states(hidden.roll(HIDDEN, 1))

    def inputs(head: Any) -> None:
        kept = target._kept
        kept.layers = tuple(layer + 1 for layer in kept.layers)

    def late(head: Any) -> None:
        states = head.states
        head.states = lambda hidden: states(hidden.roll(1, 0))

    def vocabulary(head: Any) -> None:
        head.places = (head.places + 1) % VOCAB

    for fault in (None, exchanged, halves, order, inputs, late, vocabulary):
        with monkeypatch.context():
            llm = make(LLAMA, speculate=drafted(folder))
            target: Any = llm.engine.runner
            calls = record(llm)
            if fault is not None:
                fault(proposer_of(llm)._model)
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8, ignore_eos=True))
            monkeypatch.undo()
        difference, _ = worst(calls, definition)
        assert (difference > 1e-3) == (fault is not None), fault


@proves("drafts", "eagle3", "LlamaForCausalLM")
@pytest.mark.parametrize("state", ["plain", pytest.param("preemption", marks=pytest.mark.slow)])
def test_same_ids(make: Callable[..., LLM], shared: Callable[..., LLM], folder: Path, state: str) -> None:
    llm = make(LLAMA, speculate=drafted(folder), **STATES[state])
    proposer = proposer_of(llm)
    assert content(llm.generate(PROMPTS, PARAMS)) == content(shared(LLAMA).generate(PROMPTS, PARAMS))
    status = llm.engine.status().speculation
    assert status is not None and status.accepted_tokens > 3
    assert not proposer._requests and len(proposer._free) == llm.engine.runner.max_seqs


def test_up_to_the_limit(make: Callable[..., LLM], shared: Callable[..., LLM], folder: Path) -> None:
    """The head has positions for the sequences of the engine, and is not asked for more."""
    llm, params = make(LLAMA, max_model_len=64, speculate=drafted(folder, 8)), SamplingParams(max_tokens=64)
    prompts = [prompt[:20] for prompt in PROMPTS]
    done, whole = llm.generate(prompts, params), shared(LLAMA).generate(prompts, params)
    assert [each.token_ids for each in done] == [
        each.token_ids[: 64 - len(prompt)] for each, prompt in zip(whole, prompts, strict=True)
    ]
    head: Any = proposer_of(llm)._model
    assert len(head.attention.rope.table) == 64


@pytest.mark.parametrize("covered", [True, False])
def test_warm_up_covers_the_head(
    make: Callable[..., LLM], folder: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch, covered: bool
) -> None:
    """No kernel is selected afterwards, that of the projection of the target's states included. Planted fault: its stage is left out.
    The model is quantized, because its own matrices have the shape of the projection."""
    if not covered:
        monkeypatch.setattr(warm_up, "_states", lambda model, config: ())
    options: dict[str, Any] = {
        "max_seqs": 2,
        "max_batch_tokens": 32,
        "max_model_len": 64,
        "quant": "int8_g128",
    }
    own = replace(policy, weight_memory=1.07 + 0.01 * covered)  # whose plans no other engine has used
    llm = make(LLAMA, speculate=drafted(folder, 2), policy=own, **options)
    llm.engine.warm_up()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=12))
    late = [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    assert bool(late) != covered and all("linear n=256,k=768" in message for message in late), late


def test_a_head_without_a_vocabulary_of_its_own(
    make: Callable[..., LLM], shared: Callable[..., LLM], folder: Path, tmp_path: Path
) -> None:
    """It uses the target's logits head."""
    write(tmp_path, folder, drop=("d2t", "t2d", "lm_head.weight"), draft_vocab_size=VOCAB)
    llm = make(LLAMA, speculate=f"eagle3:{tmp_path}:2")
    assert proposer_of(llm)._model.head is llm.engine.runner.model.head  # type: ignore[union-attr, attr-defined]
    assert content(llm.generate(PROMPTS[:2], GREEDY)) == content(shared(LLAMA).generate(PROMPTS[:2], GREEDY))


def write(
    made: Path,
    folder: Path,
    drop: Sequence[str] = (),
    change: dict[str, Tensor] | None = None,
    **entries: Any,
) -> None:
    """The head of `folder` with other entries of config.json and other tensors."""
    tensors = {
        name: value for name, value in load_file(folder / "model.safetensors").items() if name not in drop
    }
    save_file(tensors | (change or {}), made / "model.safetensors", metadata={"format": "pt"})
    (made / "config.json").write_text(json.dumps({**CONFIG, **entries}))


def test_mistakes(make: Callable[..., LLM], folder: Path, tmp_path: Path) -> None:
    offsets = load_file(folder / "model.safetensors")["d2t"]
    for kind, message, options in (
        (ConfigError, "architecture LlamaForCausalLMEagle3", {"architectures": ["BertModel"]}),
        (ConfigError, "a head of one layer", {"num_hidden_layers": 2}),
        (UsageError, "made for a target with hidden size 256 and 5000 tokens", {"vocab_size": 5000}),
        (
            UsageError,
            r"the layers \[1, 2, 6\]",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}},
        ),
        (CheckpointError, "has no tensor d2t", {"drop": ("d2t",)}),
        (CheckpointError, "no tensor lm_head.weight", {"drop": ("lm_head.weight",)}),
        (CheckpointError, "to a different id", {"change": {"d2t": offsets.flip(0).contiguous()}}),
        (CheckpointError, "no tensor fc.weight", {"drop": ("fc.weight",)}),
        (
            CheckpointError,
            r"no parameter of the model takes: .*midlayer\.more",
            {"change": {"midlayer.more": offsets}},
        ),
    ):
        write(tmp_path, folder, **options)  # type: ignore[arg-type]
        with pytest.raises(kind, match=message):
            make(LLAMA, speculate=drafted(tmp_path))
    with pytest.raises(UsageError, match="DeepseekV3ForCausalLM does not hand over"):
        make(DEEPSEEK, speculate=drafted(folder))
    with pytest.raises(UsageError, match="needs a model: eagle3:DIR"):
        make(LLAMA, speculate="eagle3")
