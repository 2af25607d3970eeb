"""gristmill inside transformers: ids of both example models, padding, windows and sinks, continuous batching, quantizer, undoing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, masking_utils
from transformers.modeling_utils import AttentionInterface

import gristmill.integrations.transformers as host
from gristmill import LLM, SamplingParams, nn
from gristmill.autotune import binding
from gristmill.autotune.resolve import Resolver
from gristmill.integrations import Host, HostError
from gristmill.integrations.transformers import (
    GristmillConfig,
    attention,
    disable,
    enable,
    explain,
    plans,
    use_norms,
)
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS, NAMES, eval_tokens

OPTIONS = {"attn_implementation": "gristmill", "experts_implementation": "gristmill"}
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)


@pytest.fixture(autouse=True)
def enabled(policy_file, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switched on with our CPU kernels alone, which are taken as verified; off again afterwards."""
    policy_file(
        'strict = true\n[pins]\n"*" = ["*_cpu", "linear_torch", "linear_dequant_torch", '
        '"moe_chain_torch", "process_logits_torch", "logprobs_torch"]\n'
    )
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    enable()
    yield
    disable()


def load(path: str | Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / path, dtype=torch.float32, **options).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every attention that ours computes."""
    found: list[int] = []
    ours = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a: (found.append(1), ours(*a))[1])
    return found


def tiny(kind: str, **values: Any) -> Any:
    """A random model of two layers."""
    common = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
    }
    config = getattr(transformers, f"{kind}Config")(**common, **values)
    torch.manual_seed(3)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@torch.no_grad()
def logits(
    model: Any, implementation: str, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    found: torch.Tensor = model(ids, attention_mask=mask).logits
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name: str, calls: list[int]) -> None:
    """Greedy, alone and in a padded batch; every attention and every layer of experts is ours."""
    theirs, ours = load(name), load(name, **OPTIONS)
    for rows in ([eval_tokens()[:40]], [[0, 0, 0, *eval_tokens()[50:60]], eval_tokens()[:13]]):
        ids = torch.tensor(rows)
        mask = (ids != 0).long()
        expected, found = (
            m.generate(ids, attention_mask=mask, generation_config=GREEDY) for m in (theirs, ours)
        )
        assert torch.equal(found, expected)
    assert len(calls) == 2 * 12 * ours.config.num_hidden_layers and not explain()


def test_steps_of_other_lengths_share_their_plans() -> None:
    """No plan and no signature of a call is added by a step, however long the sequence is."""
    model, ids = load(DEEPSEEK, **OPTIONS), torch.tensor([eval_tokens()[:20]])
    use_norms(model)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=3, **options)
    before = len(binding.PLANS), len(binding._AUTOMATIC), len(plans._PLANS)
    model.generate(ids, max_new_tokens=12, **options)
    assert (len(binding.PLANS), len(binding._AUTOMATIC), len(plans._PLANS)) == before


def test_a_planted_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison notices a scale that is a hundredth off."""
    model, ids = load(LLAMA), torch.tensor([eval_tokens()[:40]])
    expected = logits(model, "sdpa", ids)
    torch.testing.assert_close(logits(model, "gristmill", ids), expected, rtol=1e-4, atol=1e-4)
    right = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *a: right(*a[:7], 1.01 * a[7], *a[8:]))
    assert (logits(model, "gristmill", ids) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("kind", ["Mistral", "GptOss", "Gemma2"])
def test_windows_sinks_soft_caps_and_padding(kind: str, left: bool) -> None:
    special = {
        "GptOss": {"num_local_experts": 4},
        "Gemma2": {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 16},
    }
    model = tiny(kind, sliding_window=8, **special.get(kind, {}))
    ids = torch.randint(1, 97, (3, 21))
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 5, 12)):
        mask[row, :pad] = 0
    mask = mask if left else mask.flip(1)
    for given in (None, mask):
        expected, found = (logits(model, how, ids, given) for how in ("eager", "gristmill"))
        kept = torch.ones_like(ids, dtype=torch.bool) if given is None else given.bool()
        torch.testing.assert_close(found[kept], expected[kept], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["Bert", "ModernBert"])
