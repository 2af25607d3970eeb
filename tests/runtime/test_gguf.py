"""Complete GGUF files: experts, frequency factors, the tokenizer inside; written by the gguf package,
compared with transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from gristmill.quant.checkpoints.gguf import GgufCheckpoint
from gristmill.quant.formats.gguf_header import GgufHeader
from gristmill.runtime.errors import CheckpointError, ConfigError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import gguf_architectures
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.cli import cli
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.gguf_files import finish, new_writer
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.proofs import proves
from tests.runtime.test_gguf_tokenizer import byte_level

gguf = pytest.importorskip("gguf")
COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def random_model(folder: Path, family: str, **changes: Any) -> Any:
    """Returns a random model of transformers, saved in `folder`."""
    import transformers

    name = {"llama": "Llama", "mixtral": "Mixtral", "qwen3moe": "Qwen3Moe"}[family]
    if family != "llama":
        changes |= {
            "num_local_experts" if family == "mixtral" else "num_experts": 4,
            "num_experts_per_tok": 2,
        }
    if family == "qwen3moe":
        changes |= {"moe_intermediate_size": 32, "norm_topk_prob": True}
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**COMMON, **changes})
    )
    for tensor in model.parameters():
        tensor.data.normal_(0, tensor.shape[-1] ** -0.5) if tensor.ndim > 1 else tensor.data.uniform_(
            0.5, 1.5
        )
    model.save_pretrained(folder)
    return model.eval()


def converted(
    folder: Path, path: Path, family: str, kind: str = "Q8_0", factors: Any = None, **keys: Any
) -> Path:
    """Writes a GGUF file of a directory with llama.cpp's order and names, and a directory of its values
    beside it."""
    config = json.loads((folder / "config.json").read_text())
    architecture = "qwen3moe" if family == "qwen3moe" else "llama"
    writer, table = new_writer(path, architecture, config)
    raw, heads = gguf.GGMLQuantizationType[kind], {}
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if family != "llama":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    if family == "qwen3moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for key, value in keys.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    if architecture == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    experts: dict[str, dict[int, np.ndarray]] = {}
    values: dict[str, torch.Tensor] = {}

    def put(name: str, data: np.ndarray) -> np.ndarray:
        if data.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(data))
            return data
        blocks = gguf.quants.quantize(np.ascontiguousarray(data), raw)
        writer.add_tensor(name, blocks, raw_dtype=raw)
        return gguf.quants.dequantize(blocks, raw)

    for key, tensor in load_file(folder / "model.safetensors").items():
        data, module = tensor.float().numpy(), key.rpartition(".")[0]
        expert, count = EXPERT.fullmatch(key), heads.get(module.rpartition(".")[2])
        if expert is not None:
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = data
        elif count:
            turned = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
            read = put(f"{table.get_name(module)}.weight", turned)
            values[key] = torch.tensor(
                read.reshape(count, -1, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
            )
        else:
            values[key] = torch.tensor(put(f"{table.get_name(module)}.weight", data))
    for module, parts in experts.items():
        read = put(f"{table.get_name(module)}.weight", np.stack([parts[i] for i in range(len(parts))]))
        values |= {
            f"{module.rpartition('.')[0]}.{i}.{module.rpartition('.')[2]}.weight": torch.tensor(v)
            for i, v in enumerate(read)
        }
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
    finish(writer)
    plain = path.with_suffix("")
    plain.mkdir()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    return path


def error(llm: LLM, folder: Path) -> float:
    """Returns the error of the logits against transformers on the directory of values."""
    ids = torch.randint(2, 160, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = oracle.logits(oracle.load(folder), ids)
    return float((window_logits(llm.engine, ids) - expected).abs().max() / expected.abs().max())


@proves("GGUF", "llama with experts", "MixtralForCausalLM")
@proves("GGUF", "qwen3moe with experts", "Qwen3MoeForCausalLM")
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3moe"])
def test_experts(family: str, kind: str, make: Callable[..., LLM], tmp_path: Path) -> None:
    random_model(tmp_path / "hf", family)
    path = converted(tmp_path / "hf", tmp_path / "m.gguf", family, kind)
    llm = make(path, num_blocks=32, activations="float")
    assert llm.config.moe is not None and llm.config.moe.num_experts == 4
    assert error(llm, tmp_path / "m") < 2e-4


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_file_of_floats_is_quantized_on_request(
    family: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    random_model(tmp_path / "hf", family)
    path = converted(tmp_path / "hf", tmp_path / "m.gguf", family, "BF16")
    plain, rounded = (make(path, num_blocks=32, quant=quant) for quant in (None, "int8_ch"))
    assert rounded.weight_bytes < 0.8 * plain.weight_bytes
    if family == "llama":  # of Mixtral's tokens some go to other experts
        assert error(rounded, tmp_path / "m") < 0.05


def test_factors_of_frequencies(make: Callable[..., LLM], tmp_path: Path) -> None:
    """The factors that converters make of Llama 3.1's scaling. Planted fault: without them, the logits
    differ."""
    scaling = {
        "rope_theta": 1e4,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = random_model(tmp_path / "hf", "llama", rope_parameters=scaling)
    plain = 1 / 1e4 ** (np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 7
    assert (
        error(
            make(
                converted(tmp_path / "hf", tmp_path / "m.gguf", "llama", factors=factors),
                num_blocks=32,
                activations="float",
            ),
            tmp_path / "m",
        )
        < 2e-4
    )
    bare = make(
        converted(tmp_path / "hf", tmp_path / "bare.gguf", "llama"), num_blocks=32, activations="float"
    )
    assert error(bare, tmp_path / "m") > 1e-2


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("mixtral", {"llama__expert_shared_count": 2}, "expert_shared_count = 2 is not supported"),
        ("qwen3moe", {"qwen3moe__expert_weights_scale": 2.5}, "expert_weights_scale = 2.5 is not supported"),
        (
            "llama",
            {"llama__rope__dimension_count": 8},
            "dimension_count must be 16, the width of a head, got 8",
        ),
        ("llama", {"factors": [1.0] * 7}, "rope_freqs.weight must have 8 numbers, .* got 7"),
        ("llama", {"factors": [1.0] * 7 + [float("inf")]}, "rope_freqs.weight must be positive"),
        (
            "llama",
            {"factors": [1.0] * 8, "llama__rope__scaling__type": "linear"},
            "rope_freqs.weight with rope.scaling.type 'linear'",
        ),
    ],
)
def test_what_is_refused(family: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    random_model(tmp_path / "hf", family)
    path = converted(tmp_path / "hf", tmp_path / "m.gguf", family, **more)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        GgufCheckpoint(path, gguf_architectures()).config()


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    """Found by mutation: names for a million layers took minutes."""
    random_model(tmp_path / "hf", "llama")
    path = converted(tmp_path / "hf", tmp_path / "m.gguf", "llama")
    data = path.read_bytes()
    at = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    path.write_bytes(data[:at] + (34305).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match="says it has 34305 layers, and has 21 tensors"):
        GgufCheckpoint(path, gguf_architectures()).config()


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_no_heads(family: str, tmp_path: Path) -> None:
    """Found by mutation: the width of a head was divided by a number of heads of 0."""
    random_model(tmp_path / "hf", family)
    path = converted(tmp_path / "hf", tmp_path / "m.gguf", family)
    data, key = path.read_bytes(), f"{family}.attention.head_count".encode()
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + (0).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises((CheckpointError, ConfigError), match="attention.head_count must be .*, got 0"):
        GgufCheckpoint(path, gguf_architectures()).config()


def test_a_lone_file_generates_text(make: Callable[..., LLM], tmp_path: Path, policy: Any) -> None:
    path = converted(MODELS / LLAMA, tmp_path / "m.gguf", "llama", "F32", **byte_level())
    answer = make(MODELS / LLAMA).generate("The index", SamplingParams(max_tokens=12))[0]
    generated = make(path).generate("The index", SamplingParams(max_tokens=12))[0]
    assert (generated.prompt_ids, generated.token_ids, generated.text) == (
        answer.prompt_ids,
        answer.token_ids,
        answer.text,
    )
    file = tmp_path / "policy.toml"
    file.write_text(f'cache = "{policy.cache}"\n')
    arguments = [
        "generate",
        "--model",
        str(path),
        "--prompt",
        "The index",
        "--max-tokens",
        "12",
        "--dtype",
        "fp32",
        "--policy",
        str(file),
    ]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and answer.text in result.output


def test_faults_are_raised_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types of tensors and the tokenizer; the planted weight would fail first."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(GgufCheckpoint, "read", read)
    damaged = byte_level() | {"tokenizer__ggml__tokens": ["a", "b"]}
    path = converted(MODELS / LLAMA, tmp_path / "m.gguf", "llama", **damaged)
    arguments = ["generate", "--model", str(path), "--prompt", "The index"]
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, ConfigError) and "token_type must have 2 entries" in str(
        result.exception
    )
    data = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == (8).to_bytes(4, "little")
    path.write_bytes(
        data[:at] + (20).to_bytes(4, "little") + data[at + 4 :]
    )  # Q8_0 -> IQ4_NL, which is smaller
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_up\.weight has ggml type IQ4_NL, which is not read"
    ):
        GgufCheckpoint(path, gguf_architectures())


def test_an_open_checkpoint_is_read_once(
    make: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    begin = GgufHeader.__init__

    def init(self: GgufHeader, path: Path) -> None:
        opened.append(path)
        begin(self, path)

    monkeypatch.setattr(GgufHeader, "__init__", init)
    path = converted(MODELS / LLAMA, tmp_path / "m.gguf", "llama", "F32", **byte_level())
    llm = make(path)
    assert llm.generate("The index", SamplingParams(max_tokens=1))[0].text and opened == [path]
