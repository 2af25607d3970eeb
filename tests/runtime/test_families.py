"""Every family's logits and greedy ids equal to transformers', over lengths, batches, chunks of prompts and hits of the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.rope.cache import RopeParameters
from gristmill.quant import quantize
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.layer_attention import LayerAttention
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader import load
from gristmill.runtime.loader.config import load_config, parse_config
from gristmill.runtime.models import model_table
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import RequestTooLarge
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.family_cases import ARCHITECTURES, CASES, build, prompt
from tests.runtime.gguf_files import finish, new_writer
from tests.runtime.proofs import GREEDY, proves

NEW = 8
IDS = prompt(300)
PROMPTS = [prompt(length) for length in (1, 2, 17, 65, 150, 300)]
PARAMS = SamplingParams(max_tokens=NEW, temperature=0)
LIMITS = {"max_chunk": 48, "max_seqs": 4}
QUANTIZED = (
    "phi-3",
    "glm-4.5",
    "minimax-m2",
    "deepseek-v2",
    "olmo-3",
    "granite",
    "gemma-3",
    "command-a",
    "gemma-4-e2b",
)
OTHER_SOURCE = tuple(
    LayerAttention(2, size, size, source)
    for size, source in ((16, None), (16, None), (32, None), (16, 0), (16, 1), (32, 2))
)
"""Of "gemma-4-e2b": a layer that reads the keys and values of the first layer of its kind instead of those of the last."""
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("mistral with a window", {"windows": ()}),
    ("ministral", {"windows": (24,) * 4}),
    ("phi-4-mini", {"rope_dim": 16, "rope": RopeParameters()}),
    ("glm-4.5", {"rope_dim": 24}),
    ("glm-4.5", {"rope_interleaved": True}),
    ("olmo-3", {"layer_ropes": ()}),
    ("granite", {"embedding_scale": 1.0}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"softmax_scale": None}),
    ("granite", {"logit_scale": 1.0}),
    ("gemma-2", {"norm_offset": 0.0}),
    ("gemma-2", {"activation": "silu"}),
    ("gemma-2", {"score_cap": 0.0}),
    ("gemma-2", {"logit_cap": 0.0}),
    ("gemma-3", {"layer_ropes": ()}),
    ("gemma-4-e2b", {"v_norm": False}),
    ("gemma-4-e2b", {"softmax_scale": None}),
    ("gemma-4-e2b", {"windows": ()}),
    ("gemma-4-e2b", {"logit_cap": 0.0}),
    ("gemma-4-e2b", {"layer_attention": OTHER_SOURCE}),
    ("gemma-4-26b-a4b", {"moe": {"activation": "silu"}}),
    ("gemma-4-26b-a4b", {"moe": {"top_k": 2}}),
    ("command-r", {"rms_eps": 1e-5}),
    ("command-r", {"norm": "rms"}),
    ("command-a", {"layer_ropes": ()}),
    ("command-r+", {"rms_eps": 1e-1}),
    ("afmoe", {"layer_ropes": ()}),
    ("afmoe", {"embedding_scale": 1.0}),
    ("afmoe", {"moe": {"scale": 1.0}}),
    ("qwen2-moe", {"moe": {"norm_topk_prob": True}}),
    ("ministral-3", {"query_scale": None}),
    ("llama-4", {"query_scale": None}),
    ("llama-4", {"layer_ropes": (*[RopeParameters(5e4)] * 3, None, RopeParameters(5e4))}),
    ("llama-4", {"chunks": ()}),
    ("llama-4", {"chunks": (48,) * 5}),
    ("llama-4", {"qk_norm_plain": False}),
    ("llama-4", {"layer_ropes": ()}),
    ("llama-4 with two experts of a token", {"moe": {"weigh_input": False}}),
]
"""Configurations that a family could read wrongly, by the entries that are wrong."""


class Expected:
    """What transformers computes in float32, each answer once."""

    def __init__(self, model: Any) -> None:
        self.logits = oracle.logits(model, IDS)
        self._model, self._answers = model, dict[tuple[int, ...], oracle.Answer]()

    def answer(self, prompt: list[int], ids: Sequence[int]) -> oracle.Answer:
        """The greedy answer to a prompt, as far as `ids` follow it."""
        key = (*prompt, *ids)
        if key not in self._answers:
            self._answers[key] = oracle.answer_along(self._model, prompt, ids, NEW)
        return self._answers[key]


def check_family(name: str, llm: LLM, expected: Expected) -> None:
    """Compares a family in float32, whose engine takes fewer prompts than there are, in chunks; the second round finds their beginnings in the
    prefix cache."""
    assert oracle.error(window_logits(llm.engine, IDS), expected.logits) < 1e-4
    for _ in range(2):
        compared = oracle.Comparison(name)
        for done, given in zip(llm.generate(PROMPTS, PARAMS), PROMPTS, strict=True):
            compared.add(done.token_ids, expected.answer(given, done.token_ids))
        compared.finish()
    assert {chunk.cached_tokens for chunk in llm.stream(PROMPTS[-1], PARAMS)} == {288}


@proves("logits and ids", GREEDY, ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_a_family(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    expected = Expected(build(name, tmp_path))
    check_family(name, make(tmp_path, **LIMITS), expected)


SHOWN_BY_SHAPES = {
    "first_k_dense_replace",
    "head_dim",
    "n_shared_experts",
    "num_attention_heads",
    "num_dense_layers",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_nextn_predict_layers",
    "num_shared_experts",
    "q_lora_rank",
}
"""Entries with another value than the model's are refused when tensors are read."""


