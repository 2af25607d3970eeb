"""The engine on one device: start, output tokens per second, time per token at batch 1, and how the device spends a decode step.

    python -m lab.engine --model qwen3-0.6b --async-steps off,on --out engine.json

The workload is the one of the comparison with other engines: 256 requests, prompts of 100 to 1,024 random ids, 100 to 1,024 tokens
of output each, greedy, without end tokens. A name instead of a directory makes a model of that shape with random weights. Every
value of --async-steps is an engine of its own in one process, so the kernels of the second are compiled already. The share of a step
without a kernel comes from a trace of decode steps (CUPTI through torch.profiler), which itself delays launches a little.

--starts begins with as many new processes, one after another, that load the model, warm up and give a token: the first with an empty
store and without compiled kernels, the others with what it has left. Their seconds, by phase, are `starts` in the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gristmill import LLM, SamplingParams
from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.bench.device_trace import Trace, recorded, summary
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.writing.checkpoint import write_quantized
from gristmill.runtime.loader.config import open_checkpoint, parse_config
from gristmill.runtime.models import model_table
from lab.result import write_result

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32000,
}
"""The width and the latent attention of DeepSeek-V3, with a small vocabulary."""
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
    },
    "llama3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "llama3-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,  # of every second layer, from the first on
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "deepseek-mla": {
        **DEEPSEEK,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 8,
        "intermediate_size": 4096,
        "max_position_embeddings": 1 << 18,
    },
    "deepseek-experts": {
        **DEEPSEEK,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 0,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",  # of DeepSeek-V3's config.json; vLLM knows the bias of the choice of experts by it
        "max_position_embeddings": 8192,
    },
}
"""Entries of config.json by name."""


def random_model(name: str, folder: Path, **changes: Any) -> Path:
    """A directory with a model of the shape `name` in bfloat16, with random weights. changes: to the entries of config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name] | changes
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / name, max_shard_size="20GB")
    return folder / name


def quantized(model: Path, scheme: str, form: str, out: Path) -> Path:
    """A model directory rounded to nearest, in the number format `scheme` and the checkpoint format `form`."""
    table = model_table(parse_config(*open_checkpoint(model).config()))
    write_quantized(model, out, table, QuantScheme.parse(scheme), form=form)
    return out


def repeat_layers(folder: Path, distinct: int, count: int, out: Path) -> Path:
    """A model of `count` layers from one of `distinct`: layer i is its layer i % distinct, also where lists of the quantization name it, and of
    the same type where layers have types (sliding window or full attention)."""
    from safetensors.torch import load_file, save_file

    def repeated(name: str) -> list[str]:
        found = re.match(r"(model\.layers\.)(\d+)(\..*)", name)
        if found is None:
            return [name]
        return [f"{found[1]}{layer}{found[3]}" for layer in range(int(found[2]), count, distinct)]

    tensors = {
        copy: tensor.clone()
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        for copy in repeated(name)
    }
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": count}
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer % distinct] for layer in range(count)]
    quantization = config.get("quantization_config", {})
    for key, value in quantization.items():
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            quantization[key] = [copy for name in value for copy in repeated(name)]
    (out / "config.json").write_text(json.dumps(config))
    return out


def workload(
    requests: int, vocabulary: int, shortest: int, longest: int
) -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of output tokens; the same for every engine that is compared."""
    generator = random.Random(0)
    top = min(10000, vocabulary - 1)
    prompts = [
        [generator.randint(0, top) for _ in range(generator.randint(shortest, longest))] for _ in range(256)
    ]
    outputs = [generator.randint(shortest, longest) for _ in range(256)]
    return prompts[:requests], outputs[:requests]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def throughput(llm: LLM, prompts: list[list[int]], outputs: list[int]) -> float:
    """Output tokens per second."""
    begin = time.perf_counter()
    results = llm.generate(prompts, [greedy(count) for count in outputs])
    wait()
    return sum(len(result.token_ids) for result in results) / (time.perf_counter() - begin)


def per_token(llm: LLM, prompt: list[int], tokens: int) -> float:
    """Milliseconds per token of one request, its prompt included."""
    begin = time.perf_counter()
    llm.generate([prompt], greedy(tokens))
    wait()
    return (time.perf_counter() - begin) / tokens * 1e3


def trace(llm: LLM, prompts: list[list[int]], steps: int) -> Trace:
    """Trace `steps` decode steps of requests that are all in their output."""
    engine = llm.engine
    for index, prompt in enumerate(prompts):
        engine.add_request(f"trace {index}", prompt, greedy(4 * steps + 64))
    while len(engine.step()) < len(prompts):  # prompts
        pass
    for _ in range(steps):
        engine.step()
    return traced(llm, len(prompts), steps)


def trace_prompts(llm: LLM, count: int, length: int) -> Trace:
    """Trace the steps that compute `count` prompts of `length` random ids; none is in the prefix cache."""
    generator = random.Random(1)
    top = min(10000, llm.config.vocab_size - 1)
    for index in range(count):
        ids = [generator.randint(0, top) for _ in range(length)]
        llm.engine.add_request(f"trace {index}", ids, greedy(2))
    limit = llm.engine.scheduler.config.max_batch_tokens
    steps = max(1, count * length // limit)
    return traced(llm, count, steps)


def traced(llm: LLM, batch: int, steps: int) -> Trace:
    """Trace the next steps, and end all requests."""
    engine = llm.engine
    wait()

    def run() -> None:
        for _ in range(steps):
            engine.step()
        wait()

    spans = recorded(run)
    engine.abort()
    return summary(spans, batch, steps)


def start(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up and give a token in this process; seconds by phase."""
    imported = time.time()
    llm = LLM(folder, quant=options.quant, device=options.device, **options.limits)
    wait()
    warm = time.time()
    llm.generate([[1, 2, 3]], greedy(1))
    report = llm.engine.warmed
    assert report is not None
    row = {**report.seconds, "load and warm-up": warm - imported, "first token": time.time() - warm}
    return {"import": imported - options.began, **row, "total": time.time() - options.began}


