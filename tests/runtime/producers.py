"""Example models in the formats of other projects, made by other packages' code or from the formats'
definitions, with their values.

A producer takes a module's name and its float32 weight. It returns the tensors to store in place of
``NAME.weight``, by suffix, and the float32 values that they represent; None keeps the weight as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.runtime.gguf_files import finish, new_writer, quantize
from tests.runtime.oracle import MODELS

LINEAR = re.compile(r"(model\.layers\.\d+\..*(?:proj|proj_with_mqa))\.weight")
Producer = Callable[[str, Tensor], "tuple[dict[str, Tensor], Tensor] | None"]


def convert(name: str, folder: Path, config: Mapping[str, Any], produce: Producer) -> tuple[Path, Path]:
    """Returns (directory in the format, the same model in float32 with the format's values)."""
    converted, plain = folder / "made", folder / "plain"
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for file in sorted((MODELS / name).glob("*.safetensors")):
        with safe_open(file, "pt") as source:
            for key in source.keys():  # noqa: SIM118
                tensor = source.get_tensor(key)
                match = LINEAR.fullmatch(key)
                actual = produce(match[1], tensor.float()) if match else None
                if actual is None or match is None:
                    tensors[key], values[key] = tensor, tensor.float()
                else:
                    tensors.update(
                        {f"{match[1]}.{suffix}": t.clone().contiguous() for suffix, t in actual[0].items()}
                    )
                    values[key] = actual[1].float().contiguous()
    for out, stored, extra in (
        (converted, tensors, {"quantization_config": dict(config)}),
        (plain, values, {}),
    ):
        out.mkdir()
        save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
        data = json.loads((MODELS / name / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(data | extra))
        for beside in ("generation_config.json", "tokenizer.json"):
            (out / beside).write_bytes((MODELS / name / beside).read_bytes())
    return converted, plain


def compressed_tensors(
    groups: Mapping[str, tuple[list[str], str, dict[str, Any]]],
) -> tuple[dict[str, Any], Producer]:
    """Uses the package's compressors. groups: name -> (targets, format, arguments of the weights). Scales are
    bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    schemes = {
        name: QuantizationScheme(targets=targets, format=form, weights=QuantizationArgs(**arguments))
        for name, (targets, form, arguments) in groups.items()
    }

    def produce(module: str, w: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        scheme = next(
            (s for s in schemes.values() for t in s.targets if t == "Linear" or re.match(t[3:], module)), None
        )
        if scheme is None or scheme.weights is None:
            return None
        args, state = scheme.weights, {"weight": w}
        grouped = w if args.group_size is None else w.unflatten(1, (-1, args.group_size))
        low, high = grouped.amin(-1), grouped.amax(-1)
        if args.strategy == "tensor":
            low, high = w.amin().view(1), w.amax().view(1)
        elif args.group_size is None:
            low, high = low[:, None], high[:, None]
        if str(scheme.format).startswith("nvfp4"):
            state["weight_global_scale"] = generate_gparam(w.amin(), w.amax()).view(1)
        scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        state["weight_scale"] = scale.to(torch.bfloat16) if scale.dtype == torch.float32 else scale
        if not args.symmetric:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        stored = compressor.compress(state, scheme)
        upcast = stored | {"weight_scale": stored["weight_scale"].float()}
        if "weight_global_scale" in stored:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
            from compressed_tensors.quantization.lifecycle.forward import dequantize

            codes = unpack_fp4_from_uint8(stored["weight_packed"], *w.shape, torch.float32)
            values = dequantize(
                codes,
                upcast["weight_scale"],
                args=args,
                global_scale=stored["weight_global_scale"],
                dtype=torch.float32,
            )
        else:
            values = compressor.decompress(upcast, scheme)["weight"]
        return stored, values

    forms = {form for _, form, _ in groups.values()}
    config = {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "config_groups": {name: scheme.model_dump(mode="json") for name, scheme in schemes.items()},
    }
    return config, produce


def fine_grained_fp8() -> tuple[dict[str, Any], Producer]:
    """Uses transformers, which keeps matrices with partial blocks in floating point."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    op = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))

    def produce(module: str, w: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        stored = Fp8Quantize(op)._quantize_one(f"{module}.weight", w)
        if len(stored) == 1:
            return None
        values = Fp8Dequantize(op)._dequantize_one(*stored.values(), output_dtype=torch.float32)
        return {name.rpartition(".")[2]: t for name, t in stored.items()}, values

    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, produce


def _integers(w: Tensor, group: int, bits: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Returns asymmetric codes [N, K], zero points and float16 scales [N, G] of consecutive groups."""
    grouped, top = w.unflatten(1, (-1, group)), (1 << bits) - 1
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scale = ((high - low) / top).clamp(min=1e-5).half()
    zero = (-low / scale.float()).round().clamp(0, top).to(torch.int64)
    codes = (
        ((grouped / scale.float()[..., None]).round() + zero[..., None])
        .clamp(0, top)
        .flatten(1)
        .to(torch.int64)
    )
    return codes, zero, scale


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs nibbles [R, C] into int32 [R, C / 8]; nibble i of a word holds its column order[i]."""
    eights = codes.unflatten(1, (-1, 8))[..., list(order)]
    total = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


def gptq(act_order: bool, v2: bool = False, group: int = 32) -> tuple[dict[str, Any], Producer]:
    """Follows the format's definition, with 4 bits, a separate column order per module, and biases of 0."""

    def produce(module: str, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        k = w.shape[1]
        generator = torch.Generator().manual_seed(sum(module.encode()))
        order = torch.randperm(k, generator=generator) if act_order else torch.arange(k)
        sorted_codes, zero, scale = _integers(w[:, order], group)
        codes, g_idx = torch.empty_like(sorted_codes), torch.empty(k, dtype=torch.int64)
        codes[:, order], g_idx[order] = sorted_codes, torch.arange(k) // group
        stored = {
            "qweight": _words(codes).t(),
            "qzeros": _words((zero.t() - (0 if v2 else 1)) % 16),
            "scales": scale.t(),
            "g_idx": g_idx.to(torch.int32),
            "bias": torch.zeros(w.shape[0], dtype=torch.float16),
        }
        return stored, (codes - zero[:, g_idx]).float() * scale.float()[:, g_idx]

    version = "gptq_v2" if v2 else "gptq"
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": False,
        "desc_act": act_order,
        "checkpoint_format": version,
    }, produce


def awq(group: int = 64) -> tuple[dict[str, Any], Producer]:
    """Follows the format's definition: packed along N in AWQ's order."""

    def produce(module: str, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zero, scale = _integers(w, group)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        values = (codes - zero.repeat_interleave(group, 1)).float() * scale.float().repeat_interleave(
            group, 1
        )
        return {
            "qweight": _words(codes.t(), order),
            "qzeros": _words(zero.t(), order),
            "scales": scale.t(),
        }, values

    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }, produce


def modelopt_nvfp4(pre_scaled: tuple[str, ...] = ()) -> tuple[dict[str, Any], Producer]:
    """Stores NVFP4 like ModelOpt; modules that end in one of `pre_scaled` scale their input first."""
    from tests.quant.oracle import e2m1, e4m3

    def produce(module: str, w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        before = torch.ones(w.shape[1])
        if module.endswith(pre_scaled) and pre_scaled:
            before = torch.exp2((torch.arange(w.shape[1]) % 3 - 1).float())
        grouped = (w / before).unflatten(1, (-1, 16))
        top = grouped.abs().amax() / (6 * 448)
        scale = torch.from_numpy(e4m3((grouped.abs().amax(2) / (6 * top)).clamp(2.0**-9, 448).numpy()))
        rounded = torch.from_numpy(e2m1((grouped / (scale * top)[..., None]).numpy()))
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = torch.searchsorted(table, rounded.abs()).to(torch.uint8) | (
            rounded.signbit().to(torch.uint8) << 3
        )
        pairs = codes.flatten(1).unflatten(1, (-1, 2))
        stored = {
            "weight": pairs[..., 0] | (pairs[..., 1] << 4),
            "weight_scale": scale.to(torch.float8_e4m3fn),
            "weight_scale_2": top,
            "input_scale": torch.tensor(0.01),
        }
        if module.endswith(("k_proj", "v_proj")):
            stored[f"{module[-6]}_scale"] = torch.tensor(1.0)
        if module.endswith(pre_scaled) and pre_scaled:
            stored["pre_quant_scale"] = before
        return stored, (rounded * scale[..., None] * top).flatten(1) * before

    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    return config, produce


def gguf_file(name: str, folder: Path, kinds: Mapping[str, str]) -> tuple[Path, Path]:
    """Returns (a GGUF file by the gguf package, the same model in float32). kinds: end of a module's name ->
    ggml's type."""
    import gguf
    import numpy as np

    config = json.loads((MODELS / name / "config.json").read_text())
    path, plain = folder / "made.gguf", folder / "plain"
    writer, table = new_writer(path, "llama", config)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    values = {}
    with safe_open(MODELS / name / "model.safetensors", "pt") as source:
        for key in source.keys():  # noqa: SIM118
            module, _, suffix = key.rpartition(".")
            data = source.get_tensor(key).float().numpy()
            head_count = heads.get(module.rpartition(".")[2])
            if head_count:
                data = (
                    data.reshape(head_count, 2, data.shape[0] // head_count // 2, -1)
                    .swapaxes(1, 2)
                    .reshape(data.shape)
                )
            kind = next((k for end, k in kinds.items() if module.endswith(end)), None)
            if kind is None:
                values[key] = source.get_tensor(key).float()
                writer.add_tensor(f"{table.get_name(module)}.{suffix}", np.ascontiguousarray(data))
                continue
            raw = gguf.GGMLQuantizationType[kind]
            blocks = quantize(np.ascontiguousarray(data), kind)
            writer.add_tensor(f"{table.get_name(module)}.{suffix}", blocks, raw_dtype=raw)
            read = gguf.quants.dequantize(blocks, raw)
            if head_count:
                read = (
                    read.reshape(head_count, read.shape[0] // head_count // 2, 2, -1)
                    .swapaxes(1, 2)
                    .reshape(read.shape)
                )
            values[key] = torch.from_numpy(np.ascontiguousarray(read))
    finish(writer)
    plain.mkdir()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    return path, plain