@pytest.mark.parametrize("name", [name for name in CASES if " with " not in name])
def test_entries_left_out(name: str, tmp_path: Path) -> None:
    """What config.json does not say is as in transformers' class of the family, or refused."""
    config = build(name, tmp_path).config
    data = json.loads((tmp_path / "config.json").read_text())
    for entry in data.keys() - SHOWN_BY_SHAPES - {"architectures", "model_type", "layer_types", "dtype"}:
        rest = {key: value for key, value in data.items() if key != entry}
        try:
            completed = json.loads(json.dumps(type(config).from_dict(rest).to_dict()))
            expected = parse_config({**completed, "architectures": data["architectures"]})
            actual = parse_config(rest)
        except (ConfigError, StrictDataclassError):
            continue
        if actual.layer_ropes:
            actual = replace(actual, rope=expected.rope)  # of no layer
        assert replace(actual, eos_ids=()) == replace(expected, eos_ids=()), entry


def often(*names: str) -> list[Any]:
    """All cases; those without one of these names are slow tests."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


RANKS = often("olmo-3")


@proves("ranks", "2", ARCHITECTURES)
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """Fused tensors divided by their parts, norms over the heads of both ranks, norms of complete sums, stacked experts, sums of two blocks."""
    model, ids = build(name, tmp_path), prompt(100)
    llm = make(tmp_path, tensor_parallel=2, rank_timeout=60)
    try:
        expected = oracle.logits(model, ids)
        error = oracle.error(window_logits(llm.engine, ids), expected)
        assert error < 1e-4
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("name", "changes"), FAULTS, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_what_is_read_wrongly_shows(
    name: str,
    changes: dict[str, Any],
    make: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = build(name, tmp_path), prompt(100)
    parse = load.parse_config

    def wrong(*parts: Any) -> ModelConfig:
        read = parse(*parts)
        inner = {
            k: replace(getattr(read, k), **changes[k])
            for k, value in changes.items()
            if isinstance(value, dict)
        }
        return replace(read, **{**changes, **inner})

    monkeypatch.setattr(load, "parse_config", wrong)
    expected = oracle.logits(model, ids)
    error = oracle.error(window_logits(make(tmp_path).engine, ids), expected)
    assert error > 1e-3


def rounded(model: Any, folder: Path, scheme: QuantScheme) -> Any:
    """The model of transformers with its linear weights rounded to a scheme, which replaces the one in the folder."""
    values = load_file(folder / "model.safetensors")
    for weight in (weight for weight in model_table(load_config(folder)).weights if weight.kind == "linear"):
        for part in weight.part_names():
            name = part if part in values else f"{part}.weight"
            # A stacked tensor has its columns last.
            turned = weight.stacked and not weight.rows_first
            value = values[name].transpose(-1, -2).contiguous() if turned else values[name]
            value = quantize(value, scheme).dequantize()
            values[name] = value.transpose(-1, -2).contiguous() if turned else value
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    like = {"config": model.config, "dtype": torch.float32, "attn_implementation": "eager"}
    return type(model).from_pretrained(folder, **like).eval()


@proves("quantized", "int4 at load", ARCHITECTURES)
@proves("quantized", "fp8 at load", ARCHITECTURES)
@pytest.mark.parametrize("name", often(*QUANTIZED))
def test_rounded_as_it_is_read(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """transformers computes with the rounded weights; what is rounded again is the same."""
    ids = prompt(60)
    for scheme in ("int4_ch", "fp8_ch"):
        model = build(name, tmp_path / scheme)
        exact = oracle.logits(model, ids)
        llm = make(tmp_path / scheme, quant=scheme)
        expected = oracle.logits(rounded(model, tmp_path / scheme, QuantScheme.parse(scheme)), ids)
        error = oracle.error(window_logits(llm.engine, ids), expected)
        assert error < 1e-4 < oracle.error(exact, expected)


@proves("quantized", "compressed-tensors", ARCHITECTURES)
@proves("quantized", "int8 at load", ARCHITECTURES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_directory(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """What is written in int8 is what is rounded as it is read; transformers computes with the rounded weights."""
    plain, model, ids = tmp_path / "plain", build(name, tmp_path / "plain"), prompt(60)
    table, scheme = model_table(load_config(plain)), QuantScheme.parse("int8_ch")
    write_quantized(plain, tmp_path / "out", table, scheme, form="compressed-tensors")
    expected = oracle.logits(rounded(model, plain, scheme), ids)
    for folder, more in ((tmp_path / "out", {}), (plain, {"quant": scheme.name})):
        actual = window_logits(make(folder, **more).engine, ids)
        assert oracle.error(actual, expected) < 1e-4


@pytest.mark.parametrize(
    "name", often("phi-3", "deepseek-v2", "olmo-3", "gemma-3", "command-a", "gemma-4-e2b")
)
def test_preemption(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """More sequences than blocks: some are computed again from the beginning."""
    model = build(name, tmp_path)
    prompts, params = [prompt(20 + i, 7 * i) for i in range(6)], SamplingParams(max_tokens=40, temperature=0)
    probe = make(tmp_path, max_chunk=16, max_seqs=6)
    groups = len(probe.engine.runner.cache.windows)
    llm = make(tmp_path, num_blocks=12 * groups, max_chunk=16, max_seqs=6, enable_prefix_cache=False)
    preempted, scheduler = [], llm.engine.scheduler
    preempt = scheduler._preempt
    scheduler._preempt = lambda request: (preempted.append(request.id), preempt(request))[1]  # type: ignore[method-assign]
    compared = oracle.Comparison(name)
    for done, given in zip(llm.generate(prompts, params), prompts, strict=True):
        compared.add(done.token_ids, oracle.answer_along(model, given, done.token_ids, 40))
    compared.finish()
    assert preempted


def test_frequencies_by_length(
    make: Callable[..., LLM], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """longrope: up to the original length, with a notice, or longer, with the other frequencies."""
    model = build("phi-4-mini", tmp_path)
    with caplog.at_level("INFO", "gristmill"):
        short, long = make(tmp_path), make(tmp_path, max_model_len=500, max_chunk=48)
    assert caplog.text.count("up to 400 tokens; a max_model_len above that, up to 512") == 1
    assert (short.config.max_position, long.config.max_position) == (400, 500)
    for llm, length, right in ((short, 390, True), (long, 450, True), (long, 390, False)):
        ids = prompt(length)
        expected = oracle.logits(model, ids)
        error = oracle.error(window_logits(llm.engine, ids), expected)
        assert (error < 1e-4) == right, (length, error)
    given, compared = prompt(410), oracle.Comparison("beyond the original length")
    (done,) = long.generate([given], SamplingParams(max_tokens=NEW, temperature=0))
    compared.add(done.token_ids, oracle.answer_along(model, given, done.token_ids, NEW))
    compared.finish()
    with pytest.raises(RequestTooLarge, match="401 prompt tokens"):
        short.generate([prompt(401)], SamplingParams(max_tokens=1))


def test_norm_weights_are_not_rounded(make: Callable[..., LLM], tmp_path: Path) -> None:
    """In bfloat16: 1 + w has more bits than w. The norms are those of float32, rounded once."""
    model = build("gemma-3", tmp_path)
    layer = make(tmp_path, dtype="bf16").model.layers[1]  # type: ignore[union-attr]
    weight = 1 + model.model.layers[1].input_layernorm.weight.detach()
    assert torch.equal(layer.attention_norm.weight, weight) and not torch.equal(
        weight, weight.bfloat16().float()
    )
    x = torch.randn(3, 64).bfloat16()
    exact = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    assert float(((layer.attention_norm(x).double() - exact) / exact).abs().max()) < 2**-8
    residual = torch.zeros_like(x)
    assert torch.equal(layer.attention_norm.add_for(x.clone(), residual), layer.attention_norm(x))
    heads = torch.randn(3, 8, 32).bfloat16()
    exact = torch.nn.functional.rms_norm(heads[:, 4:6].double(), (32,))
    exact *= 1 + model.model.layers[1].self_attn.k_norm.weight.detach().double()
    attention, first = layer.attention, torch.zeros(3, dtype=torch.int64)  # at position 0 nothing is rotated
    keys, values = torch.zeros(2, 1, attention.plans.block_size, 2, 32).bfloat16()
    attention.write(
        heads,
        attention.q_norm,
        attention.k_norm,
        attention.eps,
        first,
        attention.rope.table,
        keys,
        values,
        torch.arange(3),
        attention.rope.interleaved,
        q=torch.empty(3, 4, 32).bfloat16(),
    )
    assert float(((keys[0, :3].double() - exact) / exact).abs().max()) < 2**-8


@pytest.mark.parametrize(
    "name",
    ["gemma-2", "gemma-3", "olmo-3", "granite", "llama-4", "ministral-3", "command-r+", "afmoe"]
    + ["gemma-4-e2b", "gemma-4-31b", "gemma-4-26b-a4b"],
)
def test_half_precision(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """As near to float32 as transformers' own bfloat16."""
    model, ids = build(name, tmp_path), prompt(100)
    expected = oracle.logits(model, ids)
    theirs = oracle.logits(model.bfloat16(), ids)
    ours = window_logits(make(tmp_path, dtype="bf16").engine, ids)
    assert oracle.excess(ours, theirs, expected) < 1.5


