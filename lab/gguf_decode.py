"""Time per token of a GGUF file as it is loaded by default, beside the same model in bf16, with one request at a time.

    python -m lab.gguf_decode --model SmolLM2-135M-Instruct.Q4_1.gguf --check --out gguf_decode.json

The two engines take turns. A sample is the time from the first token to the last, divided by the tokens between them. ``ratio`` is the
median time as loaded over that in bf16. --check compares greedy ids in float32 with those of transformers, which reads the file itself where
the package gguf is installed (``reads: "transformers"``), and else has the values that our loader reads (``reads: "gristmill"``).
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
ENGINES: dict[str, str | None] = {"as_loaded": None, "bf16": "bf16"}
"""Name -> the `quant` of the engine."""


def load(
    model: Path,
    device: str,
    tokens: int,
    quant: str | None = None,
    dtype: str = "bf16",
    activations: str | None = None,
) -> tuple[LLM, list[str]]:
    """An engine for one request, and what was said when it was loaded; `activations` as in a policy."""
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
            num_blocks=(tokens + 256) // 4,
            max_seqs=4,
        )
    log.removeHandler(handler)
    log.setLevel(level)
    return llm, said + [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def sample(llm: LLM, prompt: list[int], tokens: int) -> float:
    """Milliseconds per token after the first one."""
    stream = llm.stream([prompt], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    times = [time.perf_counter() for chunk in stream if chunk.token_ids]
    return (times[-1] - times[0]) * 1e3 / (tokens - 1)


def time_engines(model: Path, device: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row per engine; the engines take turns."""
    loaded = {name: load(model, device, tokens, quant) for name, quant in ENGINES.items()}
    samples: dict[str, list[float]] = {name: [] for name in ENGINES}
    for llm, _ in loaded.values():
        llm.engine.warm_up()
        sample(llm, prompt_of(llm, 0), tokens)
    for turn in range(rounds):
        for name, (llm, _) in loaded.items():
            samples[name].append(sample(llm, prompt_of(llm, turn), tokens))
    return [
        {
            "engine": name,
            "ms_per_token": statistics.median(samples[name]),
            "samples": samples[name],
            "weight_bytes": llm.weight_bytes,
            "said": said,
            "kernels": [row for row in summarize(llm.explain()) if row["op"] in ("linear", "moe")],
        }
        for name, (llm, said) in loaded.items()
    ]


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
    form = open_format(fields.pop("quantization_config"))
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
    parser.add_argument("--check", action="store_true", help="compare ids in float32 with transformers'")
    parser.add_argument("--out", type=Path, help="JSON result file; the same is printed")
    options = parser.parse_args()
    rows = time_engines(options.model, options.device, options.tokens, options.rounds)
    by_engine = {row["engine"]: row["ms_per_token"] for row in rows}
    command = shlex.join(["python", "-m", "lab.gguf_decode", *sys.argv[1:]])
    where = None if options.device == "auto" else options.device
    compared = check(options.model, options.device, options.tokens) if options.check else None
    result = {"rows": rows, "ratio": by_engine["as_loaded"] / by_engine["bf16"], "check": compared}
    print(json.dumps(result, indent=1))
    if options.out is not None:
        about = environment(place(where).target, command) | {"settings": {"model": options.model.name}}
        write_result(options.out, {"schema": SCHEMA, "about": about, **result})
    return 0 if compared is None or compared["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
