"""Damaged files give a clear exception or load correctly within seconds; never a crash, a hang or a wrong
shape.

Each family is a small checkpoint. Mutations: bytes anywhere, the header's JSON (dtypes, shapes, offsets,
names), its length, truncation and growth, entries of the configuration. Past findings are in CORPUS.
GRISTMILL_FUZZ sets the mutations per family (300 by default, 20,000 in `make test-full`).
"""

from __future__ import annotations

import copy
import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gristmill.quant import quantize
from gristmill.quant.checkpoints.safetensors import INDEX, SafetensorsCheckpoint
from gristmill.quant.formats import FormatError, open_format, open_writer
from gristmill.runtime.errors import CheckpointError, UsageError
from tests.quant.oracle import weight
from tests.runtime import producers

SHAPE = (128, 256)
NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj")
JUNK = [
    None,
    0,
    -1,
    1,
    3,
    1 << 70,
    1.5,
    float("nan"),
    "",
    "x",
    "re:((",
    [],
    {},
    [[]],
    True,
    False,
    [1, 2],
    {"a": 1},
    "fp8",
    1 << 31,
]
LIMIT = 5.0
"""Seconds of the processor."""
pytestmark = pytest.mark.timeout(3000)


def written(form: str, scheme: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    writer = open_writer(form, scheme)
    tensors = {}
    for seed, name in enumerate(NAMES):
        q = writer.quantize(weight(*SHAPE, seed))
        tensors |= {f"{name}.{suffix}": t for suffix, t in writer.tensors(q).items()}
    return tensors, writer.config([])


def awq() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    n, k = SHAPE
    tensors: dict[str, torch.Tensor] = {}
    for name in NAMES:
        for part, rows in (("qweight", k), ("qzeros", k // 64)):
            tensors[f"{name}.{part}"] = torch.randint(
                -(1 << 31), 1 << 31, (rows, n // 8), generator=generator
            ).to(torch.int32)
        tensors[f"{name}.scales"] = torch.rand(k // 64, n, generator=generator).half()
    return tensors, {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "version": "gemm",
        "zero_point": True,
    }


def mxfp4() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors = {}
    for name in NAMES:
        q = quantize(weight(*SHAPE), "mxfp4")
        tensors |= {f"{name}_blocks": q.codes.unflatten(-1, (-1, 16)), f"{name}_scales": q.scales}
    return tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def ordered() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """GPTQ version 1 with act-order."""
    config, produce = producers.gptq(True)
    tensors = {}
    for seed, name in enumerate(NAMES):
        produced = produce(name, weight(*SHAPE, seed))
        assert produced is not None
        tensors |= {f"{name}.{suffix}": t for suffix, t in produced[0].items() if suffix != "bias"}
    return tensors, config


FAMILIES: dict[str, Callable[[], tuple[dict[str, torch.Tensor], dict[str, Any]]]] = {
    "compressed-tensors": lambda: written("compressed-tensors", "int4_g64_zp"),
    "compressed-tensors nvfp4": lambda: written("compressed-tensors", "nvfp4"),
    "compressed-tensors fp8": lambda: written("compressed-tensors", "fp8_block"),
    "compressed-tensors int8": lambda: written("compressed-tensors", "int8_ch.int8_token"),
    "gptq": lambda: written("gptq", "int3_g64"),
    "gptq ordered": ordered,
    "awq": awq,
    "modelopt": lambda: written("modelopt", "nvfp4"),
    "fp8": lambda: written("fp8", "fp8_block"),
    "mxfp4": mxfp4,
    "gristmill": lambda: written("gristmill", "int4_g64_zp"),
}


def read(folder: Path, config: Any) -> list[torch.Tensor]:
    """Reads everything in a directory, dequantized."""
    checkpoint = SafetensorsCheckpoint(folder)
    form = open_format(config if isinstance(config, dict) else {})
    weights = []
    for name in NAMES:
        part = form.read(checkpoint, name, SHAPE)
        weights.append(
            checkpoint.read(f"{name}.weight", SHAPE).float() if part is None else part.weight.dequantize()
        )
    return weights


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def mutate_header(data: bytes, r: random.Random) -> bytes:
    header, body = split(data)
    name = r.choice([n for n in header if n != "__metadata__"])
    entry, how = header[name], r.randrange(9)
    if how == 0:
        entry["dtype"] = r.choice(
            ["F32", "F16", "BF16", "I8", "U8", "I32", "I64", "F8_E4M3", "F8_E8M0", "BOOL", "F4", "x", 3]
        )
    elif how == 1:
        entry["shape"] = r.choice(
            [
                entry["shape"][::-1],
                [*entry["shape"], 1],
                entry["shape"][:-1],
                [-1],
                [0],
                [1 << 62, 4],
                "x",
                [1.5],
            ]
        )
    elif how == 2:
        entry["data_offsets"][r.randrange(2)] += r.choice([-8, -1, 1, 4, 1 << 40])
    elif how == 3:
        other = r.choice([n for n in header if n != "__metadata__"])
        entry["data_offsets"] = header[other]["data_offsets"]
    elif how == 4:
        del header[name]
    elif how == 5:
        header[r.choice([name + "x", "", "__metadata__", name.replace("0", "1")])] = header.pop(name)
    elif how == 6:
        header[name] = r.choice(JUNK)
    elif how == 7:
        entry[r.choice(["dtype", "shape", "data_offsets"])] = r.choice(JUNK)
    else:
        header = r.choice([[], "x", 3, None, {}, {"__metadata__": {"a": "b"}}])
    return joined(header, body)


def mutate_bytes(data: bytes, r: random.Random) -> bytes:
    changed, header = bytearray(data), 8 + struct.unpack("<Q", data[:8])[0]
    how = r.randrange(5)
    if how == 0:
        return data[: r.randrange(len(data))]
    if how == 1:
        return data + bytes(r.randrange(1, 64))
    if how == 2:
        return (
            struct.pack("<Q", r.choice([0, 1, len(data), 1 << 40, (1 << 64) - 1, r.randrange(2000)]))
            + data[8:]
        )
    for _ in range(r.randrange(1, 8)):
        changed[r.randrange(header if how == 3 else len(data))] = r.randrange(256)
    return bytes(changed)


def mutate_config(config: dict[str, Any], r: random.Random) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    place: Any = changed
    while True:
        key = r.choice(list(place)) if isinstance(place, dict) and place else None
        if key is None:
            return changed
        if isinstance(place[key], dict) and place[key] and r.random() < 0.7:
            place = place[key]
            continue
        if r.random() < 0.25:
            del place[key]
        else:
            place[key] = r.choice(JUNK)
        return changed


def attempt(folder: Path, config: Any, original: list[torch.Tensor], same: bool) -> str:
    """Returns the outcome of reading a damaged directory: "error" or "loaded"."""
    begin = time.process_time()
    try:
        read_back = read(folder, config)
    except (FormatError, UsageError) as error:
        assert str(error), "an exception without a word"
        outcome = "error"
    else:
        assert all(t.shape == SHAPE and bool(torch.isfinite(t).all()) for t in read_back)
        if same:
            assert all(torch.equal(a, b) for a, b in zip(read_back, original, strict=True))
        outcome = "loaded"
    assert time.process_time() - begin < LIMIT
    return outcome


@pytest.fixture
def fuzz_rounds() -> int:
    """Mutations per family."""
    return int(os.environ.get("GRISTMILL_FUZZ", "300"))


@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_directories(family: str, tmp_path: Path, fuzz_rounds: int) -> None:
    tensors, config = FAMILIES[family]()
    file = tmp_path / "model.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})
    data, original = file.read_bytes(), read(tmp_path, config)
    outcomes: dict[str, int] = {}
    for seed in range(fuzz_rounds):
        r = random.Random(f"{family} {seed}")
        kind = r.choice(["header", "bytes", "config"])
        used, changed = config, data
        if kind == "header":
            changed = mutate_header(data, r)
        elif kind == "bytes":
            changed = mutate_bytes(data, r)
        else:
            used = mutate_config(config, r)
        file.write_bytes(changed)
        try:
            # growth and truncation never load: a file of another length would contain other values
            outcome = attempt(tmp_path, used, original, same=kind == "bytes" and len(changed) != len(data))
        except Exception as error:
            raise AssertionError(f"{family} {seed} ({kind}): {type(error).__name__}: {error}") from error
        outcomes[f"{kind} {outcome}"] = outcomes.get(f"{kind} {outcome}", 0) + 1
    assert outcomes["header error"] > outcomes.get("header loaded", 0), outcomes
    assert {"bytes error", "config error"} <= outcomes.keys(), outcomes


def test_damaged_indexes(tmp_path: Path, fuzz_rounds: int) -> None:
    """Directories of two files, with the index mutated as JSON and as text."""
    tensors, config = FAMILIES["modelopt"]()
    weight_map = {}
    for number, module in enumerate(NAMES):
        file = f"model-{number}.safetensors"
        part = {n: t.contiguous() for n, t in tensors.items() if n.startswith(module)}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index, path = {"metadata": {"total_size": 1}, "weight_map": weight_map}, tmp_path / INDEX
    path.write_text(json.dumps(index))
    original, outcomes = read(tmp_path, config), {"error": 0, "loaded": 0}
    for seed in range(fuzz_rounds):
        r = random.Random(f"index {seed}")
        text = bytearray(json.dumps(mutate_config(index, r) if r.random() < 0.5 else index).encode())
        for _ in range(r.randrange(4)):
            text[r.randrange(len(text))] = r.randrange(256)
        path.write_bytes(bytes(text))
        try:
            outcomes[attempt(tmp_path, config, original, same=True)] += 1
        except Exception as error:
            raise AssertionError(f"index {seed}: {type(error).__name__}: {error}") from error
    assert outcomes["error"] > outcomes["loaded"] / 10, outcomes


def dense_gguf(path: Path) -> None:
    """A Llama of one layer in Q8_0."""
    from tests.quant.formats.test_gguf import write

    write(path)


def experts_gguf(path: Path) -> None:
    """A Qwen3-MoE of one layer, with frequency factors and a tokenizer."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, value in {
        "block_count": 1,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "embedding_length": 32,
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_feed_forward_length": 32,
    }.items():
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", "<s>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_add_bos_token(True)
    shapes = {"token_embd": (4, 32), "output_norm": (32,), "rope_freqs": (8,)}
    shapes |= {
        f"blk.0.{name}": shape
        for name, shape in {
            "attn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "attn_q_norm": (16,),
            "attn_k_norm": (16,),
            "ffn_norm": (32,),
            "ffn_gate_inp": (2, 32),
            "ffn_gate_exps": (2, 32, 32),
            "ffn_up_exps": (2, 32, 32),
            "ffn_down_exps": (2, 32, 32),
        }.items()
    }
    for name, shape in shapes.items():
        data = np.linspace(0.5, 1.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        raw = gguf.GGMLQuantizationType.Q4_0 if len(shape) > 1 else None
        writer.add_tensor(
            f"{name}.weight", data if raw is None else gguf.quants.quantize(data, raw), raw_dtype=raw
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> None:
    """Reads everything in a GGUF file: configuration, tokenizer, matrices."""
    from gristmill.quant.checkpoints.gguf import GgufCheckpoint
    from gristmill.quant.checkpoints.gguf_tokenizer import gguf_tokenizer
    from gristmill.quant.formats.gguf import Gguf
    from gristmill.runtime.loader.config import gguf_architectures

    file = GgufCheckpoint(path, gguf_architectures())
    file.config()
    for name in file:
        if name.endswith("_proj.weight"):
            read_back = Gguf().read(file, name.removesuffix(".weight"), file.shape(name))
            assert read_back is None or bool(torch.isfinite(read_back.weight.dequantize()).all())
    fields = file.tokenizer_fields()
    if fields:
        gguf_tokenizer(fields, str(path)).encode("ab a")


@pytest.mark.parametrize("make", [dense_gguf, experts_gguf])
def test_damaged_gguf_files(make: Callable[[Path], None], tmp_path: Path, fuzz_rounds: int) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "m.gguf"
    make(path)
    read_gguf(path)
    data = path.read_bytes()
    header = data.index(b"blk.0.attn_norm") + 1500  # names, shapes, types and offsets of all tensors
    outcomes = {"error": 0, "loaded": 0}
    for seed in range(fuzz_rounds):
        r = random.Random(f"{make.__name__} {seed}")
        changed = bytearray(data)
        if r.random() < 0.2:
            changed = changed[: r.randrange(len(data))]
        else:
            for _ in range(r.randrange(1, 6)):
                changed[r.randrange(min(header, len(changed)))] = r.choice([0, 1, 255, r.randrange(256)])
        path.write_bytes(bytes(changed))
        begin = time.process_time()
        try:
            read_gguf(path)
            outcomes["loaded"] += 1
        except (FormatError, UsageError) as error:
            assert str(error)
            outcomes["error"] += 1
        except Exception as error:
            raise AssertionError(f"{make.__name__} {seed}: {type(error).__name__}: {error}") from error
        assert time.process_time() - begin < LIMIT, seed
    assert outcomes["error"] > outcomes["loaded"] / 10, outcomes


def header_of(entries: dict[str, Any], body: bytes = b"") -> bytes:
    return joined(entries, body)


CORPUS: dict[str, bytes] = {
    "nested header": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "nan offsets": header_of({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, float("nan")]}}, b"\0"),
    "a shape past 64 bits": header_of({"a": {"dtype": "U8", "shape": [1 << 63, 2], "data_offsets": [0, 0]}}),
    "a shape of many sizes": header_of(
        {"a": {"dtype": "U8", "shape": [1 << 62] * 100_000, "data_offsets": [0, 0]}}
    ),
    "bools for numbers": header_of({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, True]}}, b"\0"),
    "not UTF-8": struct.pack("<Q", 4) + b"\xff\xfe{}",
}


@pytest.mark.parametrize("name", CORPUS)
def test_corpus(name: str, tmp_path: Path) -> None:
    """Within seconds, and with a message that can be read."""
    (tmp_path / "model.safetensors").write_bytes(CORPUS[name])
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="truncated or corrupt") as raised:
        list(SafetensorsCheckpoint(tmp_path))
    assert time.process_time() - begin < LIMIT
    assert len(str(raised.value)) < 1000