def starts(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of `start` for each of several new processes, over caches that are empty at first."""
    rows = []
    passed = ["--model", str(folder), "--device", options.device, "--limits", json.dumps(options.limits)]
    passed += ["--quant", options.quant] if options.quant else []
    with tempfile.TemporaryDirectory() as caches:
        env = os.environ | {"XDG_CACHE_HOME": caches, "TRITON_CACHE_DIR": f"{caches}/triton"}
        for _ in range(options.starts):
            command = [
                sys.executable,
                "-m",
                "lab.engine",
                *passed,
                "--out",
                "-",
                "--began",
                repr(time.time()),
            ]
            text = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
            rows.append(json.loads(text.splitlines()[-1]))
            print(json.dumps({name: round(seconds, 2) for name, seconds in rows[-1].items()}), flush=True)
    return rows


def measure(folder: Path, async_steps: bool, options: argparse.Namespace) -> dict[str, Any]:
    """A row: one engine."""
    begin = time.perf_counter()
    llm = LLM(
        folder,
        quant=options.quant,
        device=options.device,
        async_steps=async_steps,
        warm="off",
        **options.limits,
    )
    wait()
    row: dict[str, Any] = {"async_steps": async_steps, "load_seconds": time.perf_counter() - begin}
    begin = time.perf_counter()
    report = llm.engine.warm_up()
    wait()
    row |= {"warm_up_seconds": time.perf_counter() - begin, "warm_up": asdict(report)}
    begin = time.perf_counter()
    prompts, outputs = workload(options.requests, llm.config.vocab_size, *options.lengths)
    per_token(llm, prompts[0][: options.lengths[0]], 1)
    row["first_token_ms"] = (time.perf_counter() - begin) * 1e3
    print(json.dumps({name: row[name] for name in row if name != "warm_up"}), flush=True)
    row["tokens_per_second"] = [throughput(llm, prompts, outputs) for _ in range(options.rounds)]
    per_token(llm, prompts[0][:128], options.tokens // 8)
    row["ms_per_token"] = [per_token(llm, prompts[0][:128], options.tokens) for _ in range(options.rounds)]
    row["ids"] = [result.token_ids for result in llm.generate([p[:64] for p in prompts[:4]], greedy(32))]
    print(json.dumps({name: row[name] for name in ("tokens_per_second", "ms_per_token")}), flush=True)
    if options.device.startswith("cuda"):
        row["traces"] = []
        whole = len(prompts)
        traces: dict[str, Callable[[], Trace]] = {
            "decode": lambda: trace(llm, [prompts[0][:256]], options.steps),
            "decode of all": lambda: trace(llm, [p[:256] for p in prompts], options.steps),
            "decode after whole prompts": lambda: trace(llm, prompts[: whole * 5 // 8], options.steps),
            "prompts of 2,000": lambda: trace_prompts(llm, min(whole, 64), 2000),
        }
        for name, made in traces.items():
            part = {"name": name, **asdict(made())}
            row["traces"].append(part)
            print(json.dumps(part), flush=True)
    llm.close()
    return row


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lab.engine", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--quant", help="number format of the weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--async-steps", default="off,on", help="off, on, or both by commas")
    parser.add_argument("--requests", type=int, default=256, help="at most 256")
    parser.add_argument("--lengths", default="100,1024", help="shortest and longest prompt and output")
    parser.add_argument("--tokens", type=int, default=256, help="output at batch 1")
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a trace")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limits", default="{}", type=json.loads, help="JSON of further arguments of LLM")
    parser.add_argument("--starts", type=int, default=0, help="processes that only start")
    parser.add_argument(
        "--began", type=float, help=argparse.SUPPRESS
    )  # of such a process: when it was started
    parser.add_argument("--out", required=True, help="where the JSON goes")
    options = parser.parse_args(argv)
    options.lengths = tuple(int(length) for length in options.lengths.split(","))
    return options


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    if options.began is not None:
        print(json.dumps(start(Path(options.model), options)))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (
            random_model(options.model, Path(scratch)) if options.model in SHAPES else Path(options.model)
        )
        began = starts(folder, options)
        for text in options.async_steps.split(","):
            rows.append(measure(folder, text == "on", options))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            command = f"python -m lab.engine {shlex.join(argv)}"
            result = {
                "about": environment(device_target(options.device, Policy()), command),
                "starts": began,
                "same_ids": len({str(row["ids"]) for row in rows}) == 1,
                "rows": rows,
            }
            write_result(options.out, result)
    for row in rows:
        mode = "asynchronous" if row["async_steps"] else "synchronous"
        speed = statistics.median(row["tokens_per_second"])
        print(f"{mode:12} {speed:9.0f} tokens/s {min(row['ms_per_token']):7.3f} ms per token at batch 1")


if __name__ == "__main__":
    main()
