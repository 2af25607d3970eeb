"""The cost of quantization: perplexity of models in every scheme by every method.

    python -m lab.quality --models examples/models/docs-llama --tokens examples/models/eval_tokens.u16 --out quality.json
    python -m lab.quality --table quality.json

Each row has the `command` that reproduces it: `gristmill quantize` writes a directory, `gristmill eval` reads it. Weights are
dequantized and multiplied in float32, so that rows differ only by their weights. Rows of a quantized KV cache have the weights as
stored, and a field ``kv``. The file is written after every row, and rows in it are not measured again: an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from gristmill.autotune.place import place
from gristmill.bench.result_file import SCHEMA, replace
from gristmill.bench.result_text import text
from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES, QuantScheme, cdiv
from lab.quality_table import render

METHODS = ("rtn", "gptq", "awq")
SCHEMES = tuple(name for name in ALL_WEIGHT_SCHEMES if not QuantScheme.parse(name).is_dense)
FLOAT = "float"
"""The scheme name of rows with the model as stored."""
AUTO = "auto"
KV_DTYPES = ("fp8", "fp8_token_head")


@dataclass(frozen=True)
class Settings:
    """The settings of all rows. The file `tokens` is for evaluation, from its first token, and for calibration, from token `first`."""

    tokens: str
    window: int = 1024
    windows: int = 96
    first: int = 200_000
    calibration_window: int = 512
    calibration_windows: int = 64
    device: str = "cpu"


class Case(NamedTuple):
    """A row: model directory, scheme or FLOAT, method, kv_dtype."""

    model: str
    scheme: str
    method: str
    kv: str = AUTO

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells rows apart."""
        return (Path(self.model).name, *self[1:])


