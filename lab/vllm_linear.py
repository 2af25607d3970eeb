"""vLLM's own model with vLLM's kernels and with ours, from one directory: decode time at several batches, and throughput.

    PYTHONPATH=<folder with vLLM> python -m lab.vllm_linear --model llama3-8b --layers 8 --scheme int4_g128 --out vllm.json

A name instead of a directory makes a model of that shape with random weights and quantizes it to --scheme in --form, with --layers layers:
the time of a decode step then lies lower than that of the whole model, and the logits head weighs more. With --distinct only so many
layers are made, and the others are their copies, which takes less time. Every engine is a process of its own, from which vLLM starts its
own ones, as it does by default; they run in turns, so that a drift of the device's clocks meets all of them. The time per token is the
difference of two runs that differ in their number of output tokens only; prompts and the start of a run cancel.

Engines: vllm (its own choice), gristmill (--quantization gristmill), gristmill-all (every layer that a kernel serves, without times),
attention (--attention-backend CUSTOM), worker (--worker-cls).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.kernel_registry.policy import Policy
from lab.engine import SHAPES, quantized, random_model, repeat_layers, workload
from lab.result import write_result

BASELINE = "vllm"
EXPLAIN = "gristmill.integrations.vllm.Explain"
ENGINES: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "gristmill": {"quantization": "gristmill", "worker_extension_cls": EXPLAIN},
    "gristmill-all": {
        "quantization": "gristmill",
        "worker_extension_cls": EXPLAIN,
        "additional_config": {"gristmill": {"take": "all"}},
    },
    "attention": {"attention_backend": "CUSTOM"},
    "worker": {"worker_cls": "gristmill.integrations.vllm.Worker"},
}
"""Arguments of vLLM's LLM."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",  # a process with what `register` has registered
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def directory(options: argparse.Namespace, scratch: Path) -> Path:
    """The model that all engines load."""
    if options.model not in SHAPES:
        return Path(options.model)
    made = options.distinct or options.layers
    changes = {} if made is None else {"num_hidden_layers": made}
    folder = random_model(options.model, scratch, **changes)
    if options.scheme is not None:
        folder = quantized(folder, options.scheme, options.form, scratch / "quantized")
    if options.distinct is None:
        return folder
    count = options.layers or SHAPES[options.model]["num_hidden_layers"]
    return repeat_layers(folder, options.distinct, count, scratch / "repeated")


def load(folder: str, options: argparse.Namespace) -> Any:
    """vLLM's engine in this process."""
    from vllm import LLM

    from gristmill.integrations.vllm import register

    register()  # a checkout has no entry point
    return LLM(folder, skip_tokenizer_init=True, **(options.limits | ENGINES[options.engine]))


