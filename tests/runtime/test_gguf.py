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
from gristmill.quant.checkpoints.gguf_tokenizer import PRE, SPACE, gguf_tokenizer
from gristmill.quant.formats.gguf_header import GgufHeader
from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import gguf_architectures
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.tools.cli import cli
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.gguf_files import finish, new_writer
from tests.runtime.oracle import LLAMA, MODELS
from tests.runtime.proofs import proves
from tests.runtime.test_tekken import PATTERN

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


def byte_level() -> dict[str, Any]:
    """The example model's tokenizer as key-value pairs; ggml calls its pre-tokenizer smollm."""
    data = json.loads((MODELS / LLAMA / "tokenizer.json").read_text())
    vocabulary = sorted(data["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["id"] for token in data["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "smollm",
        "tokenizer__ggml__tokens": [t for t, _ in vocabulary],
        "tokenizer__ggml__token_type": [3 if i in special else 1 for _, i in vocabulary],
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__eos_token_id": 1,
        "tokenizer__ggml__bos_token_id": 0,
    }


def fields(**changes: Any) -> dict[str, Any]:
    return {
        key.replace("__", "."): value
        for key, value in {**byte_level(), **changes}.items()
        if value is not None
    }


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


TEXTS = (
    "The index of 1234 tables",
    "  two  spaces\n\n\ttab",
    "naïve café ☕ 中文",
    "it's we'll <|eos|> end",
    "",
)


def test_byte_level_ids_are_those_of_tokenizer_json() -> None:
    actual, reference = gguf_tokenizer(fields(), "m.gguf"), Tokenizer(MODELS / LLAMA)
    for text in TEXTS:
        assert actual.encode(text).ids == reference.encode(text)
        assert actual.decode(reference.encode(text), skip_special_tokens=True) == reference.decode(
            reference.encode(text)
        )
    merges = byte_level()["tokenizer__ggml__merges"][::-1]
    # Planted fault: the last merges first.
    other = gguf_tokenizer(fields(tokenizer__ggml__merges=merges), "m.gguf")
    assert any(other.encode(text).ids != reference.encode(text) for text in TEXTS)
    bos = gguf_tokenizer(fields(tokenizer__ggml__add_bos_token=True), "m.gguf")
    assert bos.encode("The").ids == [0, *reference.encode("The")]


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "ĠWE", "'", "LL", "Ġ:=", "ĊĠĠ", "Ġx"]),
        ("smollm", ["It", "'s", "Ġ", *"12345", "ĠWE", "'", "LL", "Ġ:=", "ĊĠĠ", "Ġx"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("qwen2", ["It", "'s", "Ġ", *"12345", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("glm4", ["It", "'s", "Ġ", "123", "45", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("chatglm-bpe", ["It", "'s", "Ġ", "123", "45", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("tekken", ["It", "'s", "Ġ", *"12345", "ĠWE", "'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("gpt-4o", ["It's", "Ġ", "123", "45", "ĠWE'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("minimax-m2", ["It's", "Ġ", "123", "45", "ĠWE'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
        ("llama4", ["It's", "Ġ", "123", "45", "ĠWE'LL", "Ġ:=Ċ", "ĠĠ", "Ġx"]),
    ],
)
def test_how_text_is_cut(pre: str, parts: list[str]) -> None:
    """Compares with results worked out by hand from the models' regular expressions."""
    cut = gguf_tokenizer(fields(tokenizer__ggml__pre=pre), "m.gguf").pre_tokenizer.pre_tokenize_str(
        "It's 12345 WE'LL :=\n   x"
    )
    assert [part for part, _ in cut] == parts


def test_how_words_of_two_cases_are_cut() -> None:
    """Mistral's expression, as its files have it."""
    assert PRE["tekken"] == PATTERN
    cut = gguf_tokenizer(fields(tokenizer__ggml__pre="tekken"), "m.gguf").pre_tokenizer
    given = "camelCase HTTPServer/path ÉTÉ中文x\r\n// Ǆungla"
    parts = ["camel", "Case", " HTTPServer", "/path", " ÉTÉ中文x", "\r\n", "//", " Ǆungla"]
    assert [given[begin:end] for _, (begin, end) in cut.pre_tokenize_str(given)] == parts


def pieces() -> tuple[list[str], list[float], list[int]]:
    """Returns a vocabulary as SentencePiece writes it: control tokens, bytes, characters and merges, with
    scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    kinds = [2, 3, 3, *([6] * 256)]
    words = [
        SPACE,
        *"abcdehlort",
        "he",
        "ll",
        "lo",
        "hel",
        "llo",
        "hello",
        SPACE + "h",
        SPACE + "t",
        SPACE + "the",
        "th",
        "the",
        "or",
        "ld",
    ]
    scores = (
        [0.0] * len(tokens) + [-100.0] * 11 + [-float(3 * i % 13) - i / 50 for i in range(len(words) - 11)]
    )
    return tokens + words, scores, kinds + [1] * len(words)


def by_definition(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Applies SentencePiece's BPE by its definition: merge the neighbours with the highest score, the
    leftmost first."""
    rank = {token: i for i, token in enumerate(tokens)}
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        joins = [
            (-scores[rank[a + b]], at)
            for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in rank
        ]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [rank[part]] if part in rank else [rank[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_sentence_piece_ids_are_those_of_the_definition() -> None:
    tokens, scores, kinds = pieces()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = gguf_tokenizer(metadata, "m.gguf")
    generator = np.random.default_rng(0)
    for text in [
        "hello the world",
        "the hello",
        "é the",
        *("".join(generator.choice(list("abcdehlort ☕"), 24)) for _ in range(60)),
    ]:
        assert tokenizer.encode(text).ids == [1, *by_definition(text, tokens, scores)], text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text
    # Planted fault: the lowest score first.
    turned = gguf_tokenizer(metadata | {"tokenizer.ggml.scores": [-s for s in scores]}, "m.gguf")
    assert turned.encode("hello the world").ids != tokenizer.encode("hello the world").ids
    bare = gguf_tokenizer(
        metadata | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, "m.gguf"
    )
    assert (
        tokens[bare.encode("the hello").ids[0]] == "the"
        and bare.decode(bare.encode("the hello").ids) == "the hello"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer__ggml__model": None},
            "m.gguf holds no tokenizer, and there is no tokenizer.json beside it",
        ),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model 'bert' is not read; known: gpt2, llama"),
        ({"tokenizer__ggml__pre": "deepseek-v3"}, "pre 'deepseek-v3' is not read; known: default, gpt-2"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokens must be a list of strings"),
        ({"tokenizer__ggml__token_type": [1]}, "token_type must have 4096 entries"),
        ({"tokenizer__ggml__merges": ["a"]}, "merges must be pairs with a space between"),
        ({"tokenizer__ggml__merges": ["qqq zzz"]}, "its tokenizer contradicts itself"),
        (
            {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 5000},
            "bos_token_id must be an id below 4096",
        ),
        ({"tokenizer__ggml__model": "llama"}, "scores must have 4096 entries"),
    ],
)
def test_tokenizers_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gguf_tokenizer(fields(**changes), "m.gguf")


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