@torch.no_grad()
def test_encoders_in_both_directions(kind: str, calls: list[int]) -> None:
    """Whole and padded batches; ModernBERT has layers with a window of 3 tokens on each side."""
    special = {"ModernBert": {"local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0}}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.2,
        **special.get(kind, {}),
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    ids, mask = torch.randint(1, 97, (3, 21)), torch.ones(3, 21, dtype=torch.int64)
    for row, pad in enumerate((0, 5, 12)):
        mask[row, 21 - pad :] = 0
    for given in (torch.ones_like(mask), mask, mask.flip(1)):
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=given).last_hidden_state[given.bool()]
        before = len(calls)
        model.set_attn_implementation("gristmill")
        found = model(ids, attention_mask=given).last_hidden_state[given.bool()]
        assert len(calls) == before + 3
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_experts_of_another_form_run_their_own_code() -> None:
    model = tiny("GptOss", num_local_experts=4, experts_implementation="gristmill")
    model.set_experts_implementation("gristmill")
    logits(model, "gristmill", torch.randint(1, 97, (1, 5)))
    assert explain() == {
        "GptOssExperts": "experts with biases, stored transposed, with gate and up interleaved, with a gating of their own"
    }
    host.experts.LEFT.clear()


def test_continuous_batching(calls: list[int]) -> None:
    """By our name where transformers takes it for continuous batching, else in place of paged|eager."""
    by_name = host.HOST.require() < "5.20"
    enable(paged_eager=True)
    theirs, ours = load(LLAMA), load(LLAMA, attn_implementation="gristmill" if by_name else "eager")
    prompts = [eval_tokens()[i * 50 :][:size] for i, size in enumerate((3, 17, 40))]
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=4095, pad_token_id=0)
    options = {} if by_name else {"auto_switch_to_flash": False}
    batch = ours.generate_batch(
        prompts,
        generation_config=greedy,
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, **options),
    )
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        completions = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
        expected.append(completions[0, len(prompt) :].tolist())
    assert [answer.generated_tokens for answer in batch.values()] == expected and len(calls) >= 8 * 6


def test_what_is_not_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = load(LLAMA, attn_implementation="gristmill"), torch.tensor([eval_tokens()[:8]])
    with pytest.raises(
        NotImplementedError, match="takes a cache that grows: .* cache_implementation='dynamic'"
    ):
        model.generate(ids, generation_config=GREEDY, cache_implementation="static", disable_compile=True)
    layer = model.model.layers[0].self_attn
    q = torch.zeros(1, 8, 4, 32)
    for wrong, message in (
        ({"dropout": 0.1}, "no dropout: call model.eval"),
        (
            {"is_causal": False, "softcap": 2.0},
            "no cross-attention, sinks or soft caps; LlamaAttention has 4 .* a soft cap",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            attention.attention(layer, q, q, q, None, **wrong)
    with pytest.raises(NotImplementedError, match=r"a mask \[batch, keys\] = \[1, 4\] of padding"):
        attention.attention(layer, q, q, q, torch.zeros(1, 1, 4, 4))
    both = attention.mask(1, 4, 4, mask_function=masking_utils.bidirectional_mask_function)
    with pytest.raises(
        NotImplementedError, match="LlamaAttention is causal and its mask is of both directions"
    ):
        attention.attention(layer, q, q, q, both)
    padding = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="LlamaAttention is not causal and its mask is of a causal"):
        attention.attention(layer, q, q, q, padding, is_causal=False)
    with pytest.raises(NotImplementedError, match="LlamaAttention has 2 queries and 4 keys"):
        attention.attention(layer, q[:, :, :2], q, q, None, is_causal=False)
    with pytest.raises(ValueError, match="for continuous batching; use attn_implementation='gristmill'"):
        attention.paged(layer, q, q, q)
    with pytest.raises(NotImplementedError, match="asks for another mask"):
        attention.mask(1, 4, 4, mask_function=lambda *_: True)
    chunks = masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    assert attention.mask(1, 8, 8, mask_function=chunks, local_size=8) is None
    with pytest.raises(
        NotImplementedError, match="another mask .of chunks of 8 tokens, of which 9 tokens are more"
    ):
        attention.mask(1, 9, 9, mask_function=chunks, local_size=8)
    window = masking_utils.sliding_window_causal_mask_function(8)
    packed = masking_utils.packed_sequence_mask_function(torch.zeros(1, 9, dtype=torch.int64))
    assert attention.mask(1, 9, 9, mask_function=window, local_size=8) is None
    with pytest.raises(NotImplementedError, match="asks for another mask: use"):
        attention.mask(1, 9, 9, mask_function=masking_utils.and_masks(window, packed), local_size=8)


@pytest.mark.parametrize("name", NAMES)
def test_quantized_saved_and_loaded_back(name: str, tmp_path: Path) -> None:
    """The directory is read by transformers, and of a dense model by gristmill's runtime, with the same ids."""
    ids = torch.tensor([eval_tokens()[:20]])
    model = load(name, quantization_config=GristmillConfig("int4_g32"))
    layers = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert "model.layers.1.self_attn.o_proj" in layers and "lm_head" not in layers
    whole = torch.ones_like(ids)  # 0 is a token, not padding
    expected = model.generate(ids, attention_mask=whole, generation_config=GREEDY)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "gristmill", "version": 1, "scheme": "int4_g32"}
    again = load(tmp_path)
    assert {n for n, m in again.named_modules() if isinstance(m, nn.Linear)} == layers
    assert torch.equal(again.generate(ids, attention_mask=whole, generation_config=GREEDY), expected)
    if name == LLAMA:
        answer = LLM(tmp_path, dtype="fp32").generate([ids[0].tolist()], SamplingParams(max_tokens=12))[0]
        assert list(answer.token_ids) == expected[0, 20:].tolist()
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["model.layers.0.mlp.up_proj.scales"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.scales is missing in the checkpoint"):
            load(tmp_path)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "fp8", "fp8_block", "int8_ch", "int4_g32_zp"])