def key_of(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """That of a row."""
    return (row["model"], row["scheme"], row["method"], row.get("kv", AUTO))


def kv_cases(models: Sequence[str], kv_dtypes: Sequence[str]) -> list[Case]:
    """The rows of quantized KV caches, for models that support them."""
    from gristmill.runtime.loader.config import load_config

    supported = [model for model in models if load_config(model).mla is None]
    return [Case(model, FLOAT, "rtn", kv) for kv in kv_dtypes for model in supported]


def cases(models: Sequence[str], schemes: Sequence[str], methods: Sequence[str]) -> list[Case]:
    """All rows; those of the models as stored come first."""
    return [Case(model, FLOAT, "rtn") for model in models] + [
        Case(m, s, how) for s in schemes for m in models for how in methods
    ]


def command(case: Case, settings: Settings, out: str = "OUT") -> str:
    """The shell command that measures a row."""
    model, scheme, method, kv = case
    evaluate = [
        "gristmill",
        "eval",
        "--model",
        model if scheme == FLOAT else out,
        "--quant",
        "fp32",
        "--dtype",
        "fp32",
    ]
    evaluate += [
        "--tokens",
        settings.tokens,
        "--window",
        str(settings.window),
        "--windows",
        str(settings.windows),
    ]
    evaluate += ["--device", settings.device, *(["--kv-dtype", kv] if kv != AUTO else [])]
    if scheme == FLOAT:
        return shlex.join(evaluate)
    quantize = [
        "gristmill",
        "quantize",
        "--model",
        model,
        "--quant",
        scheme,
        "--out",
        out,
        "--method",
        method,
    ]
    if method != "rtn":
        quantize += [
            "--calibration",
            settings.tokens,
            "--first",
            str(settings.first),
            "--window",
            str(settings.calibration_window),
        ]
        quantize += ["--windows", str(settings.calibration_windows), "--device", settings.device]
    return f"{shlex.join(quantize)} && {shlex.join(evaluate)}"


def measure(case: Case, settings: Settings) -> dict[str, Any]:
    """A row: {"model", "scheme", "method", "loss", "perplexity", "tokens", "seconds", "notes", "command", "window_losses"}; of a
    quantized KV cache also {"kv", "kv_bits"}, bits per element including scales."""
    import torch

    from gristmill.quant.writing.checkpoint import write_quantized
    from gristmill.runtime.kv_cache.paged import PagedCache
    from gristmill.runtime.llm import LLM
    from gristmill.runtime.loader.config import load_config
    from gristmill.runtime.models import model_table
    from gristmill.tools.calibration import make_method
    from gristmill.tools.evaluate import evaluate, read_tokens

    if settings.device != "cpu":
        torch.set_num_threads(1)  # the processes share the cores
    begin = time.perf_counter()
    model, scheme, method, kv = case
    tokens = read_tokens(settings.tokens)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(model)
        if scheme != FLOAT:
            directory = Path(folder) / "out"
            chosen = make_method(
                method,
                model,
                None if method == "rtn" else tokens[settings.first :],
                window=settings.calibration_window,
                windows=settings.calibration_windows,
                device=settings.device,
            )
            table, parsed = model_table(load_config(model)), QuantScheme.parse(scheme)
            notes = write_quantized(Path(model), directory, table, parsed, method=chosen)["notes"]
        llm = LLM(
            directory,
            warm="off",
            dtype="fp32",
            quant="fp32",
            kv_dtype=kv,
            device=settings.device,
            max_batch_tokens=max(2048, settings.window),
            num_blocks=4 * cdiv(settings.window, 16),
        )
        evaluation = evaluate(llm.engine, tokens, settings.window, settings.windows)
    cache = llm.engine.runner.cache
    quantized = {}
    if kv != AUTO and isinstance(cache, PagedCache):
        quantized = {"kv": kv, "kv_bits": 8 * cache.nbytes / cache.storage.numel()}
    return {
        "model": Path(model).name,
        "scheme": scheme,
        "method": method,
        **quantized,
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "tokens": evaluation.tokens,
        "seconds": round(time.perf_counter() - begin, 1),
        "notes": notes,
        "command": command(case, settings),
        "window_losses": [round(loss, 6) for loss in evaluation.window_losses],
    }


def sweep(todo: Sequence[Case], settings: Settings, jobs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield rows as they complete, by `jobs` processes; none starts after `seconds`."""
    end, queue, running = time.monotonic() + seconds, list(todo), set[Future[dict[str, Any]]]()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while queue or running:
            while queue and len(running) < jobs and time.monotonic() < end:
                running.add(pool.submit(measure, queue.pop(0), settings))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()


def run(
    models: Sequence[str],
    schemes: Sequence[str],
    methods: Sequence[str],
    settings: Settings,
    out: Path,
    jobs: int,
    seconds: float,
    kv_dtypes: Sequence[str] = (),
) -> int:
    """Measure the rows that `out` lacks; returns the number of rows that are still missing."""
    from gristmill.autotune.environment import environment

    all_cases = cases(models, schemes, methods) + kv_cases(models, kv_dtypes)
    fixed = {
        name: value for name, value in asdict(settings).items() if name != "device"
    }  # part of every row's command
    data: dict[str, Any] = {"schema": SCHEMA, "settings": fixed, "runs": [], "rows": []}
    if out.exists():
        data = json.loads(out.read_text(encoding="utf-8"))
        if data["settings"] != fixed:
            raise SystemExit(f"{out} holds rows of other settings: {data['settings']}; name another file")
    have = {key_of(row) for row in data["rows"]}
    todo = [case for case in all_cases if case.key not in have]
    ordered = cases(models, SCHEMES, METHODS) + kv_cases(models, kv_dtypes)
    order = {case.key: place for place, case in enumerate(ordered)}
    arguments = ["python", "-m", "lab.quality", *sys.argv[1:]]
    data["runs"].append(
        environment(place(None if settings.device != "cpu" else "cpu").target, shlex.join(arguments))
    )
    for row in sweep(todo, settings, jobs, seconds):
        data["rows"].append(row | {"run": len(data["runs"]) - 1})
        data["rows"].sort(key=lambda r: order.get(key_of(r), len(order)))
        replace(out, text(data, digits=None))
        print(
            f"{' '.join(key_of(row)):40} {row['loss']:.4f}  {row['seconds']} s",
            flush=True,
        )
    measured = {key_of(row) for row in data["rows"]}
    return sum(case.key not in measured for case in all_cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[], help="model directories, unquantized")
    parser.add_argument("--tokens", help="token ids, little-endian uint16")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated; default: all")
    parser.add_argument("--methods", default=",".join(METHODS), help="by commas")
    parser.add_argument(
        "--kv-dtypes",
        default=",".join(KV_DTYPES),
        help="dtypes of quantized KV caches, comma-separated; '' for none",
    )
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--first", type=int, default=200_000, help="first token of calibration")
    parser.add_argument("--calibration-windows", type=int, default=64, help="of 512 tokens")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after that")
    parser.add_argument("--out", type=Path, help="JSON result file; its rows are not measured again")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print the table of this result file")
    options = parser.parse_args()
    if options.table is not None:
        print(render(json.loads(options.table.read_text(encoding="utf-8"))))
        return 0
    if not options.models or options.tokens is None or options.out is None:
        parser.error("--models, --tokens and --out are needed, or --table")
    settings = Settings(
        options.tokens,
        options.window,
        options.windows,
        options.first,
        512,
        options.calibration_windows,
        options.device,
    )
    missing = run(
        options.models,
        options.schemes.split(","),
        options.methods.split(","),
        settings,
        options.out,
        options.jobs,
        options.seconds,
        list(filter(None, options.kv_dtypes.split(","))),
    )
    print(f"{missing} rows missing" if missing else "all rows measured")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