@proves("GGUF", "gemma2", "Gemma2ForCausalLM")
@proves("GGUF", "gemma3", "Gemma3ForCausalLM")
@pytest.mark.parametrize("name", ["gemma-2", "gemma-3"])
def test_a_gguf_file(name: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    """As llama.cpp writes it: 1 is in the weights of norms, and the frequencies of windows are not in the file."""
    gguf = pytest.importorskip("gguf")
    changes = {"query_pre_attn_scalar": {"gemma-2": 24, "gemma-3": 32}[name], "tie_word_embeddings": True}
    model = build(name, tmp_path / "plain", **changes)
    c, path, architecture = model.config, tmp_path / "m.gguf", name.replace("-", "")
    writer, names = new_writer(path, architecture, c.to_dict())
    writer.add_value_length(c.head_dim)
    writer.add_sliding_window(c.sliding_window)
    if name == "gemma-2":
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    else:
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            module, _, suffix = key.rpartition(".")
            if module != "lm_head":
                data = tensor + 1 if module.endswith("norm") else tensor
                writer.add_tensor(f"{names.get_name(module)}.{suffix}", data.numpy())
    finish(writer)
    ids = prompt(100)
    expected = oracle.logits(model, ids)
    actual = window_logits(make(path, activations="float").engine, ids)
    assert oracle.error(actual, expected) < 1e-4
