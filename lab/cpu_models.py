"""Whole models on a CPU: prefill and decode from a GGUF file, beside llama.cpp, in turn.

    python -m lab.cpu_models --model FILE --threads 2 --llama DIR --out FILE

DIR has llama.cpp's `llama-bench` and `llama-batched-bench`; without --llama only this library is measured. Cases: ``pp512`` and
``pp2048``, a prompt of so many tokens, in tokens per second; ``tg1`` and ``tg8``, decode steps of 1 and 8 sequences after short prompts,
in tokens per second of all sequences. Every round times each case once with every engine, llama.cpp's in a process that it starts for
it. The read bandwidth, a float32 sum over 256 MiB by the same number of threads, is timed in every round.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gristmill import LLM, Policy, SamplingParams
from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment

CASES = ("pp512", "pp2048", "tg1", "tg8")
STEPS = 32
PROMPT = 16
READ_FLOATS = 64 << 20


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def ours(llm: LLM, case: str) -> float:
    """Tokens per second. A decode is the difference of two runs, so that prompts and the first step do not count."""
    count = int(case[2:])
    if case.startswith("pp"):
        prompt = [[(17 * i + time.time_ns()) % 10_000 for i in range(count)]]
        begin = time.perf_counter()
        llm.generate(prompt, greedy(1))
        return count / (time.perf_counter() - begin)
    seconds = []
    for tokens in (2, STEPS + 2):
        prompts = [[(17 * i + n + time.time_ns()) % 10_000 for i in range(PROMPT)] for n in range(count)]
        begin = time.perf_counter()
        llm.generate(prompts, greedy(tokens))
        seconds.append(time.perf_counter() - begin)
    return count * STEPS / (seconds[1] - seconds[0])


def llama(folder: Path, model: Path, case: str, threads: int) -> float:
    """The same of llama.cpp, by its own programs."""
    count = int(case[2:])
    if case.startswith("pp") or count == 1:
        what = ["-p", str(count), "-n", "0"] if case.startswith("pp") else ["-p", "0", "-n", str(STEPS)]
        command = [str(folder / "llama-bench"), "-m", str(model), "-t", str(threads), "-r", "1", "-o", "json"]
        text = subprocess.run([*command, *what], capture_output=True, text=True, check=True).stdout
        return float(json.loads(text)[0]["avg_ts"])
    command = [str(folder / "llama-batched-bench"), "-m", str(model), "-t", str(threads), "-c", "2048"]
    command += ["-npp", str(PROMPT), "-ntg", str(STEPS), "-npl", str(count), "--output-format", "jsonl"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return float(rows[-1]["speed_tg"])


def read_bandwidth(buffer: torch.Tensor) -> float:
    """Bytes per second of a float32 sum."""
    begin = time.perf_counter()
    buffer.sum()
    return buffer.nbytes / (time.perf_counter() - begin)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lab.cpu_models", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quant")
    parser.add_argument("--quant-head")
    parser.add_argument("--activations", choices=("int8",), help="the policy's activations")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--out", required=True, help="where the JSON goes")
    options = parser.parse_args(argv)
    options.cases = options.cases.split(",")
    return options


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    policy = Policy(activations=options.activations)
    llm = LLM(options.model, policy=policy, quant=options.quant, quant_head=options.quant_head, max_seqs=8)
    llm.engine.warm_up()
    buffer = torch.zeros(READ_FLOATS)
    rows: list[dict[str, Any]] = []
    for number in range(-1, options.rounds):
        read = read_bandwidth(buffer)
        for case in options.cases:
            row = {"case": case, "round": number, "read_gbs": read / 1e9, "gristmill": ours(llm, case)}
            if options.llama and number >= 0:
                row["llama.cpp"] = llama(options.llama, options.model, case, options.threads)
            if number >= 0:  # the first round does not count
                rows.append(row)
                print(json.dumps(row), flush=True)
    summary = {}
    for case in options.cases:
        own = [row for row in rows if row["case"] == case]
        summary[case] = {
            name: statistics.median(row[name] for row in own)
            for name in ("gristmill", "llama.cpp", "read_gbs")
            if name in own[0]
        }
    about = environment(device_target("cpu", policy), f"python -m lab.cpu_models {shlex.join(argv)}")
    result = {"about": about, "weight_bytes": llm.weight_bytes, "summary": summary, "rows": rows}
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    for case, row in summary.items():
        print(case, {name: round(value, 2) for name, value in row.items()})


if __name__ == "__main__":
    main()
