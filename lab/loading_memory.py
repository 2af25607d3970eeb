"""Peak memory of quantizing a model while it loads: final size, and what it needs beside that at most.

    python -m lab.loading_memory --gigabytes 1 --out bench/results/cpu/loading_memory.json

A random bfloat16 model of the asked size is written (``dense``: Llama; ``experts``: Qwen3-MoE, one tensor per expert; ``stacked``:
gpt-oss, all experts of a layer in one) and loaded quantized, the way `LLM` does it. Counted are the anonymous pages of the
process, many times a millisecond of loading: pages of the mapped files are the system's, which may drop them. The bar: the peak
stays under what the loaded model takes plus the two largest tensors, of the checkpoint or of the model.
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
from gristmill.runtime.loader.config import parse_config
from gristmill.runtime.loader.load import load_model
from gristmill.runtime.loader.safetensors import INDEX, SafetensorsCheckpoint
from gristmill.runtime.models import model_table

COMMON = {
    "vocab_size": 4096,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
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
"""Layers as those of Llama-3-8B, Qwen3-30B-A3B and gpt-oss-20b; they are added until the model is large enough."""
SCHEMES = {
    "dense": ("int4_g128", "fp8_block", "nvfp4"),
    "experts": ("int4_g128", "fp8_block", "nvfp4"),
    "stacked": ("mxfp4", "int4_g32", "nvfp4"),
}


@dataclass
class Peak:
    """Anonymous bytes at the start, and the most there were."""

    start: int
    most: int


def anonymous() -> int:
    """Bytes of this process that no file backs: resident pages without the shared ones."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def watched(interval: float = 2e-4) -> Iterator[Peak]:
    """The peak while the block runs, by a thread that looks every `interval` seconds."""
    trim()
    peak, done = Peak(now := anonymous(), now), threading.Event()

    def look() -> None:
        while not done.is_set():
            peak.most = max(peak.most, anonymous())
            time.sleep(interval)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def trim() -> None:
    """Give freed memory back to the system (glibc), so that the next block is seen to take it."""
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def synthesize(kind: str, folder: Path, size: int) -> None:
    """Write a random model of about `size` bytes."""
    config = {**COMMON, **KINDS[kind], "num_hidden_layers": 1}
    one = _tensors(config, 0)
    layers = max(1, round(size / sum(t.numel() * 2 for t in one.values())))
    index: dict[str, str] = {}
    for layer in range(layers):
        file = f"model-{layer:05d}.safetensors"
        held = {
            name.replace("layers.0.", f"layers.{layer}."): t
            for name, t in one.items()
            if not layer or ".layers.0." in name
        }
        save_file(held, folder / file)
        index.update(dict.fromkeys(held, file))
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))


def _tensors(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of a model of one layer, by its table."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for weight in model_table(parse_config(config)).weights:
        for i, name in enumerate(weight.part_names()):
            rows = weight.rows[i % len(weight.rows)]
            shape: tuple[int, ...] = (rows,) if weight.columns is None else (rows, weight.columns)
            if weight.stacked:
                shape = (weight.experts, *shape[::-1]) if len(shape) == 2 else (weight.experts, *shape)
            full = f"{name}.weight" if weight.kind == "linear" and not weight.stacked else name
            found[full] = torch.randn(shape, generator=generator, dtype=torch.bfloat16) * 0.02
    return found


def measure(folder: Path, scheme: str, policy: Policy) -> dict[str, Any]:
    """One loading: bytes of the model, of the two largest tensors, and of the peak above the start."""
    load_model(
        folder, quant=scheme, policy=policy
    )  # kernels are verified and loaded, whose memory is not the weights'
    with watched() as peak:
        model = load_model(folder, quant=scheme, policy=policy)
    checkpoint = SafetensorsCheckpoint(folder)
    sizes = [e.dtype.itemsize * torch.Size(e.shape).numel() for e in checkpoint.entries.values()]
    sizes += [t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in model.plans.owned}.values()]
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
    help="Where to write; default: the system's temporary folder.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures here as JSON.")
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
                    out.write_text(json.dumps({"about": about, "rows": rows}) + "\n")
        finally:
            shutil.rmtree(made)
    console.table("Memory while quantizing at load, MB", COLUMNS, cells(rows), right=COLUMNS[2:])


if __name__ == "__main__":
    main()
