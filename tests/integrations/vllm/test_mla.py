"""Latent attention inside vLLM: its own DeepSeek model, decoding with our kernels over its latent cache.

The example model is changed in two ways that vLLM 0.32 needs on a CPU: vLLM's DeepSeek class reads no tied head, so the copy stores one; and its
C++ kernel of interleaved rotary embeddings answers wrongly, so vLLM's own torch implementation of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata, MLACommonMetadata
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention import selector
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from gristmill.autotune.resolve import Resolver
from gristmill.integrations.vllm import explain, register
from gristmill.integrations.vllm.attention import GristmillAttentionBackend
from gristmill.integrations.vllm.mla import GristmillMLA, GristmillMLABackend
from tests.integrations.vllm.conftest import MODELS
from tests.integrations.vllm.test_quantization import PARAMS, of_vllm, runtime
from tests.integrations.vllm.test_worker import generated, prompts, texts
from tests.runtime.test_weight_update import directory

LATENT, ROPE, NOPE, V = 512, 64, 128, 128


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """docs-deepseek with a head of its own."""
    tensors: dict[str, torch.Tensor] = {}
    for file in (MODELS / "docs-deepseek").glob("*.safetensors"):
        tensors |= load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    changes = {"tie_word_embeddings": False, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return directory("docs-deepseek", tmp_path_factory.mktemp("untied") / "model", tensors, **changes)


@pytest.fixture
def right_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)


@pytest.fixture
def in_place_of_vllms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that registers our backend as vLLM's one of latent attention on a CPU."""
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", dict(registry._ATTN_OVERRIDES))

    def change() -> None:
        selector._cached_get_attn_backend.cache_clear()
        register_backend(AttentionBackendEnum.CPU_MLA, "gristmill.integrations.vllm.custom.Backend")

    yield change
    selector._cached_get_attn_backend.cache_clear()


