"""Peak memory of quantizing a model at load: the final size, and the maximum in addition to it.

    python -m lab.loading_memory --gigabytes 1 --out bench/results/cpu/loading_memory.json

A random bfloat16 model of the given size is written (``dense``: Llama; ``experts``: Qwen3-MoE, one tensor per expert; ``stacked``:
gpt-oss, all experts of a layer in one) and loaded quantized, as `LLM` does. A thread samples the anonymous memory of the process
during the load; pages of mapped files do not count, because the system may drop them. The target: the peak stays below the size of
the loaded model plus the two largest tensors of the checkpoint or the model.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from gristmill import console
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.safetensors import INDEX, SafetensorsCheckpoint
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.models import model_table
from lab.result import write_result

COMMON = {
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default"},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "stacked": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
}
"""Layers with the shapes of Llama-3-8B, Qwen3-30B-A3B and gpt-oss-20b; their number follows from the size."""
SCHEMES = {
    "dense": ("int4_g128", "fp8_block", "nvfp4"),
    "experts": ("int4_g128", "fp8_block", "nvfp4"),
    "stacked": ("mxfp4", "int4_g32", "nvfp4"),
}


@dataclass
class Peak:
    """Anonymous bytes at the start, and their maximum."""

    start: int
    most: int


def anonymous() -> int:
    """Bytes of this process that are not backed by a file: resident pages without shared ones."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watched(interval: float = 2e-4) -> Iterator[Peak]:
    """The peak while the block runs, sampled by a thread every `interval` seconds."""
    trim()
    peak, stop = Peak(now := anonymous(), now), threading.Event()

    def look() -> None:
        while not stop.is_set():
            peak.most = max(peak.most, anonymous())
            time.sleep(interval)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def trim() -> None:
    """Return freed memory to the system (glibc), so that the next block has to allocate it again."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def synthesize(kind: str, folder: Path, size: int) -> None:
    """Write a random model of about `size` bytes."""
    config = {**COMMON, **KINDS[kind], "num_hidden_layers": 1}
    layer_tensors = _tensors(config, 0)
    layers = max(1, round(size / sum(t.numel() * 2 for t in layer_tensors.values())))
    index: dict[str, str] = {}
    for layer in range(layers):
        file = f"model-{layer:05d}.safetensors"
        file_tensors = {
            name.replace("layers.0.", f"layers.{layer}."): t
            for name, t in layer_tensors.items()
            if not layer or ".layers.0." in name
        }
        save_file(file_tensors, folder / file)
        index.update(dict.fromkeys(file_tensors, file))
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


def _tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a model with one layer, by the family's table."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for weight in model_table(parse_config(config)).weights:
        for i, name in enumerate(weight.part_names()):
            rows = weight.rows[i % len(weight.rows)]
            shape: tuple[int, ...] = (rows,) if weight.columns is None else (rows, weight.columns)
            if weight.stacked:
                shape = (weight.experts, *shape[::-1]) if len(shape) == 2 else (weight.experts, *shape)
            full = f"{name}.weight" if weight.kind == "linear" and not weight.stacked else name
            tensors[full] = torch.randn(shape, generator=generator, dtype=torch.bfloat16) * 0.02
    return tensors


def measure(folder: Path, scheme: str, policy: Policy) -> dict[str, Any]:
    """One load: bytes of the model, of the two largest tensors, and of the peak above the start."""
    load_model(
        folder, quant=scheme, policy=policy
    )  # verifies and loads kernels first, whose memory does not count
    with watched() as peak:
        model = load_model(folder, quant=scheme, policy=policy)
    checkpoint = SafetensorsCheckpoint(folder)
    sizes = [e.dtype.itemsize * torch.Size(e.shape).numel() for e in checkpoint.entries.values()]
    sizes += [t.nbytes for t in {t.data_ptr(): t for t in model.plans.owned}.values()]
    final, largest, used = model.plans.weight_bytes, sum(sorted(sizes)[-2:]), peak.most - peak.start
    return {
        "scheme": scheme,
        "final": final,
        "two_largest": largest,
        "peak": used,
        "beside": used - final,
        "checkpoint": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    }


COLUMNS = ("model", "scheme", "checkpoint", "loaded", "peak", "beside", "two largest", "within")


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The table's rows, in MB."""
    return [
        [
            r["kind"],
            r["scheme"],
            *(f"{r[key] / 1e6:.1f}" for key in ("checkpoint", "final", "peak", "beside", "two_largest")),
            "yes" if r["beside"] <= r["two_largest"] else "NO",
        ]
        for r in rows
    ]


@click.command()
@click.option("--gigabytes", type=float, default=1.0, show_default=True, help="Of the bfloat16 model.")
@click.option("--kind", "only", type=click.Choice(list(KINDS)), help="One kind of model; default: all.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder for models. Default: the system's temporary folder.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures to this JSON file.")
def main(gigabytes: float, only: str | None, folder: Path | None, out: Path | None) -> None:
    """Measure the peak memory of loading with quantization."""
    rows, policy = [], Policy.current()
    for kind in [only] if only else KINDS:
        made = Path(tempfile.mkdtemp(dir=folder))
        try:
            synthesize(kind, made, int(gigabytes * 1e9))
            for scheme in SCHEMES[kind]:
                rows.append({"kind": kind, **measure(made, scheme, policy)})
                if out:
                    about = environment(
                        place("cpu").target,
                        f"python -m lab.loading_memory --gigabytes {gigabytes:g}",
                    )
                    out.parent.mkdir(parents=True, exist_ok=True)
                    write_result(out, {"about": about, "rows": rows})
        finally:
            shutil.rmtree(made)
    console.table("Memory while quantizing at load, MB", COLUMNS, cells(rows), right=COLUMNS[2:])


if __name__ == "__main__":
    main()
