"""Model directories that are damaged, incomplete or unsupported: one clear error each."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.files import read_json
from gristmill.quant.checkpoints.parts import Joined
from gristmill.quant.checkpoints.safetensors import INDEX, SINGLE, SafetensorsCheckpoint, read_header
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.errors import CheckpointError, ConfigError, UsageError
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.llm import LLM
from gristmill.runtime.loader.config import load_config, parse_config
from gristmill.runtime.models import build_model, model_table
from gristmill.runtime.sampling_params import SamplingParams, recommended_sampling
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / LLAMA, tmp_path / LLAMA))


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODELS / DEEPSEEK, tmp_path / DEEPSEEK))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    edit(tensors)
    save_file(tensors, folder / SINGLE)


def test_missing_shard(deepseek: Path, make: Callable[..., LLM]) -> None:
    (deepseek / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing shard .*model-00002-of-00002\.safetensors"):
        make(deepseek)


def test_index_that_names_a_tensor_its_shard_lacks(deepseek: Path) -> None:
    index = json.loads((deepseek / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (deepseek / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.extra\.weight"):
        list(SafetensorsCheckpoint(deepseek))


@pytest.mark.parametrize("name", ["../x.safetensors", "x" * 250 + ".safetensors", "x\0.safetensors"])
def test_index_may_not_leave_the_folder(name: str, deepseek: Path) -> None:
    index = json.loads((deepseek / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (deepseek / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a safetensors file of this folder"):
        list(SafetensorsCheckpoint(deepseek))


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_truncated(llama: Path, make: Callable[..., LLM], keep: int) -> None:
    data = (llama / SINGLE).read_bytes()
    (llama / SINGLE).write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt"):
        make(llama)


def test_longer_than_its_header_says(llama: Path) -> None:
    with (llama / SINGLE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        list(SafetensorsCheckpoint(llama))


@pytest.mark.parametrize("dtype", ["U16", "U32", "U64", "C64", "F4", "F8_E5M2FNUZ"])
def test_dtypes_that_are_not_read(dtype: str, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, 64]}}).encode()
    file = tmp_path / SINGLE
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(CheckpointError, match=rf"safetensors: tensor a has dtype {dtype}, which is not read"):
        read_header(file)


def test_mutated_headers_never_get_through_unseen(llama: Path, tmp_path: Path) -> None:
    """Random bytes of the header are changed: the result is an error that names the file, or a header that
    still fits the file."""
    data = (llama / SINGLE).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    draw = random.Random(0)
    file = tmp_path / "mutated.safetensors"
    refused = 0
    for _ in range(150):
        changed = bytearray(data[: 8 + length])
        for _ in range(draw.randint(1, 3)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        with file.open("wb") as out:
            out.write(changed)
            out.truncate(len(data))
        try:
            entries = read_header(file)
        except CheckpointError as error:
            refused += 1
            assert str(file) in str(error)
        else:
            assert (
                sum(e.dtype.itemsize * torch.Size(e.shape).numel() for e in entries.values())
                == len(data) - 8 - length
            )
    assert refused > 60


def test_wrong_shape_and_dtype(llama: Path, make: Callable[..., LLM]) -> None:
    change(llama, lambda t: t.update({"model.norm.weight": torch.ones(255)}))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight must have shape \[256\], got \[255\]"):
        make(llama)
    change(llama, lambda t: t.update({"model.norm.weight": torch.ones(256, dtype=torch.int32)}))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight must be float64, float32, float16 or bfloat16"
    ):
        make(llama)


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.norm.weight"])
def test_unwritten_parameter(llama: Path, make: Callable[..., LLM], name: str) -> None:
    change(llama, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"left unwritten.*{name}"):
        make(llama)


def test_tensor_that_nobody_reads(llama: Path, make: Callable[..., LLM]) -> None:
    change(llama, lambda t: t.update({"model.layers.6.mlp.up_proj.weight": torch.ones(3)}))
    with pytest.raises(
        CheckpointError, match=r"no parameter of the model takes: model\.layers\.6\.mlp\.up_proj\.weight"
    ):
        make(llama)


def test_what_is_left_aside_by_rule(deepseek: Path, llama: Path, make: Callable[..., LLM]) -> None:
    """Prediction layers past the last one, and the head of a tied model."""
    shard = deepseek / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(2)
    save_file(tensors, shard)
    make(deepseek)
    change(llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    make(llama)
    change(llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].double()}))
    make(llama)


def test_a_tied_head_of_other_values(llama: Path, make: Callable[..., LLM]) -> None:
    """transformers would accept it, whatever the configuration says, but this head is no copy that may be
    skipped."""
    change(llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    change(llama, lambda t: t["lm_head.weight"][299].mul_(2))
    with pytest.raises(
        CheckpointError, match=r"ties lm_head.weight to model.embed_tokens.weight, and they differ"
    ):
        make(llama)


def test_pickles_are_never_read(llama: Path) -> None:
    (llama / SINGLE).rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights are never read"):
        list(SafetensorsCheckpoint(llama))


def test_scheme_that_does_not_fit_names_the_tensor(llama: Path, make: Callable[..., LLM]) -> None:
    with pytest.raises(UsageError, match="unknown scheme 'int5'"):
        make(llama, quant="int5")
    config = json.loads((llama / "config.json").read_text())
    config["intermediate_size"] = 760
    (llama / "config.json").write_text(json.dumps(config))

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "gate_proj" in name or "up_proj" in name:
                tensors[name] = tensors[name][:760].clone()
            elif "down_proj" in name:
                tensors[name] = tensors[name][:, :760].clone()

    change(llama, cut)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj\.weight: .*multiple of 128"):
        make(llama, quant="int4_g128")


GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA_3 = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0] * 32,
    "long_factor": [2.0] * 32,
}


def edited(**changes: Any) -> dict[str, Any]:
    return {**json.loads((MODELS / LLAMA / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported; known: .*DeepseekV3ForCausalLM, .*LlamaForCausalLM, ",
        ),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"hidden_size": "256"}, "entry 'hidden_size' must be int, got '256'"),
        ({"vocab_size": None}, "entry 'vocab_size' is missing"),
        ({"num_hidden_layers": 0}, "must be at least 1, got 0"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' is not supported",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3 .*needs"),
        (
            {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
            "rope type 'proportional' is not supported; supported: default, ",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
            "'factor' must be int or float, got '2'",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": math.inf}},
            "'factor' must be a finite number",
        ),
        ({"rope_parameters": {"full_attention": 3}}, "rotary embedding must be an object, got 3"),
        (
            {"rope_parameters": LONGROPE | {"short_factor": ["a"] * 32}},
            "'short_factor' must be a list of numbers, got ",
        ),
        (
            {"rope_parameters": LONGROPE | {"short_factor": 5}},
            "'short_factor' must be a list of numbers, got 5",
        ),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0] * 3}}, "must be 32 positive numbers, .* got "),
        ({"rope_parameters": LONGROPE | {"long_factor": [0.0] * 32}}, "must be 32 positive numbers"),
        ({"partial_rotary_factor": 0.5}, "LlamaForCausalLM rotates whole heads of 64 elements, got 32 by"),
        ({"rotary_dim": 8}, "rotates whole heads of 64 elements, got 8 by rotary_dim"),
        ({"partial_rotary_factor": math.nan}, "'partial_rotary_factor' must be a finite number, got nan"),
        ({"rms_norm_eps": math.nan}, "'rms_norm_eps' must be a finite number, got nan"),
        ({"rms_norm_eps": -1e-6}, "epsilon of norms must be at least 0"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' must be at most 4096, got 1000000000"),
        ({"vocab_size": 10**12}, "'vocab_size' must be at most 2147483647"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9},
            "'num_experts' must be at most 16384",
        ),
        (
            {**GEMMA_3, "sliding_window_pattern": 10**9},
            "'sliding_window_pattern' must be at most 4096",
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": {"full_attention": LONGROPE}},
            "longrope is supported where all layers have the same frequencies",
        ),
        (
            {**GEMMA_3, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters must have an object for full_attention and one for sliding_attention, got rope_theta",
        ),
        ({**GEMMA_3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null for Gemma 3"),
        ({**GEMMA_3, "query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be positive, got 0.0"),
        (
            {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
            "'logits_scaling' must be positive, got 0.0",
        ),
        (
            {**GPT_OSS, "rope_parameters": None},
            "'rope_parameters' .* is missing",
        ),
        (
            {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be over 1",
        ),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an id"),
        ({"sliding_window": 512}, "has no sliding window, got sliding_window = 512 with 4096 positions"),
    ],
)
def test_config_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(edited(**changes))


def test_rope_of_both_generations_of_files() -> None:
    new = parse_config(edited(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}))
    old = edited(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    del old["rope_parameters"]
    assert parse_config(old).rope == new.rope
    assert new.rope.theta == 5e5


@pytest.mark.parametrize(
    "table",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {
            kind: {"rope_type": "default", "rope_theta": 5e5}
            for kind in ("full_attention", "sliding_attention")
        },
    ],
)
def test_rope_that_both_generations_of_entries_describe(table: dict[str, Any]) -> None:
    """A scaling that somebody adds under the name that it had in earlier files is refused, not ignored; one that says the same is none."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    with pytest.raises(
        ConfigError, match="rope_scaling and rope_parameters differ in factor, .*, rope_type: put"
    ):
        parse_config(edited(rope_parameters=table, rope_scaling=yarn))
    alone = parse_config(edited(rope_parameters=table))
    for same in (None, {}, {"type": "default"}, {"rope_theta": 5e5}):
        assert parse_config(edited(rope_parameters=table, rope_scaling=same)) == alone
    assert alone.rope.theta == 5e5


