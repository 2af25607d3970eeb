"""vLLM's own models with our kernels: ids of gristmill's runtime from every format, tensor-parallel shards, what is left to vLLM."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import LoRAConfig, ModelConfig, VllmConfig, set_current_vllm_config

import gristmill
from gristmill.integrations.product import Product
from gristmill.integrations.vllm import explain
from gristmill.integrations.vllm.linear import GristmillLinearMethod
from gristmill.integrations.vllm.options import Options
from gristmill.integrations.vllm.quantization import GristmillConfig, name_in_vllm
from gristmill.integrations.vllm.report import REPORT
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import QuantTensor, Tensors, quantize
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.models import model_table
from tests.integrations.vllm.conftest import MODELS
from tests.integrations.vllm.test_worker import copied, generated, prompts, texts

Host = Callable[..., Any]
ALL = {"gristmill": {"take": "all"}}
"""Without times: what these tests show must not depend on them."""
OPEN: list[Any] = []
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def of_vllm(host: Host, folder: Path | str, **options: Any) -> Any:
    """vLLM's own model with our quantization; no worker of ours.

    One at a time: an engine takes the groups of processes down that the next one in this process has made.
    """
    shut_down()
    REPORT.layers.clear()
    made = host(
        folder, **{"worker_cls": "auto", "quantization": "gristmill", "enforce_eager": True, **options}
    )
    OPEN.append(made)
    return made


def shut_down() -> None:
    """End the engines that are open."""
    while OPEN:
        OPEN.pop().llm_engine.engine_core.shutdown()
        gc.collect()


def runtime(folder: Path | str, ids: Sequence[list[int]], **options: Any) -> list[list[int]]:
    llm = gristmill.LLM(MODELS / folder, dtype="float32", num_blocks=512, **options)
    wish = gristmill.SamplingParams(max_tokens=16, ignore_eos=True)
    return [list(done.token_ids) for done in llm.generate(list(ids), wish)]


def written(source: Path, out: Path, scheme: str, form: str) -> Path:
    config = parse_config(*open_checkpoint(source).config())
    write_quantized(source, out, model_table(config), QuantScheme.parse(scheme), form=form)
    return out


def test_a_float_model_is_quantized_while_it_is_loaded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"additional_config": {"gristmill": {"quant": "int4_g128"}}}
    llm = of_vllm(host, "docs-llama", worker_extension_cls="gristmill.integrations.vllm.Explain", **options)
    ids = texts(4)
    expected = runtime("docs-llama", ids, quant="int4_g128")
    assert generated(llm.generate(prompts(ids), PARAMS)) == expected
    assert llm.collective_rpc("gristmill_explain") == [explain()]
    taken = [row for row in explain() if row["taken"]]
    assert len(taken) == 4 * 6 and {row["scheme"] for row in taken} == {"int4_g128"}
    assert {row["kernels"] for row in taken} == {"linear_cpu"}

    apply = GristmillLinearMethod.apply

    def planted(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(self, layer, x, bias) * (1.5 if "layers.3.mlp.down" in self.prefix else 1)

    monkeypatch.setattr(GristmillLinearMethod, "apply", planted)
    llm.reset_prefix_cache()
    assert generated(llm.generate(prompts(ids), PARAMS)) != expected


def test_without_a_scheme_one_message(host: Host) -> None:
    with pytest.raises(gristmill.UsageError, match="needs a scheme: --additional-config"):
        of_vllm(host, "docs-llama")


def test_lora_is_refused_by_name() -> None:
    model = ModelConfig(str(MODELS / "docs-llama"), dtype="float32")
    with (
        set_current_vllm_config(VllmConfig(model_config=model, lora_config=LoRAConfig())),
        pytest.raises(gristmill.UsageError, match="does not serve LoRA: leave out --enable-lora"),
    ):
        GristmillConfig().get_quant_method(torch.nn.Module(), "model.layers.0.mlp.down_proj")


FORMATS = [
    ("gristmill", "int4_g128"),
    ("compressed-tensors", "nvfp4"),
    ("gptq", "int4_g128"),
    *(
        pytest.param(form, scheme, marks=pytest.mark.slow)
        for form, scheme in (
            ("compressed-tensors", "int4_g128"),
            ("compressed-tensors", "int8_ch"),
            ("fp8", "fp8_block"),
            ("modelopt", "nvfp4"),
        )
    ),
]


@pytest.mark.parametrize(("form", "scheme"), FORMATS)
def test_the_formats_that_we_read(host: Host, tmp_path: Path, form: str, scheme: str) -> None:
    folder = written(MODELS / "docs-llama", tmp_path / "quantized", scheme, form)
    llm, ids = of_vllm(host, folder, additional_config=ALL), texts(3)
    assert generated(llm.generate(prompts(ids), PARAMS)) == runtime(folder, ids)
    assert {row["scheme"] for row in explain() if row["taken"]} == {scheme}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
        dtype="float32",
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("qwen")
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2 if "embed" in name or "lm_head" in name else 0.06)
    model.save_pretrained(folder)
    return folder


def test_experts_quantized_while_they_are_loaded(host: Host, qwen: Path) -> None:
    ids = [[3, 5, 7, 9], [100] * 17, list(range(200, 260))]
    options = {"additional_config": {"gristmill": {"quant": "int4_g128"}}, "skip_tokenizer_init": True}
    llm = of_vllm(host, qwen, **options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    assert generated(llm.generate(prompts(ids), params)) == runtime(qwen, ids, quant="int4_g128")
    experts = [row for row in explain() if row["name"].endswith("experts")]
    assert [row["taken"] for row in experts] == [True, True] and "moe_cpu" in experts[0]["kernels"]
    routers = [row for row in explain() if row["name"].endswith("mlp.gate")]
    assert all(row["reason"] == "it is a router, which keeps its floats" for row in routers)


def test_experts_of_a_stored_format(host: Host, qwen: Path, tmp_path: Path) -> None:
    folder = written(qwen, tmp_path / "quantized", "int4_g128", "compressed-tensors")
    ids = [[3, 5, 7, 9], [100] * 17]
    llm = of_vllm(host, folder, skip_tokenizer_init=True, additional_config=ALL)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    assert generated(llm.generate(prompts(ids), params)) == runtime(folder, ids)
    assert {row["name"].rpartition(".")[2] for row in explain() if row["taken"]} == {
        "qkv_proj",
        "o_proj",
        "experts",
    }


def test_what_no_kernel_serves_is_left_to_vllm_by_name(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that excludes every kernel of linear: vLLM runs all layers in floats, and the report says why."""
    ids = texts(3)
    expected = runtime("docs-llama", ids)
    policy = tmp_path / "policy.toml"
    policy.write_text(f'cache = "{tmp_path}"\nexclude = ["linear_*"]\n')
    monkeypatch.setenv("GRISTMILL_POLICY", str(policy))
    llm = of_vllm(host, "docs-llama", additional_config={"gristmill": {"quant": "int4_g128"}})
    assert generated(llm.generate(prompts(ids), PARAMS)) == expected
    rows = explain()
    assert len(rows) == 24 and not any(row["taken"] for row in rows)
    assert all(row["reason"].startswith("no verified kernel: ") for row in rows)
    assert all("linear_cpu" in row["reason"] for row in rows), rows[0]["reason"]


