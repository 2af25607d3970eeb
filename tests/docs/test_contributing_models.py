"""CONTRIBUTING's recipes for a model family and a checkpoint format, one file each, extracted from the page
and added to the package."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.kernel_registry.policy import Policy
from gristmill.quant import formats
from gristmill.quant.formats import FormatError, Tensors, open_format
from gristmill.runtime import models
from gristmill.runtime.errors import ConfigError
from gristmill.runtime.llm import LLM
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.evaluate import window_logits

ROOT = Path(__file__).parents[2]
IDS = torch.randint(2, 160, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def recipe(folder: str) -> dict[str, str]:
    """Returns the files of a recipe, by the path in their first line."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return dict(re.findall(rf"```python\n# ({folder}/\S+)\n(.*?)```", page, re.S))


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[[ModuleType, str], None]]:
    """Adds files to a package as if the tree contained them, and removes them afterwards."""
    result: list[tuple[ModuleType, str]] = []

    def put(package: ModuleType, name: str, text: str) -> None:
        folder = tmp_path / package.__name__.rpartition(".")[2]
        folder.mkdir()
        (folder / name).write_text(text, encoding="utf-8")
        package.__path__.append(str(folder))
        result.append((package, str(folder)))
        importlib.invalidate_caches()
        package._declared.cache_clear()

    yield put
    for package, folder in result:
        package.__path__.remove(folder)
        package._declared.cache_clear()
        for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(folder)]:
            del sys.modules[name]
            delattr(package, name.rpartition(".")[2])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., LLM]:
    policy = Policy(cache=str(tmp_path / "cache"))
    return lambda folder, **more: LLM(
        folder, dtype="float32", policy=policy, num_blocks=32, warm="off", **more
    )


def tiny(folder: Path, name: str, **more: Any) -> Any:
    """Writes a random model with transformers. Returns its directory and the model."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for tensor in model.parameters():
        tensor.data.normal_(0, tensor.shape[-1] ** -0.5) if tensor.ndim > 1 else tensor.data.uniform_(
            0.5, 1.5
        )
    model.save_pretrained(folder)
    return model


def transformers_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0].float()
    return logits


def test_a_model_family_is_one_file(
    install: Callable[..., None], make: Callable[..., LLM], tmp_path: Path
) -> None:
    model = tiny(tmp_path / "m", "Helium", head_dim=16)
    with pytest.raises(ConfigError, match="architecture HeliumForCausalLM is not supported"):
        make(tmp_path / "m")
    ((path, text),) = recipe("runtime/models").items()
    install(models, Path(path).name, text)
    assert models.families()["HeliumForCausalLM"].name == "Helium"
    llm = make(tmp_path / "m")
    actual, reference = window_logits(llm.engine, IDS), transformers_logits(model)
    assert float((actual - reference).abs().max() / reference.abs().max()) < 2e-4
    (answer,) = llm.generate(IDS, SamplingParams(max_tokens=8))
    expected = model.generate(torch.tensor([IDS]), max_new_tokens=8, do_sample=False)[0, len(IDS) :]
    assert list(answer.token_ids) == expected.tolist()
    # Quantizes like every family.
    assert make(tmp_path / "m", quant="int8_ch").weight_bytes < llm.weight_bytes


def test_a_fault_in_the_family_is_caught(
    install: Callable[..., None], make: Callable[..., LLM], tmp_path: Path
) -> None:
    model = tiny(tmp_path / "m", "Helium", head_dim=16)
    ((path, text),) = recipe("runtime/models").items()
    install(models, Path(path).name, text.replace('"rope_interleaved": True', '"rope_interleaved": False'))
    actual, reference = window_logits(make(tmp_path / "m").engine, IDS), transformers_logits(model)
    assert float((actual - reference).abs().max() / reference.abs().max()) > 1e-2


def in_8_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Stores linear weights as bitsandbytes does. Returns the values that they represent."""
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name]
        largest = weight.abs().amax(1)
        tensors[name] = (weight * (127 / largest[:, None])).round().to(torch.int8)
        tensors[name.removesuffix("weight") + "SCB"] = largest
        tensors[name + "_format"] = torch.tensor(0, dtype=torch.uint8)
        values[name] = tensors[name].float() * (largest / 127)[:, None]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def test_a_checkpoint_format_is_one_file(
    install: Callable[..., None], make: Callable[..., LLM], tmp_path: Path
) -> None:
    model = tiny(tmp_path / "m", "Llama", tie_word_embeddings=False)
    values = in_8_bits(tmp_path / "m")
    with pytest.raises(ConfigError, match="quant_method 'bitsandbytes' is not supported; known: awq, "):
        make(tmp_path / "m")
    ((path, text),) = recipe("quant/formats").items()
    install(formats, Path(path).name, text)
    form = open_format({"quant_method": "bitsandbytes", "load_in_8bit": True})
    source = Tensors(load_file(tmp_path / "m" / "model.safetensors"))
    assert len(values) == 14
    for name, value in values.items():
        read_back = form.read(source, name.removesuffix(".weight"), tuple(value.shape))
        assert read_back is not None and str(read_back.weight.scheme) == "int8_ch"
        assert torch.equal(read_back.weight.dequantize(), value)
    assert form.read(source, "lm_head", (160, 64)) is None
    for name, value in values.items():
        model.get_parameter(name).data.copy_(value)
    actual, reference = window_logits(make(tmp_path / "m").engine, IDS), transformers_logits(model)
    assert float((actual - reference).abs().max() / reference.abs().max()) < 2e-4
    source.tensors["model.layers.0.mlp.up_proj.weight_format"] = torch.tensor(1, dtype=torch.uint8)
    with pytest.raises(FormatError, match="weight_format must be 0, rows in order, got 1"):
        form.read(source, "model.layers.0.mlp.up_proj", (96, 64))


def test_a_fault_in_the_format_is_caught(install: Callable[..., None]) -> None:
    ((path, text),) = recipe("quant/formats").items()
    install(formats, Path(path).name, text.replace("0x80", "0x00"))
    form = open_format({"quant_method": "bitsandbytes", "load_in_8bit": True})
    codes = torch.tensor([[1, -2, 127, 0]], dtype=torch.int8)
    read_back = form.read(Tensors({"m.weight": codes, "m.SCB": torch.ones(1)}), "m", (1, 4))
    assert read_back is not None and not torch.equal(read_back.weight.dequantize(), codes.float() / 127)