def test_a_window_that_cuts_nothing_off() -> None:
    assert (
        parse_config(edited(sliding_window=4096))
        == parse_config(edited(sliding_window=None))
        == parse_config(edited())
    )


def test_end_ids_come_from_generation_config_and_nothing_else() -> None:
    assert parse_config(edited(), {"eos_token_id": [1, 7]}).eos_ids == (1, 7)
    size = parse_config(edited()).vocab_size
    assert parse_config(edited(), {"eos_token_id": [-1, 1, size - 1, size]}).eos_ids == (1, size - 1)
    assert parse_config(edited(), {"eos_token_id": -1}).eos_ids == ()
    assert parse_config(edited()).eos_ids == (1,)
    with pytest.raises(
        ConfigError, match=r"^generation_config\.json beside .*eos_token_id must be .* got 'x'"
    ):
        parse_config(edited(), {"eos_token_id": "x"})
    assert parse_config(edited(), {"do_sample": True, "temperature": 0.6, "top_p": 0.9}) == parse_config(
        edited()
    )


def test_recommended_sampling_is_left_to_the_caller(llama: Path, make: Callable[..., LLM]) -> None:
    """generation_config.json may recommend sampling; without SamplingParams the answer stays greedy, as
    documented."""
    path = llama / "generation_config.json"
    expected = make(llama).generate("The index", SamplingParams(max_tokens=12))[0].token_ids
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "do_sample": True, "temperature": 1.5, "top_k": 500})
    )
    assert make(llama).generate("The index", SamplingParams(max_tokens=12))[0].token_ids == expected


