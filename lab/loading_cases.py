"""The synthetic checkpoints that `lab.loading` loads: layers of the shapes of Llama-3-8B, or of gpt-oss-20b's experts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gristmill.quant import quantize
from gristmill.quant.checkpoints.safetensors import INDEX
from gristmill.quant.checkpoints.table import Weight, WeightTable
from gristmill.quant.formats import open_writer

HIDDEN, KV, FFN = 4096, 1024, 14336
DENSE = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
"""Linear weights of a dense layer, [N, K]."""
EXPERTS = 32
STACKED = {"mlp.experts.gate_up_proj": (5760, 2880), "mlp.experts.down_proj": (2880, 2880)}
"""Those of a layer of gpt-oss, [N, K] of each expert."""
GGUF_NAMES = dict(
    zip(SHAPES, ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), strict=True)
)


@dataclass(frozen=True)
class Case:
    """A format in a scheme.

    Attributes:
        tensors: (rows, columns, generator) -> suffix -> tensor of a matrix, or of all experts.
        step: the conversion from the file to a QuantTensor.
        gguf: the ggml block type in which the same bytes are also written to a GGUF file.
    """

    tensors: Callable[[int, int, torch.Generator], dict[str, Tensor]]
    config: Mapping[str, Any]
    step: str = "as it lies"
    shapes: Mapping[str, tuple[int, int]] = field(default_factory=lambda: SHAPES)
    gguf: str = ""


@dataclass(frozen=True)
class Made:
    """A case on disk.

    Attributes:
        path: a folder or a GGUF file, for the loader.
        folder: the folder of the safetensors files.
    """

    folder: Path
    path: Path
    table: WeightTable
    config: Mapping[str, Any]


def written(form: str, scheme: str, step: str = "as it lies") -> Case:
    """A case written by the format's writer."""
    writer = open_writer(form, scheme)

    def tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        stored = writer.tensors(writer.quantize(torch.randn(n, k, generator=generator) * 0.02))
        return {f".{suffix}": tensor for suffix, tensor in stored.items()}

    return Case(tensors, writer.config([]), step)


def awq() -> Case:
    """AWQ in groups of 128, from the definition of the format, which has no writer here."""

    def tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        def words(rows: int) -> Tensor:
            return torch.randint(-(1 << 31), 1 << 31, (rows, n // 8), generator=generator).to(torch.int32)

        scales = torch.rand(k // 128, n, generator=generator).half()
        return {".qweight": words(k), ".qzeros": words(k // 128), ".scales": scales}

    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    return Case(tensors, config, "repacked: nibbles of 8 rows a word")


def gpt_oss() -> Case:
    """MXFP4 of all experts of a layer in one tensor."""

    def tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        weight = quantize(torch.randn(n, k, generator=generator) * 0.02, "mxfp4")
        assert weight.scales is not None
        blocks = weight.codes.unflatten(-1, (-1, 16)).expand(EXPERTS, -1, -1, -1)
        return {"_blocks": blocks.contiguous(), "_scales": weight.scales.expand(EXPERTS, -1, -1).contiguous()}

    return Case(tensors, {"quant_method": "mxfp4"}, shapes=STACKED)


def gguf(kind: str) -> Case:
    """GGUF blocks, written by the gguf package."""

    def tensors(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        import gguf as package

        floats = torch.randn(n, k, generator=generator).numpy() * 0.02
        return {
            ".weight": torch.from_numpy(package.quants.quantize(floats, package.GGMLQuantizationType[kind]))
        }

    return Case(tensors, {"quant_method": "gguf"}, "repacked: scales out of blocks", gguf=kind)


CASES: Mapping[str, Callable[[], Case]] = {
    "fp8 fp8_block": lambda: written("fp8", "fp8_block"),
    "gptq int4_g128": lambda: written("gptq", "int4_g128", "words transposed"),
    "modelopt nvfp4": lambda: written("modelopt", "nvfp4"),
    "compressed-tensors int4_g128": lambda: written("compressed-tensors", "int4_g128"),
    "compressed-tensors int8_ch": lambda: written(
        "compressed-tensors", "int8_ch.int8_token", "a bit of each byte flipped"
    ),
    "mxfp4 experts": gpt_oss,
    "modelopt mxfp8": lambda: written("modelopt", "mxfp8"),
    "gristmill int4_g128_zp": lambda: written("gristmill", "int4_g128_zp"),
    "awq int4_g128_zp": awq,
    "gguf Q4_0": lambda: gguf("Q4_0"),
}


def synthesize(case: Case, folder: Path, size: int) -> Made:
    """Write layers, one file per layer, until they have `size` bytes; all layers have the same values."""
    generator = torch.Generator().manual_seed(0)
    made = {shape: case.tensors(*shape, generator) for shape in dict.fromkeys(case.shapes.values())}
    layer = {
        f"{name}{suffix}": t.clone()
        for name, shape in case.shapes.items()
        for suffix, t in made[shape].items()
    }
    count = max(1, round(size / sum(t.nbytes for t in layer.values())))
    weights: list[Weight] = []
    index: dict[str, str] = {}
    for number in range(count):
        file, prefix = f"model-{number:05d}.safetensors", f"model.layers.{number}."
        save_file({prefix + name: t.contiguous() for name, t in layer.items()}, folder / file)
        index.update({prefix + name: file for name in layer})
        weights += _weights(prefix, case)
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    path = _gguf_file(folder / "model.gguf", case.gguf, count, layer) if case.gguf else folder
    return Made(folder, path, WeightTable(tuple(weights)), case.config)


def _weights(prefix: str, case: Case) -> list[Weight]:
    """A layer's entries of the table."""
    if case.shapes is STACKED:
        return [
            Weight(prefix + n, (prefix + n,), (s[0],), s[1], "linear", EXPERTS, stacked=True)
            for n, s in STACKED.items()
        ]
    return [
        Weight(
            prefix + target,
            tuple(prefix + p for p in parts),
            tuple(SHAPES[p][0] for p in parts),
            SHAPES[parts[0]][1],
            "linear",
        )
        for target, parts in DENSE.items()
    ]


def _gguf_file(path: Path, kind: str, layers: int, layer: Mapping[str, Tensor]) -> Path:
    """The layers in one file of the architecture "llama"."""
    import gguf as package

    writer = package.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": layers,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    for number in range(layers):
        for name, own in GGUF_NAMES.items():
            data = layer[f"{name}.weight"].numpy()
            writer.add_tensor(
                f"blk.{number}.{own}.weight", data, raw_dtype=package.GGMLQuantizationType[kind]
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