@pytest.mark.usefixtures("right_rotary")
def test_the_ids_are_those_of_vllms_kernels_and_of_the_runtime(
    host: Callable[..., Any],
    deepseek: Path,
    in_place_of_vllms: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = texts(6)  # prompts of 1 to 600 tokens, decoded together
    options: dict[str, Any] = {"quantization": None, "max_num_batched_tokens": 1024}
    expected = generated(of_vllm(host, deepseek, **options).generate(prompts(ids), PARAMS))
    assert expected == runtime(deepseek, ids, block_size=16)

    calls: list[str] = []
    for name in ("forward_mqa", "do_kv_cache_update"):
        method = getattr(GristmillMLA, name)

        def counted(self: Any, *rest: Any, _name: str = name, _method: Any = method) -> Any:
            calls.append(_name)
            return _method(self, *rest)

        monkeypatch.setattr(GristmillMLA, name, counted)
    in_place_of_vllms()
    llm = of_vllm(host, deepseek, **options)
    assert generated(llm.generate(prompts(ids), PARAMS)) == expected
    assert calls.count("forward_mqa") >= 4 * 15 and calls.count("do_kv_cache_update") >= 4 * 16

    decode = GristmillMLA.forward_mqa

    def planted(self: Any, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
        metadata.decode.block_table = metadata.decode.block_table.roll(1, 0)  # the blocks of other requests
        return decode(self, q, cache, metadata, layer)

    monkeypatch.setattr(GristmillMLA, "forward_mqa", planted)
    assert generated(llm.generate(prompts(ids), PARAMS)) != expected


@pytest.mark.usefixtures("right_rotary")
def test_with_quantized_projections(
    host: Callable[..., Any], deepseek: Path, in_place_of_vllms: Callable[[], None]
) -> None:
    """vLLM takes W_UK and W_UV out of kv_b_proj, whose weight is packed by then."""
    ids = texts(4)
    in_place_of_vllms()
    llm = of_vllm(host, deepseek, additional_config={"gristmill": {"quant": "int8_ch"}})
    expected = runtime(deepseek, ids, quant="int8_ch", block_size=16)
    assert generated(llm.generate(prompts(ids), PARAMS)) == expected
    (scheme,) = {row["scheme"] for row in explain() if row["name"].endswith("kv_b_proj")}
    assert scheme == "int8_ch"


def layer_of(**changes: Any) -> GristmillMLA:
    """One layer with 3 heads."""
    fields: dict[str, Any] = {
        "num_heads": 3,
        "head_size": LATENT + ROPE,
        "scale": (NOPE + ROPE) ** -0.5,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": V,
        "kv_b_proj": None,
    }
    with set_current_vllm_config(VllmConfig()):
        return GristmillMLA(**{**fields, **changes})


@pytest.mark.parametrize("parts", [True, False])
def test_decoding_over_a_latent_cache(
    parts: bool, policy_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks in any order, unowned slots NaN, a padded slot, prompts behind the decodes, against attention written out."""
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    layer, size = layer_of(), 16
    layer.prepare(size, torch.float32, torch.device("cpu"), [4], [64])
    lengths = [20, 33, 1]
    table = torch.tensor([[7, 2, 0], [4, 8, 1], [5, 3, 6]], dtype=torch.int32)
    cache = torch.full((9, size, LATENT + ROPE), torch.nan)
    latents = [torch.randn(length, LATENT + ROPE) for length in lengths]
    slots = [
        int(table[row, position // size]) * size + position % size
        for row, length in enumerate(lengths)
        for position in range(length)
    ]
    rows = torch.cat([*latents, torch.randn(1, LATENT + ROPE)])
    layer.do_kv_cache_update(
        rows[:, :LATENT], rows[:, None, LATENT:], cache, torch.tensor([*slots, -1]), "auto", torch.ones(1)
    )
    assert int(cache.isfinite().all(-1).sum()) == sum(lengths)
    q = torch.randn(3, 3, LATENT + ROPE)
    metadata = MLACommonMetadata(
        num_reqs=4,
        max_query_len=40,
        max_seq_len=40,
        num_actual_tokens=43,
        query_start_loc=torch.tensor([0, 1, 2, 3, 43], dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        num_decodes=3,
        num_decode_tokens=3,
        num_prefills=1,
        decode=MLACommonDecodeMetadata(
            block_table=table, seq_lens=torch.tensor(lengths, dtype=torch.int32), dcp_tot_seq_lens=None
        ),
    )
    query = (q[..., :LATENT], q[..., LATENT:]) if parts else q
    out, lse = layer.forward_mqa(query, cache, metadata, None)
    assert lse is None and out.shape == (3, 3, LATENT)
    for row, latent in enumerate(latents):
        weights = torch.softmax(q[row] @ latent.T * layer.scale, -1)
        torch.testing.assert_close(out[row], weights @ latent[:, :LATENT], atol=1e-5, rtol=1e-4)


def test_writing_while_vllm_measures_memory_does_nothing() -> None:
    empty = torch.empty(0)
    layer_of().do_kv_cache_update(empty, empty, empty, empty, "auto", empty)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": "encoder_only"}, "attn_type encoder_only"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"indexer": object()}, "sparse attention"),
    ],
)
def test_latent_attention_refuses_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"latent attention backend does not serve {name}: leave out"):
        layer_of(**fields)


@pytest.mark.parametrize(
    ("model", "backend"),
    [("docs-deepseek", GristmillMLABackend), ("docs-llama", GristmillAttentionBackend)],
)
def test_custom_is_the_class_that_the_model_needs(model: str, backend: Any) -> None:
    register()
    config = VllmConfig(model_config=ModelConfig(str(MODELS / model), dtype="bfloat16"))
    with set_current_vllm_config(config):
        chosen = AttentionBackendEnum.CUSTOM.get_class()
        assert chosen is backend
        asked = {
            "head_size": LATENT + ROPE if chosen.is_mla() else 64,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": 64,
            "use_mla": chosen.is_mla(),
            "has_sink": False,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": DeviceCapability(9, 0),
            "attn_type": "decoder",
        }
        assert chosen.validate_configuration(**asked) == []
        assert chosen.validate_configuration(**{**asked, "kv_cache_dtype": "fp8"}) == [
            "kv_cache_dtype not supported"
        ]
        (reason,) = chosen.validate_configuration(**{**asked, "use_mla": not chosen.is_mla()})
        assert reason.endswith("MLA not supported")
    assert AttentionBackendEnum.CUSTOM.get_class() is GristmillAttentionBackend  # without a model


def test_the_module_has_no_other_names() -> None:
    from gristmill.integrations.vllm import custom

    with pytest.raises(AttributeError, match="has no attribute Frontend"):
        custom.Frontend  # noqa: B018