def test_recommended_sampling_that_cannot_be() -> None:
    """It is an error of the model's, known before a request is refused for it. -1 is all, and null nothing."""
    assert recommended_sampling({"top_k": -1, "top_p": None, "temperature": 1}) == {
        "top_k": 0,
        "temperature": 1,
    }
    assert recommended_sampling({"do_sample": False, "temperature": "x"}) == {"temperature": 0.0}
    for wrong in (
        {"temperature": "0.6"},
        {"top_p": 1.5},
        {"top_k": 0.5},
        {"repetition_penalty": float("nan")},
    ):
        with pytest.raises(
            ConfigError, match=rf"generation_config\.json recommends .*: {next(iter(wrong))} must"
        ):
            recommended_sampling(wrong)


def test_not_a_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model directory"):
        load_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(edited(architectures=[["LlamaForCausalLM"]])))
    with pytest.raises(ConfigError, match="is not supported"):
        load_config(tmp_path)


def test_what_is_no_file_is_not_read(llama: Path) -> None:
    """A pipe, whose reading would never end, and what no configuration has."""
    (llama / "config.json").unlink()
    os.mkfifo(llama / "config.json")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_config(llama)
    (llama / "config.json").unlink()
    with (llama / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ConfigError, match=r"config\.json has more than .* bytes"):
        load_config(llama)