@pytest.mark.slow
def test_the_same_ids_when_compiled(host: Host) -> None:
    options = {"additional_config": {"gristmill": {"quant": "int4_g128"}}}
    llm, ids = of_vllm(host, "docs-llama", enforce_eager=False, **options), texts(3)
    assert generated(llm.generate(prompts(ids), PARAMS)) == runtime("docs-llama", ids, quant="int4_g128")


def test_a_format_that_is_refused_is_one_message(host: Host, tmp_path: Path) -> None:
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True}
    folder = copied(tmp_path, quantization_config=scheme)
    with pytest.raises(Exception, match="is_marlin_format: weights in Marlin's order are not read"):
        of_vllm(host, folder)
    with pytest.raises(Exception, match="is_marlin_format: weights in Marlin's order are not read"):
        host(folder, quantization="gristmill")  # the worker


class FakeLayer(torch.nn.Module):
    """What `GristmillLinearMethod` reads of a layer of vLLM: of one rank of `tp_size`."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)


def loaded(
    layer: FakeLayer, names: list[str], sizes: list[int], k: int, whole_k: int, parts: dict[Any, QuantTensor]
) -> Any:
    """The product of a layer of one rank, loaded as vLLM does it."""

    def read(source: Tensors, module: str, shape: tuple[int, ...]) -> tuple[QuantTensor, None]:
        weight = parts[names.index(module.rpartition(".")[2])] if len(names) > 1 else parts[0]
        assert shape == weight.shape, (shape, weight.shape)
        return weight, None

    method = GristmillLinearMethod("m.layer", names, read, "int4_g128", lambda _: None)
    method.create_weights(layer, k, sizes, whole_k, sum(sizes), torch.float32)
    for shard in {3: ("q", "k", "v"), 2: (0, 1), 1: (None,)}[len(names)]:
        layer.codes.weight_loader(layer.codes, torch.zeros(1), *(() if shard is None else (shard,)))
    method.process_weights_after_loading(layer)
    assert not list(layer.parameters())
    return lambda x: method.apply(layer, x)


def weights(*rows: int, k: int = 512) -> list[QuantTensor]:
    generator = torch.Generator().manual_seed(3)
    return [quantize(torch.randn(n, k, generator=generator), "int4_g128") for n in rows]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_hold_their_heads_of_q_k_and_v(world: int, environment: dict[str, str]) -> None:
    """4 heads of q and 2 of k and v: with 4 ranks two of them share a head."""
    parts, x = weights(4 * 32, 2 * 32, 2 * 32), torch.randn(3, 512)
    whole = [x @ part.dequantize().T for part in parts]
    kv, replicas = max(1, 2 // world), max(1, world // 2)
    for rank in range(world):
        layer = FakeLayer(
            tp_rank=rank,
            tp_size=world,
            total_num_heads=4,
            total_num_kv_heads=2,
            head_size=32,
            num_kv_head_replicas=replicas,
        )
        sizes = [4 // world * 32, kv * 32, kv * 32]
        out = loaded(layer, ["q_proj", "k_proj", "v_proj"], sizes, 512, 512, dict(enumerate(parts)))(x)
        expected = [
            value[:, index * size : (index + 1) * size]
            for value, size, index in zip(
                whole, sizes, (rank, rank // replicas, rank // replicas), strict=True
            )
        ]
        torch.testing.assert_close(out, torch.cat(expected, 1), atol=1e-4, rtol=1e-4)


def test_ranks_hold_their_rows_of_gate_and_up(environment: dict[str, str]) -> None:
    parts, x = weights(96, 96), torch.randn(3, 512)
    gate, up = (x @ part.dequantize().T for part in parts)
    for rank in range(2):
        layer = FakeLayer(tp_rank=rank, tp_size=2, output_sizes=[96, 96])
        out = loaded(layer, ["gate_proj", "up_proj"], [48, 48], 512, 512, dict(enumerate(parts)))(x)
        mine = slice(48 * rank, 48 * rank + 48)
        torch.testing.assert_close(out, torch.cat([gate[:, mine], up[:, mine]], 1), atol=1e-4, rtol=1e-4)


def test_ranks_hold_their_columns(environment: dict[str, str]) -> None:
    parts, x = weights(64), torch.randn(3, 512)
    halves = []
    for rank in range(2):
        layer = FakeLayer(tp_rank=rank, tp_size=2, output_size=64)
        product = loaded(layer, ["o_proj"], [64], 256, 512, dict(enumerate(parts)))
        halves.append(product(x[:, 256 * rank : 256 * rank + 256]))
    torch.testing.assert_close(halves[0] + halves[1], x @ parts[0].dequantize().T, atol=1e-4, rtol=1e-4)


def test_kernels_are_verified_while_a_layer_is_loaded(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it no size of vLLM's steps is resolved, and a bias is prepared for where the layer has one."""
    config, prepared = VllmConfig(), []
    config.scheduler_config.max_num_batched_tokens = 96
    monkeypatch.setattr(Product, "prepare", lambda product, sizes, *, bias: prepared.append((sizes, bias)))
    for bias in (None, torch.zeros(64)):
        layer = FakeLayer(tp_rank=0, tp_size=1, output_size=64)
        layer.bias = bias
        with set_current_vllm_config(config):
            loaded(layer, ["o_proj"], [64], 512, 512, dict(enumerate(weights(64))))
    sizes = [1, 2, 4, 8, 16, 32, 64, 96]
    assert prepared == [(sizes, False), (sizes, True)]