def run(llm: Any, prompts: list[list[int]], outputs: list[int]) -> float:
    """Seconds of one batch of requests."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in outputs
    ]
    begin = time.perf_counter()
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    counts = [len(result.outputs[0].token_ids) for result in results]
    if counts != outputs:
        raise RuntimeError(f"expected {outputs[:4]}... tokens of output, got {counts[:4]}...")
    return seconds


def layers(llm: Any, engine: str) -> list[dict[str, Any]]:
    """What runs on gristmill, per layer."""
    if "quantization" not in ENGINES[engine]:
        return []
    return alike(llm.collective_rpc("gristmill_explain")[0])


def alike(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that differ in their name alone as one, with the name of the first and how many there are (`count`)."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        kind = json.dumps({name: value for name, value in row.items() if name != "name"}, sort_keys=True)
        found.setdefault(kind, row | {"count": 0})["count"] += 1
    return [*found.values()]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The row of one engine, in its own process."""
    begin = time.perf_counter()
    llm = load(options.model, options)
    row: dict[str, Any] = {"engine": options.engine, "start_seconds": time.perf_counter() - begin}
    row["decode_ms"] = {}
    short = max(1, options.tokens // 8)
    prompts, outputs = workload(256, options.vocabulary, *options.lengths)
    for batch in options.batches:
        group = [ids[: options.lengths[0]] for ids in prompts[:batch]]
        run(llm, group, [short] * batch)
        samples = []
        for _ in range(options.rounds):
            few, many = (run(llm, group, [count] * batch) for count in (short, options.tokens))
            samples.append((many - few) / (options.tokens - short) * 1e3)
        row["decode_ms"][str(batch)] = samples
    prompts, outputs = prompts[: options.requests], outputs[: options.requests]
    row["tokens_per_second"] = [sum(outputs) / run(llm, prompts, outputs) for _ in range(options.rounds)]
    row["layers"] = layers(llm, options.engine)
    row["seconds"] = time.perf_counter() - begin
    return row


def child(engine: str, folder: Path, out: Path, argv: list[str]) -> dict[str, Any]:
    """`measure` in a new process."""
    command = [sys.executable, "-m", "lab.vllm_linear", *argv]
    command += ["--engine", engine, "--model", str(folder), "--out", str(out)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True)
    row: dict[str, Any] = json.loads(out.read_text())
    return row


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Per engine and figure, how many times as fast as BASELINE it is: of the medians over all turns."""

    def figures(engine: str) -> dict[str, float]:
        of_engine = [row for row in rows if row["engine"] == engine]
        found = {
            f"decode at batch {batch}": 1
            / statistics.median([sample for row in of_engine for sample in row["decode_ms"][batch]])
            for batch in of_engine[0]["decode_ms"]
        }
        speeds = [speed for row in of_engine for speed in row["tokens_per_second"]]
        return found | {"throughput": statistics.median(speeds)}

    names = dict.fromkeys(row["engine"] for row in rows)
    if BASELINE not in names:
        return {}
    base = figures(BASELINE)
    return {
        name: {figure: speed / base[figure] for figure, speed in figures(name).items()}
        for name in names
        if name != BASELINE
    }


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lab.vllm_linear", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, help="of a model that is made; None: as many as it has")
    parser.add_argument("--distinct", type=int, help="layers of such a model that are no copies")
    parser.add_argument("--scheme", help="number format of a model that is made; None: bfloat16")
    parser.add_argument("--form", default="compressed-tensors", help="checkpoint format of such a model")
    parser.add_argument(
        "--engines", default="vllm,gristmill", help=f"by commas, of {', '.join(ENGINES)}; each a process"
    )
    parser.add_argument("--turns", type=int, default=2, help="how often every engine starts")
    parser.add_argument("--rounds", type=int, default=3, help="samples per engine and figure")
    parser.add_argument("--batches", default="1,16,128")
    parser.add_argument("--tokens", type=int, default=128, help="of output, for the time per token")
    parser.add_argument("--requests", type=int, default=256, help="of the throughput; at most 256")
    parser.add_argument("--lengths", default="100,1024", help="shortest and longest prompt and output")
    parser.add_argument("--vocabulary", type=int, default=10000, help="ids of prompts are below it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further engine starts")
    parser.add_argument(
        "--limits", default="{}", type=json.loads, help="JSON of further arguments of vLLM's LLM"
    )
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    options = parser.parse_args(argv)
    options.lengths = tuple(int(length) for length in options.lengths.split(","))
    options.batches = tuple(int(batch) for batch in options.batches.split(","))
    options.engines = options.engines.split(",")
    if unknown := sorted(set(options.engines) - set(ENGINES)):
        parser.error(f"no engine {', '.join(unknown)}; known: {', '.join(ENGINES)}")
    return options


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    if options.engine is not None:
        options.out.write_text(json.dumps(measure(options)))
        return 0
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = directory(options, Path(scratch))
        for turn in range(options.turns):
            for engine in options.engines if turn % 2 == 0 else reversed(options.engines):
                if time.monotonic() - begin > options.seconds:
                    continue
                rows.append({"turn": turn, **child(engine, folder, Path(scratch) / "row.json", argv)})
                result = {
                    "about": environment(
                        device_target(options.device, Policy()),
                        f"python -m lab.vllm_linear {shlex.join(argv)}",
                    ),
                    "config": json.loads((folder / "config.json").read_text()),
                    "ratios": ratios(rows),
                    "rows": rows,
                }
                write_result(options.out, result)
                decode = {batch: round(min(ms), 3) for batch, ms in rows[-1]["decode_ms"].items()}
                speed = statistics.median(rows[-1]["tokens_per_second"])
                print(f"{engine:14} ms per token by batch {decode}, {speed:.0f} tokens/s", flush=True)
    for engine, figures in ratios(rows).items():
        print(
            engine, {name: round(ratio, 3) for name, ratio in figures.items()}, f"times as fast as {BASELINE}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
