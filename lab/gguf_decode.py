"""Time of a decode step of a GGUF file as it is loaded by default, beside the same model in bf16.

    python -m lab.gguf_decode --model SmolLM2-135M-Instruct.Q4_1.gguf --check --out gguf_decode.json
    python -m lab.gguf_decode --model Q4_K.gguf --plain BF16.gguf --beside int4_g32 --batch 1,16 --out gguf_decode.json

The engines take turns. A sample is the time from the first token to the last, divided by the steps between them. --plain is a file of the
same shape without quantization, whose weights go into the formats of --beside as it is loaded. ``ratio`` is the median time as loaded over
that of each other engine, by the number of requests. --check compares greedy ids in float32 with those of transformers, which reads the
file itself where the package gguf is installed (``reads: "transformers"``), and else has the values that our loader reads (``reads: "gristmill"``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shlex
import statistics
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gristmill import LLM, SamplingParams
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.bench.result_file import SCHEMA
from gristmill.kernel_registry.policy import Policy
from gristmill.quant.checkpoints.gguf import GgufCheckpoint
from gristmill.quant.formats import open_format
from gristmill.runtime.explain import summarize
from gristmill.runtime.loader.config import gguf_architectures
from lab.result import write_result

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "Once upon a time there was",
)


def load(
    model: Path,
    device: str,
    tokens: int,
    quant: str | None = None,
    dtype: str = "bf16",
    activations: str | None = None,
    batch: int = 1,
) -> tuple[LLM, list[str]]:
    """An engine for `batch` requests, and what was said when it was loaded; `activations` as in a policy."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log, level = logging.getLogger("gristmill"), logging.getLogger("gristmill").level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        policy = dataclasses.replace(Policy.current(), activations=activations)
        llm = LLM(
            model,
            dtype=dtype,
            quant=quant,
            device=device,
            policy=policy,
            num_blocks=(tokens + 256) // 16 * max(4, batch),
            max_seqs=max(4, batch),
        )
    log.removeHandler(handler)
    log.setLevel(level)
    return llm, said + [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def sample(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    """Milliseconds of a step after the first token of each."""
    stream = llm.stream(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    times = [time.perf_counter() for chunk in stream if chunk.token_ids]
    return (times[-1] - times[len(prompts) - 1]) * 1e3 / (tokens - 1)


def time_engines(
    files: dict[str, tuple[Path, str | None]], device: str, tokens: int, rounds: int, batches: list[int]
) -> list[dict[str, Any]]:
    """A row per engine and number of requests; the engines take turns. files: of each engine, and its `quant`."""
    loaded = {
        name: load(file, device, tokens, quant, batch=max(batches)) for name, (file, quant) in files.items()
    }
    for llm, _ in loaded.values():
        llm.engine.warm_up()
    rows = []
    for batch in batches:
        samples: dict[str, list[float]] = {name: [] for name in files}
        for turn in range(-1, rounds):
            for name, (llm, _) in loaded.items():
                taken = sample(llm, [prompt_of(llm, turn + i) for i in range(batch)], tokens)
                if turn >= 0:
                    samples[name].append(taken)
        rows += [
            {
                "engine": name,
                "batch": batch,
                "ms_per_step": statistics.median(samples[name]),
                "samples": samples[name],
                "weight_bytes": llm.weight_bytes,
                "said": said,
                "kernels": sorted(
                    {row["kernel"] for row in summarize(llm.explain()) if row["op"] in ("linear", "moe")}
                ),
            }
            for name, (llm, said) in loaded.items()
        ]
    return rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By the number of requests and the engine: the time as loaded over that of the engine."""
    times = {(row["batch"], row["engine"]): row["ms_per_step"] for row in rows}
    found: dict[str, dict[str, float]] = {}
    for (batch, engine), taken in times.items():
        if engine != "as_loaded":
            found.setdefault(str(batch), {})[engine] = times[batch, "as_loaded"] / taken
    return found


def prompt_of(llm: LLM, turn: int) -> list[int]:
    """The ids of a prompt."""
    return llm.tokenizer.encode(PROMPTS[turn % len(PROMPTS)])


def oracle(path: Path) -> tuple[Any, str]:
    """transformers' model of a file in float32, and who read the file."""
    import transformers

    if find_spec("gguf") is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
        return model.eval(), "transformers"
    checkpoint = GgufCheckpoint(path, gguf_architectures())
    fields = {**checkpoint.config()[0]}
    form = open_format(fields.pop("quantization_config", {"quant_method": "gguf"}))
    kind = getattr(transformers, fields.pop("architectures")[0])
    fields.pop("dtype")
    model = kind(kind.config_class(**fields))
    values = {}
    for name in checkpoint:
        stored = form.read(checkpoint, name.removesuffix(".weight"), checkpoint.shape(name))
        values[name] = checkpoint.read(name).float() if stored is None else stored.weight.dequantize()
    missing, unexpected = model.load_state_dict(values, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(
            f"{path}: transformers' {kind.__name__} lacks {unexpected} and is left with {missing}"
        )
    model.tie_weights()
    return model.float().eval(), "gristmill"


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The most likely ids one after the other, and by how much each is ahead of the second."""
    ids, gaps, cache = [*prompt], [], None
    step = torch.tensor([ids], device=model.device)
    for _ in range(tokens):
        out = model(step, past_key_values=cache, use_cache=True)
        cache, (first, second) = out.past_key_values, out.logits[0, -1].float().topk(2).values.tolist()
        ids.append(int(out.logits[0, -1].argmax()))
        gaps.append(first - second)
        step = torch.tensor([ids[-1:]], device=model.device)
    return ids[len(prompt) :], gaps


def check(path: Path, device: str, tokens: int) -> dict[str, Any]:
    """Greedy ids of every prompt in float32, weights as they are loaded by default, beside transformers'."""
    llm, said = load(path, device, tokens, dtype="fp32", activations="float")
    reference, reads = oracle(path)
    reference = reference.to(llm.engine.runner.device)
    differing = []
    for turn, text in enumerate(PROMPTS):
        prompt = prompt_of(llm, turn)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        ours = [*llm.generate([prompt], params)[0].token_ids]
        theirs, gaps = greedy(reference, prompt, tokens)
        if ours != theirs:
            at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
            differing.append({"prompt": text, "token": at, "gap": gaps[at]})
    return {
        "reads": reads,
        "prompts": len(PROMPTS),
        "tokens": tokens,
        "equal": not differing,
        "first_differences": differing,
        "said": said,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plain", type=Path, help="GGUF file without quantization")
    parser.add_argument("--beside", default="", help="formats of the weights of --plain, by commas")
    parser.add_argument("--batch", default="1", help="requests at a time, by commas")
    parser.add_argument("--check", action="store_true", help="compare ids in float32 with transformers'")
    parser.add_argument("--out", type=Path, help="JSON result file; the same is printed")
    options = parser.parse_args()
    files: dict[str, tuple[Path, str | None]] = {
        "as_loaded": (options.model, None),
        "bf16": (options.model, "bf16"),
    }
    if options.beside:
        if options.plain is None:
            parser.error("--beside puts the weights of --plain into other formats: give --plain FILE")
        files |= {scheme: (options.plain, scheme) for scheme in options.beside.split(",")}
    batches = [int(text) for text in options.batch.split(",")]
    rows = time_engines(files, options.device, options.tokens, options.rounds, batches)
    command = shlex.join(["python", "-m", "lab.gguf_decode", *sys.argv[1:]])
    where = None if options.device == "auto" else options.device
    compared = check(options.model, options.device, options.tokens) if options.check else None
    result = {"rows": rows, "ratio": ratios(rows), "check": compared}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        about = environment(place(where).target, command) | {"settings": {"model": options.model.name}}
        write_result(options.out, {"schema": SCHEMA, "about": about, **result})
    return 0 if compared is None or compared["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