def test_files_beside_the_configuration_are_bounded_too(llama: Path, tmp_path: Path) -> None:
    file = llama / "generation_config.json"
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        load_config(llama)
    with file.open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(ConfigError, match=r"generation_config\.json has more than .* bytes"):
        load_config(llama)
    os.mkfifo(tmp_path / "params.json")
    with pytest.raises(ConfigError, match=r"cannot read .*params\.json: it is no regular file"):
        read_json(tmp_path / "params.json")


@pytest.mark.parametrize("changes", [{"max_position_embeddings": 10**9}, {"head_dim": 10**9}])
def test_tables_that_no_memory_holds(changes: dict[str, int], llama: Path, make: Callable[..., LLM]) -> None:
    """Refused before they are allocated."""
    (llama / "config.json").write_text(json.dumps(edited(**changes)))
    with pytest.raises(ConfigError, match="elements for .* positions would have .* GiB; a max_model_len"):
        make(llama)


def test_every_rank_reads_in_the_same_order(deepseek: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table determines the order, not the index or the headers of the shards."""
    config = load_config(deepseek)

    def order() -> list[str]:
        read: list[str] = []
        real = SafetensorsCheckpoint.read
        with monkeypatch.context() as patch:
            patch.setattr(
                SafetensorsCheckpoint,
                "read",
                lambda self, name, *a, **k: read.append(name) or real(self, name, *a, **k),
            )
            weights = Weights(
                SafetensorsCheckpoint(deepseek), model_table(config), torch.float32, torch.device("cpu")
            )
            build_model(
                config, weights, Plans(torch.device("cpu"), torch.float32, Policy(cache=str(deepseek)))
            )
        return read

    first = order()
    index = json.loads((deepseek / INDEX).read_text())
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    (deepseek / INDEX).write_text(json.dumps(index))
    shard = deepseek / "model-00001-of-00002.safetensors"
    save_file(dict(reversed(load_file(shard).items())), shard)
    assert order() == first and len(first) > 100


def test_parts_of_a_matrix_are_read_into_their_place() -> None:
    joined = Joined((2, 3), torch.device("cpu"))
    first = joined.place((2, 8)).fill_(1)
    assert joined.put(first) is not first and joined.codes is not None and joined.codes.shape == (5, 8)
    assert joined.codes.data_ptr() == first.data_ptr()
    joined.place((3, 8)).fill_(7)  # a reader that requested the memory and did not use it
    joined.put(torch.full((3, 8), 2, dtype=torch.uint8))
    assert joined.codes.tolist() == [[1] * 8] * 2 + [[2] * 8] * 3


def test_parts_of_several_widths_stay_apart() -> None:
    joined = Joined((2, 3), torch.device("cpu"))
    first = joined.put(torch.ones(2, 8, dtype=torch.uint8))
    assert joined.place((3, 4)).shape == (3, 4)
    second = joined.put(torch.full((3, 4), 5, dtype=torch.uint8))
    assert joined.codes is None and first.tolist() == [[1] * 8] * 2 and second.tolist() == [[5] * 4] * 3