def test_every_kind_of_scale_survives(scheme: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = tiny("Llama")
    model.save_pretrained(tmp_path / "floats")
    quantized = LlamaForCausalLM.from_pretrained(
        tmp_path / "floats", quantization_config=GristmillConfig(scheme), dtype=torch.float32
    )
    quantized.save_pretrained(tmp_path / "stored")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.float32)
    pairs = list(zip(quantized.named_modules(), again.modules(), strict=True))
    assert sum(isinstance(b, nn.Linear) for _, b in pairs) == 14
    assert all(a.weight().identical(b.weight()) for (_, a), b in pairs if isinstance(a, nn.Linear))


def test_what_a_configuration_refuses() -> None:
    with pytest.raises(ValueError, match="int5"):
        GristmillConfig("int5_gx")
    with pytest.raises(ValueError, match="bf16 is no quantized scheme: load the model with dtype='bf16'"):
        GristmillConfig("bf16")
    with pytest.raises(ValueError, match="written by a newer gristmill"):
        GristmillConfig("int4_g128", version=2)
    some = load(LLAMA, quantization_config=GristmillConfig("int4_g32", ["down_proj"]))
    kinds = {n.rpartition(".")[2] for n, m in some.named_modules() if isinstance(m, nn.Linear)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_norms() -> None:
    model, ids = load(DEEPSEEK), torch.tensor([eval_tokens()[:16]])
    expected = logits(model, "sdpa", ids)
    report = use_norms(model)
    assert set(report.values()) == {"gristmill"} and len(report) > 2 * model.config.num_hidden_layers
    torch.testing.assert_close(logits(model, "sdpa", ids), expected, rtol=1e-4, atol=1e-4)
    assert set(use_norms(model, on=False).values()) == {"switched off"}
    assert torch.equal(logits(model, "sdpa", ids), expected)


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    class OnePlusRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(64)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (64,), 1 + self.weight, self.variance_epsilon)

    model = torch.nn.ModuleDict({"norm": OnePlusRMSNorm(), "gemma": torch.nn.Identity()})
    (reason,) = use_norms(model).values()
    assert "computes something else" in reason and "forward" not in vars(model["norm"])


def test_enabling_twice_and_undoing_it() -> None:
    theirs = AttentionInterface._global_mapping["paged|eager"]
    for _ in range(2):
        enable(paged_eager=True)
    assert AttentionInterface._global_mapping["paged|eager"] is attention.paged
    disable()
    disable()
    assert AttentionInterface._global_mapping["paged|eager"] is theirs
    for options in (OPTIONS, {"quantization_config": GristmillConfig("int4_g32")}):
        with pytest.raises((ValueError, KeyError), match="gristmill"):
            load(LLAMA, **options)


def test_a_version_that_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "HOST", host.HOST)  # undone at the end: the package keeps the planted one
    monkeypatch.setattr(
        "gristmill.integrations.transformers.version.HOST",
        Host("transformers", ("transformers",), "98", "99"),
    )
    with pytest.raises(HostError, match="gristmill serves transformers >=98,<99, and transformers 5"):
        host.__getattr__("enable")
