"""The linear layers by class: stored formats through SGLang's own loading by parameter and shard, tensor-parallel shards, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.layers import linear
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from gristmill.autotune.resolve import Resolver
from gristmill.integrations.sglang.quantization import AT_LOAD, REPORT, GristmillConfig
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant import FormatError, Tensors, open_format
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.models import model_table
from tests.integrations.sglang.conftest import MODELS

HIDDEN, HEADS, KV_HEADS, D, FFN = 256, 4, 2, 64, 768


@pytest.fixture(autouse=True)
def _one_process(policy_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    policy_file()
    monkeypatch.setattr(Resolver, "resolve", Resolver.select)
    reset_context()
    arguments = ServerArgs(model_path=str(MODELS / "docs-llama"), device="cpu")
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    REPORT.layers.clear()
    yield
    reset_context()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """A function that makes layers those of one rank."""

    def of(rank: int, size: int) -> None:
        group = SimpleNamespace(rank_in_group=rank, world_size=size)
        monkeypatch.setattr(linear, "_resolve_linear_group", lambda name: group)

    return of


def layers(config: Any) -> dict[str, Any]:
    """The linear layers of a block of docs-llama, as SGLang's Llama makes them."""
    named: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "quant_config": config}
    at = "model.layers.1"
    return {
        "qkv": QKVParallelLinear(HIDDEN, D, HEADS, KV_HEADS, prefix=f"{at}.self_attn.qkv_proj", **named),
        "gate_up": MergedColumnParallelLinear(HIDDEN, [FFN, FFN], prefix=f"{at}.mlp.gate_up_proj", **named),
        "down": RowParallelLinear(FFN, HIDDEN, prefix=f"{at}.mlp.down_proj", reduce_results=False, **named),
    }


MODULES = {
    "qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
    "gate_up": {0: "mlp.gate_proj", 1: "mlp.up_proj"},
    "down": {None: "mlp.down_proj"},
}


