"""Whole models on a CPU: prefill and decode from GGUF files, beside llama.cpp, in turn.

    python -m lab.cpu_models --kinds Q4_0,Q8_0,Q4_K --llama DIR --out FILE

The models have the shape of Qwen3-0.6B and random weights (`lab.gguf_model`); DIR has llama.cpp's `llama-bench`, without --llama only
this library is measured. Figures are tokens per second of processor time of one thread, so that other programs on the machine delay
the run and change it little. ``tg1`` and ``tg8``: decode steps of 1 and 8 sequences; ``pp512``: a prompt of 512 tokens. A decode is the
difference of a long and a short run, so that start, prompt and first step do not count. Every round takes each engine once; the
least of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gristmill import LLM, Policy, SamplingParams
from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from lab import gguf_model
from lab.result import write_result

SHORT, LONG = 2, 26
LAYERS = 28


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def processor_time(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def ours(llm: LLM, prompt: int, number: int) -> dict[str, float]:
    """Tokens per second of processor time, by case."""
    row = {}
    for sequences in (1, 8):
        prompts = [[1, 2, 3 + i, 4 + number] for i in range(sequences)]
        spent = [
            processor_time(lambda p=prompts, n=tokens: llm.generate(p, greedy(n)))  # type: ignore[misc]
            for tokens in (SHORT, LONG)
        ]
        row[f"tg{sequences}"] = sequences * (LONG - SHORT) / (spent[1] - spent[0])
    ids = [[(i * (2 * number + 7)) % 1000 for i in range(prompt)]]  # another prompt in each round
    row[f"pp{prompt}"] = prompt / processor_time(lambda: llm.generate(ids, greedy(1)))
    return row


def llama(program: Path, model: Path, prompt: int) -> dict[str, float]:
    """The same of llama.cpp, less what it takes to start and to read the model."""

    def run(prompt_tokens: int, tokens: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [str(program), "-m", str(model), "-t", "1", "-r", "1", "--no-warmup"]
        command += ["-p", str(prompt_tokens), "-n", str(tokens)]
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    decode, prefill = run(0, LONG) - run(0, SHORT), run(prompt, 0) - run(1, 0)
    return {"tg1": (LONG - SHORT) / decode, f"pp{prompt}": (prompt - 1) / prefill}


def measure(kind: str, layers: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row: the best figure of every case by engine, and all samples."""
    file = folder / f"{kind}.gguf"
    gguf_model.write_model(file, kind, layers, None, gguf_model.VOCABULARY, gguf_model.MERGES)
    llm = LLM(file, policy=Policy(activations=options.activations), max_seqs=8)
    samples: dict[str, list[dict[str, float]]] = {"gristmill": [], "llama.cpp": []}
    for number in range(-1, options.rounds):  # the first does not count
        mine = ours(llm, options.prompt, number)
        if number < 0:
            continue
        samples["gristmill"].append(mine)
        if options.llama is not None:
            samples["llama.cpp"].append(llama(options.llama / "llama-bench", file, options.prompt))
    best = {
        engine: {case: max(sample[case] for sample in rows) for case in rows[0]}
        for engine, rows in samples.items()
        if rows
    }
    row = {"kind": kind, "file_bytes": file.stat().st_size, "weight_bytes": llm.weight_bytes, "best": best}
    file.unlink()
    print(json.dumps(row), flush=True)
    return row | {"samples": samples}


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lab.cpu_models", description=str(__doc__).split("\n")[0])
    parser.add_argument("--kinds", default="Q4_0,Q8_0,Q4_K", help="ggml's types")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--activations", choices=("int8", "float"), help="the policy's activations")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--out", required=True, help="where the JSON goes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(kind, options.layers, options, Path(folder)) for kind in options.kinds.split(",")]
    about = environment(device_target("cpu", Policy()), f"python -m lab.cpu_models {shlex.join(argv)}")
    write_result(options.out, {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
