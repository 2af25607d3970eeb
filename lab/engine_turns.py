"""Engines beside each other on one device: all stay alive, and take turns on the same requests.

    python -m lab.engine_turns --model llama3-8b --engines gristmill,vllm --out FILE

A name instead of a directory makes a model of that shape with random weights (`lab.engine`); --quant stores it in that number format, as
compressed-tensors or in the checkpoint format that --format names (fp8: DeepSeek's and Qwen's blocks; mxfp4: gpt-oss' experts), which every
engine then reads. Every engine has a process of its own and the same number of bytes for its
cache. A round gives each engine every workload once, in an order that changes from round to round. Prompts are random ids, anew in
each round, so that nothing but the shared prefix of ``prefix`` is found in a prefix cache; outputs are greedy and have no end tokens.
`gristmill:256:8192` is an engine with limits: sequences, and tokens per step; without them its defaults hold. `gristmill@2` has its model on two
GPUs (tensor parallelism). ``cpu_seconds`` of a row is the processor time of the engine's own process, without those of its ranks.

--trace also records, after the rounds, which kernels the steps of 1 and of 16 requests run, and for how long: vLLM's steps then run in the process
that the requests come from, also in the rounds, so that a comparison of speed is made without it.

The workloads ``mixed_penalties``, ``mixed_logprobs``, ``mixed_grammar`` and ``mixed_special`` are ``mixed``, every tenth request of which has
penalties, log-probabilities, a JSON schema, or each of them in turn: beside ``mixed`` they show what such rows cost the others. A schema needs a
tokenizer, which --tokenizer copies to a model that is made.

    python -m lab.engine_turns --model qwen3-0.6b --tokenizer examples/models/docs-llama --engines gristmill \\
        --workloads mixed,mixed_penalties,mixed_logprobs,mixed_grammar,mixed_special --out FILE

vllm must be importable in its process: --path vllm=FOLDER puts a folder in front of its PYTHONPATH. vllm-gristmill is vLLM's own model and
engine with gristmill's kernels where it chooses them (`--quantization gristmill`), vllm-gristmill-all wherever they serve.
gristmill-replicas@2 has a copy of the model on each of two GPUs (`Replicas`). With --distinct only so many layers of a model are made, and
the others are their copies: --layers in all. Several comparisons can load and compile at the same time: each makes its --ready-file when it has
loaded, and begins its rounds when its --start-file exists (`lab.sitting`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.kernel_registry.policy import Policy
from lab.engine import SHAPES, quantized, random_model, repeat_layers
from lab.engine_turns_child import SPECIAL
from lab.result import write_result

LARGEST_ID = 10_000
TRACED = (1, 16)
"""Requests of the steps that --trace records."""
CHILD = "from lab.engine_turns_child import main; main()"


class Requests(NamedTuple):
    """Prompts as token ids, and the number of tokens to generate for each. special: a key of `SPECIAL` for each request, "" = none."""

    prompts: list[list[int]]
    outputs: list[int]
    special: list[str] = []


def ids(draw: random.Random, count: int, top: int) -> list[int]:
    return [draw.randint(0, top) for _ in range(count)]


def mixed(draw: random.Random, top: int, scale: float) -> Requests:
    """256 requests with prompts and outputs of 100 to 1,024 tokens; the lengths are the same in every round."""
    lengths = random.Random(0)
    count, low, high = max(2, round(256 * scale)), max(1, round(100 * scale)), max(2, round(1024 * scale))
    sizes = [(lengths.randint(low, high), lengths.randint(low, high)) for _ in range(count)]
    return Requests([ids(draw, size, top) for size, _ in sizes], [output for _, output in sizes])


def single(draw: random.Random, top: int, scale: float) -> Requests:
    """One request of 128 tokens and 256 of output."""
    return Requests([ids(draw, max(1, round(128 * scale)), top)], [max(2, round(256 * scale))])


def equal(count: int, prompt: int, output: int) -> Callable[[random.Random, int, float], Requests]:
    """`count` requests with as many tokens of prompt and of output."""

    def requests(draw: random.Random, top: int, scale: float) -> Requests:
        scaled = max(2, round(count * scale))
        prompts = [ids(draw, max(1, round(prompt * scale)), top) for _ in range(scaled)]
        return Requests(prompts, [max(2, round(output * scale))] * scaled)

    return requests


def prefill(draw: random.Random, top: int, scale: float) -> Requests:
    """64 requests of 2,000 tokens and 50 of output."""
    count = max(2, round(64 * scale))
    prompts = [ids(draw, max(1, round(2000 * scale)), top) for _ in range(count)]
    return Requests(prompts, [max(1, round(50 * scale))] * count)


def prefix(draw: random.Random, top: int, scale: float) -> Requests:
    """128 requests that share 4,000 tokens, each with 100 of its own and 100 of output."""
    shared, count = ids(draw, max(1, round(4000 * scale)), top), max(2, round(128 * scale))
    prompts = [shared + ids(draw, max(1, round(100 * scale)), top) for _ in range(count)]
    return Requests(prompts, [max(1, round(100 * scale))] * count)


def with_special(*kinds: str) -> Callable[[random.Random, int, float], Requests]:
    """`mixed`, where every tenth request is of one of these kinds in turn."""

    def requests(draw: random.Random, top: int, scale: float) -> Requests:
        plain = mixed(draw, top, scale)
        special = ["" if i % 10 else kinds[i // 10 % len(kinds)] for i in range(len(plain.prompts))]
        return plain._replace(special=special)

    return requests


WORKLOADS: dict[str, Callable[[random.Random, int, float], Requests]] = {
    "mixed": mixed,
    "single": single,
    "few": equal(16, 128, 256),
    "many": equal(128, 128, 256),
    "crowd": equal(256, 128, 96),
    "prefill": prefill,
    "prefix": prefix,
    **{f"mixed_{kind}": with_special(kind) for kind in SPECIAL},
    "mixed_special": with_special(*SPECIAL),
}
PLAIN = ("mixed", "single", "few", "many", "crowd", "prefill", "prefix")
"""The workloads of the default, which need no tokenizer."""


class EngineProcess:
    """An engine, by name `engine[@ranks][:max_seqs:max_batch_tokens]`, in a process of its own; RuntimeError if it ends, or says nothing for
    `timeout` seconds."""

    def __init__(
        self, name: str, model: Path, options: argparse.Namespace, paths: dict[str, str], log: Path
    ) -> None:
        self.name, self.log, self.timeout = name, log, options.timeout
        engine, *limits = name.split(":")
        engine, _, ranks = engine.partition("@")
        sizes: list[int | None] = [int(limit) for limit in limits] or [None, None]
        argument = {
            "model": str(model),
            "device": options.device,
            "memory": options.memory,
            "share": options.share,
            "ranks": int(ranks or 1),
            "max_seqs": sizes[0],
            "max_batch_tokens": sizes[1],
            "max_model_len": options.max_model_len,
        }
        read, write = os.pipe()
        path = os.pathsep.join(part for part in (paths.get(engine), *sys.path) if part)
        command = [sys.executable, "-c", CHILD, engine, json.dumps(argument), str(write)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env=os.environ
                | {"PYTHONPATH": path}
                | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if options.trace else {}),
                pass_fds=[write],
            )
        os.close(write)
        self.results = os.fdopen(read, buffering=1)

    def answer(self) -> dict[str, Any]:
        """The next line of the process."""
        ready, _, _ = select.select([self.results], [], [], self.timeout)
        line = self.results.readline() if ready else ""
        if not line:
            why = "ended" if ready else f"said nothing for {self.timeout} seconds"
            self.process.kill()
            raise RuntimeError(f"{self.name} {why}; the end of its output:\n{self.log.read_text()[-3000:]}")
        row: dict[str, Any] = json.loads(line)
        return row

    def run(self, requests: Requests, *, trace: bool = False) -> dict[str, Any]:
        """Seconds and tokens of a workload; trace: what the device did in its steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(requests._asdict() | {"trace": trace}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        """End the process; after a minute it is killed."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.results.close()


def made(
    name: str,
    folder: Path,
    quant: str | None,
    form: str = "compressed-tensors",
    distinct: int | None = None,
    layers: int | None = None,
) -> Path:
    """The directory that engines load: of a model, or of a shape's layers, of which `distinct` are no copies; stored in the number format
    `quant` first, as checkpoints of `form`."""
    model = Path(name)
    if name in SHAPES:
        changes = {} if distinct is None else {"num_hidden_layers": distinct}
        model = random_model(name, folder, **changes)
    if quant:
        model = quantized(model, quant, form, folder / quant)
    if name not in SHAPES or distinct is None:
        return model
    return repeat_layers(model, distinct, layers or SHAPES[name]["num_hidden_layers"], folder / "repeated")


def wait_for(file: Path, seconds: float) -> None:
    """Return when the file exists; SystemExit if it does not after so many seconds."""
    end = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > end:
            raise SystemExit(f"{file} did not appear within {seconds:g} seconds")
        time.sleep(0.2)


def add_tokenizer(model: Path, tokenizer: Path) -> None:
    """Copy a tokenizer, whose ids the model must have, and the end token that it was used with."""
    shutil.copy(tokenizer / "tokenizer.json", model)
    form = {"tokenizer_class": "PreTrainedTokenizerFast"}
    named = tokenizer / "tokenizer_config.json"
    (model / named.name).write_text(named.read_text() if named.exists() else json.dumps(form))
    ends = json.loads((tokenizer / "config.json").read_text())["eos_token_id"]
    for name in ("config.json", "generation_config.json"):
        known = json.loads((model / name).read_text()) if (model / name).exists() else {}
        (model / name).write_text(json.dumps(known | {"eos_token_id": ends}))


def play(
    engines: list[EngineProcess],
    options: argparse.Namespace,
    top: int,
    rows: list[dict[str, Any]],
    save: Callable[[], None],
) -> None:
    """All rounds. A first one, which does not count, has short outputs; `save` is called after each row."""
    for number in range(-1, options.rounds):
        for workload in options.workloads:
            requests = WORKLOADS[workload](random.Random(f"{workload} {number}"), top, options.scale)
            if number < 0:
                requests = requests._replace(outputs=[min(8, output) for output in requests.outputs])
            for turn in range(len(engines)):
                engine = engines[(turn + number) % len(engines)]
                row = engine.run(requests)
                if row["tokens"] != sum(requests.outputs):
                    raise RuntimeError(
                        f"{engine.name} gave {row['tokens']} of {sum(requests.outputs)} tokens"
                    )
                if number >= 0:
                    rows.append({"engine": engine.name, "workload": workload, "round": number, **row})
                    save()
                    print(json.dumps({**rows[-1], "ends": len(row["ends"])}), flush=True)


def traces(engines: list[EngineProcess], top: int, scale: float) -> list[dict[str, Any]]:
    """What the device does in decode steps of each engine, in microseconds per step."""
    found = []
    for batch in TRACED:
        draw, length = random.Random(f"trace {batch}"), max(1, round(128 * scale))
        requests = Requests(
            [ids(draw, length, top) for _ in range(batch)], [max(2, round(64 * scale))] * batch
        )
        for engine in engines:
            found.append({"engine": engine.name, **engine.run(requests, trace=True)})
            print(json.dumps(found[-1]), flush=True)
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By workload and engine: the medians of tokens per second and of milliseconds per token."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        table.setdefault(row["workload"], {}).setdefault(row["engine"], {})
    for workload, engines in table.items():
        for engine in engines:
            own = [row for row in rows if (row["workload"], row["engine"]) == (workload, engine)]
            speed = statistics.median(row["tokens"] / row["seconds"] for row in own)
            engines[engine] = {"tokens_per_second": speed, "ms_per_token": 1e3 / speed}
    return table


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m lab.engine_turns", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--quant", help="number format in which the model is stored first")
    parser.add_argument("--format", default="compressed-tensors", help="checkpoint format of --quant")
    parser.add_argument("--tokenizer", type=Path, help="directory whose tokenizer a model that is made gets")
    parser.add_argument("--distinct", type=int, help="layers of a model that is made that are no copies")
    parser.add_argument("--layers", type=int, help="layers, with --distinct. Default: those of the shape")
    parser.add_argument(
        "--engines", default="gristmill,vllm", help="engine[@ranks][:max_seqs:max_batch_tokens],..."
    )
    parser.add_argument("--workloads", default=",".join(PLAIN))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts and lengths, for a trial")
    parser.add_argument("--memory", type=int, default=40 * 10**9, help="bytes of each engine's cache")
    parser.add_argument(
        "--share", type=float, default=0.2, help="of the device that must be free for vLLM to start"
    )
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--path", action="append", default=[], help="engine=FOLDER for its PYTHONPATH")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a start or a workload")
    parser.add_argument("--ready-file", type=Path, help="make this file when the engines have loaded")
    parser.add_argument("--start-file", type=Path, help="begin the rounds when this file exists")
    parser.add_argument("--trace", action="store_true", help="also record the kernels of decode steps")
    parser.add_argument("--logs", type=Path, help="folder for the output of the engines")
    parser.add_argument("--out", required=True, help="where the JSON goes")
    options = parser.parse_args(argv)
    options.workloads = options.workloads.split(",")
    return options


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    options = arguments(argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = made(options.model, folder, options.quant, options.format, options.distinct, options.layers)
        gc.collect()
        torch.cuda.empty_cache()  # the memory in which it was made is the engines'
        if options.tokenizer is not None:
            if options.model not in SHAPES:
                raise SystemExit(
                    f"--tokenizer is for models that are made, and {options.model} is a directory"
                )
            add_tokenizer(model, options.tokenizer)
        top = min(LARGEST_ID, json.loads((model / "config.json").read_text())["vocab_size"] - 1)
        paths = dict(text.split("=", 1) for text in options.path)
        logs = options.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        engines: list[EngineProcess] = []
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            for index, name in enumerate(options.engines.split(",")):
                engines.append(EngineProcess(name, model, options, paths, logs / f"engine{index}.log"))
            starts = [{"engine": engine.name, **engine.answer()} for engine in engines]
            print(json.dumps(starts), flush=True)
            if options.ready_file is not None:
                options.ready_file.touch()
            if options.start_file is not None:
                wait_for(options.start_file, options.timeout)
            command = f"python -m lab.engine_turns {shlex.join(argv)}"
            about = environment(device_target(options.device, Policy()), command)

            steps: list[dict[str, Any]] = []

            def save() -> None:
                result = {"about": about, "started": started, "starts": starts, "summary": summary(rows)}
                write_result(options.out, result | ({"traces": steps} if steps else {}) | {"rows": rows})

            play(engines, options, top, rows, save)
            if options.trace:
                steps += traces(engines, top, options.scale)
                save()
        finally:
            for engine in engines:
                engine.close()
    for workload, by_engine in summary(rows).items():
        for name, row in by_engine.items():
            print(
                f"{workload:15} {name:20} {row['tokens_per_second']:9.0f} tokens/s {row['ms_per_token']:8.3f} ms per token"
            )


if __name__ == "__main__":
    main()