def test_a_tensor_that_is_missing_is_named() -> None:
    method = GristmillLinearMethod("m.o_proj", ["o_proj"], lambda *_: None, None, lambda _: None)
    layer = FakeLayer(tp_rank=0, tp_size=1, output_size=64)
    method.create_weights(layer, 512, [64], 512, 64, torch.float32)
    with pytest.raises(ValueError, match="m.o_proj: the checkpoint has no tensors of m.o_proj"):
        method.process_weights_after_loading(layer)


def test_a_checkpoint_is_claimed_only_on_request() -> None:
    from gristmill.integrations.vllm import GristmillConfig

    claim = GristmillConfig.override_quantization_method
    assert claim({"quant_method": "gptq"}, "gristmill") == "gristmill"
    assert claim({"quant_method": "gptq"}, None) is None and claim({"quant_method": "gptq"}, "gptq") is None


ROWS = 512
"""Of q, k and v in docs-llama."""


def float_kernel(monkeypatch: pytest.MonkeyPatch, called: Callable[[torch.Tensor], None]) -> None:
    """vLLM's kernel of 4-bit weights in torch: its compiled one is not on every CPU. Calls the function with the weight."""
    from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel as Kernel

    def process(self: Any, layer: Any) -> None:
        assert layer.bias is None  # vLLM's kernel reads it
        packed, scale = layer.weight_packed.data, layer.weight_scale.data
        codes = (packed.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        layer.dense = ((codes.flatten(1) - 8) * scale.repeat_interleave(128, 1)).float()

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        called(layer.dense)
        return torch.nn.functional.linear(x, layer.dense, bias)

    monkeypatch.setattr(Kernel, "process_weights_after_loading", process)
    monkeypatch.setattr(Kernel, "apply_weights", apply)


def test_layers_run_where_times_say_so(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: vLLM's kernel is slow for q, k and v, and ours for all others, by a clock that they move. Nothing is measured at the second
    start."""
    from gristmill.autotune import clock
    from gristmill.integrations import measured
    from gristmill.integrations.product import Product

    folder = written(MODELS / "docs-llama", tmp_path / "quantized", "int4_g128", "compressed-tensors")
    policy = tmp_path / "policy.toml"
    policy.write_text(f'cache = "{tmp_path / "cache"}"\n')
    monkeypatch.setenv("GRISTMILL_POLICY", str(policy))
    monkeypatch.setattr(measured, "_KNOWN", {})
    monkeypatch.setattr(measured, "ROUNDS", 1)
    monkeypatch.setattr(measured, "list_count", lambda size, device: 2)
    without_bias, seconds = Product.without_bias, [0.0]

    def take(slow: bool) -> None:
        seconds[0] += 0.03 if slow else 0.001

    def ours(self: Product, x: torch.Tensor) -> torch.Tensor:
        take(slow=self.n != ROWS)
        return without_bias(self, x)

    float_kernel(monkeypatch, lambda weight: take(slow=len(weight) == ROWS))
    monkeypatch.setattr(Product, "without_bias", ours)
    monkeypatch.setattr(clock, "now", lambda: seconds[0])
    llm, ids = of_vllm(host, folder), texts(3)
    rows = explain()
    taken = [row for row in rows if row["taken"]]
    assert {row["name"].rpartition(".")[2] for row in taken} == {"qkv_proj"} and len(rows) == 4 * len(taken)
    figures = "us of gristmill and of the host by tokens: 1: "
    assert all(row["measured"].startswith(figures) for row in taken)
    left = [row["reason"] for row in rows if not row["taken"]]
    assert all(reason.startswith(f"it is not faster on gristmill: {figures}") for reason in left), left
    config = llm.llm_engine.vllm_config
    assert config.additional_config["gristmill_left_to_vllm"] == [
        "int4_g128 1536x256",
        "int4_g128 256x256",
        "int4_g128 256x768",
    ]

    mixed = generated(llm.generate(prompts(ids), PARAMS))
    assert mixed == generated(of_vllm(host, folder, additional_config=ALL).generate(prompts(ids), PARAMS))
    assert all(row["taken"] and not row["measured"] for row in explain())

    def never(*arguments: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measured, "_KNOWN", {})
    monkeypatch.setattr(measured, "_measure", never)
    of_vllm(host, folder)
    assert explain() == rows


def test_what_vllm_cannot_multiply_is_taken(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(MODELS / "docs-llama", tmp_path / "quantized", "int4_g128", "compressed-tensors")

    def planted(weight: torch.Tensor) -> None:
        raise NotImplementedError("no such kernel")

    float_kernel(monkeypatch, planted)
    of_vllm(host, folder)
    reason = "vLLM's own method does not serve it: NotImplementedError: no such kernel"
    assert {(row["taken"], row["measured"]) for row in explain()} == {(True, reason)}


def test_a_failure_while_vllm_is_timed_is_not_a_refusal(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(MODELS / "docs-llama", tmp_path / "quantized", "int4_g128", "compressed-tensors")

    def planted(weight: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    float_kernel(monkeypatch, planted)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as raised:
        of_vllm(host, folder)
    assert '"take": "all"' in raised.value.__notes__[0]


def test_a_choice_that_does_not_exist_is_one_message() -> None:
    with pytest.raises(gristmill.UsageError, match="must be measured or all, got 'some'"):
        Options.parse({"gristmill": {"take": "some"}})


@pytest.mark.parametrize(
    ("form", "scheme"),
    [("gptq", "int4_g128"), ("compressed-tensors", "int4_g128"), ("modelopt", "nvfp4"), ("fp8", "fp8_block")],
)
def test_a_layer_is_left_to_the_method_that_vllm_chooses(tmp_path: Path, form: str, scheme: str) -> None:
    folder = written(MODELS / "docs-llama", tmp_path / "quantized", scheme, form)
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert name_in_vllm(stored) == ModelConfig(str(folder), dtype="bfloat16").quantization