def load(made: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Load as SGLang's models do: parameter by parameter, with the shard's id."""
    for name, layer in made.items():
        parameters = dict(layer.named_parameters())
        for shard, module in MODULES[name].items():
            prefix = f"model.layers.1.{module}."
            for key, tensor in tensors.items():
                if key.startswith(prefix):
                    parameter: Any = parameters[key.removeprefix(prefix)]
                    parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))
        layer.quant_method.process_weights_after_loading(layer)


def of_folder(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def dense(stored: dict[str, Any], tensors: dict[str, Tensor], module: str, n: int, k: int) -> Tensor:
    """The weight of a module in float32."""
    name = f"model.layers.1.{module}"
    found = open_format(stored).read(Tensors(tensors), name, (n, k))
    assert found is not None
    return found.weight.dequantize(torch.float32)


@pytest.mark.parametrize("rank,size", [(0, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize(
    ("form", "scheme"), [("gristmill", "int4_g128"), ("gptq", "int4_g128"), ("compressed-tensors", "int8_ch")]
)
def test_stored_formats_and_ranks(
    form: str, scheme: str, rank: int, size: int, world: Callable[[int, int], None], tmp_path: Path
) -> None:
    folder, checkpoint = tmp_path / "model", open_checkpoint(MODELS / "docs-llama")
    table = model_table(parse_config(*checkpoint.config()))
    write_quantized(MODELS / "docs-llama", folder, table, QuantScheme.parse(scheme), form=form)
    stored = open_checkpoint(folder).config()[0]["quantization_config"]
    tensors = of_folder(folder)
    world(rank, size)
    config = GristmillConfig.from_config({**stored, "packed_modules_mapping": {}, "hf_config": None})
    made = layers(config)
    load(made, tensors)

    def rows(module: str, n: int, count: int, start: int) -> Tensor:
        return dense(stored, tensors, module, n, HIDDEN)[start : start + count]

    q, kv = HEADS // size * D, max(1, KV_HEADS // size) * D
    at = rank * KV_HEADS // size * D if size <= KV_HEADS else rank // (size // KV_HEADS) * D
    ffn = FFN // size
    expected = {
        "qkv": torch.cat(
            [
                rows("self_attn.q_proj", HEADS * D, q, rank * q),
                rows("self_attn.k_proj", KV_HEADS * D, kv, at),
                rows("self_attn.v_proj", KV_HEADS * D, kv, at),
            ]
        ),
        "gate_up": torch.cat(
            [rows("mlp.gate_proj", FFN, ffn, rank * ffn), rows("mlp.up_proj", FFN, ffn, rank * ffn)]
        ),
        "down": dense(stored, tensors, "mlp.down_proj", HIDDEN, FFN)[:, rank * ffn : (rank + 1) * ffn],
    }
    for name, layer in made.items():
        x = torch.randn(3, expected[name].shape[1])
        for bias in (None, torch.randn(expected[name].shape[0])):
            out = layer.quant_method.apply(layer, x, bias)
            right = torch.nn.functional.linear(x, expected[name], bias)
            torch.testing.assert_close(out, right, atol=2e-3, rtol=1e-3)
    assert {row["scheme"] for row in REPORT.explain()} == {scheme} and len(REPORT.layers) == 3


def test_an_incomplete_checkpoint_names_the_module(world: Callable[[int, int], None]) -> None:
    world(0, 1)
    made = layers(GristmillConfig({AT_LOAD: "int8_ch"}))
    with pytest.raises(ValueError, match="qkv_proj: the checkpoint has no tensors of .*q_proj"):
        made["qkv"].quant_method.process_weights_after_loading(made["qkv"])


def test_what_no_kernel_serves(world: Callable[[int, int], None], policy_file: Callable[..., Any]) -> None:
    """A checkpoint in floats is left to SGLang; of a quantized one SGLang's loader has nothing to fall back to."""
    world(0, 1)
    policy_file('exclude = ["linear_*"]\n')
    made = layers(GristmillConfig({AT_LOAD: "int8_ch"}))
    assert all(type(layer.quant_method) is UnquantizedLinearMethod for layer in made.values())
    assert all(row["reason"].startswith("no verified kernel: ") for row in REPORT.explain())
    stored = {"quant_method": "gristmill", "scheme": "int8_ch"}
    with pytest.raises(UsageError, match=r"layers\.1\.self_attn\.qkv_proj: no verified kernel"):
        layers(GristmillConfig(stored))


def test_refusals_by_name(world: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="needs a scheme: --json-model-override-args"):
        GristmillConfig({})
    with pytest.raises(FormatError, match="is_marlin_format: weights in Marlin's order are not read"):
        GristmillConfig({"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True})
    config = GristmillConfig({AT_LOAD: "int8_ch"})
    with pytest.raises(
        UsageError, match=r"does not serve experts in SGLang \(model\.layers\.0\.mlp\.experts"
    ):
        config.get_quant_method(FusedMoE.__new__(FusedMoE), "model.layers.0.mlp.experts")
    world(0, 1)
    made = layers(config)
    with pytest.raises(UsageError, match="does not serve new weights: restart SGLang"):
        made["down"].quant_method.restore_weights_before_loading(made["down"])
    assert config.get_quant_method(torch.nn.Embedding(2, 2), "model.embed_tokens") is None
    router = config.get_quant_method(made["down"], "model.layers.0.mlp.gate")
    assert type(router) is UnquantizedLinearMethod
    monkeypatch.setattr(made["down"], "use_presharded_weights", True)
    with pytest.raises(UsageError, match="checkpoints that are sharded"):
        made["down"].quant_method.create_weights(made["down"], FFN, [HIDDEN], FFN, HIDDEN, torch.float32)


def test_lora_is_refused_by_name() -> None:
    reset_context()
    arguments = ServerArgs(
        model_path=str(MODELS / "docs-llama"),
        device="cpu",
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=["all"],
    )
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    config = GristmillConfig({AT_LOAD: "int8_ch"})
    with pytest.raises(UsageError, match="does not serve LoRA: leave out --enable-lora"):
        config.get_quant_method(linear.LinearBase(1, 1), "model.layers.0.mlp.down_proj")


def test_only_who_asks_gets_it() -> None:
    claim = GristmillConfig.override_quantization_method
    assert claim({"quant_method": "gptq"}, "gristmill") == "gristmill"
    assert claim({"quant_method": "gptq"}, None) is claim(None, "gristmill") is None
