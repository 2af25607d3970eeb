"""`make run`: two small models answer on this machine, then what each number format costs, which kernels ran, and what a chat model says.

python examples/run.py [--windows 16] [--schemes bf16,int4_g128,...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from rich.text import Text

from gristmill import LLM, SamplingParams, console, evaluate, read_tokens
from gristmill.runtime import summarize
from gristmill.tools.chat import DEFAULT, Answer, ModelUnavailableError, Session, default_model

MODELS = Path(__file__).parent / "models"
NAMES = ("docs-llama", "docs-deepseek")
SCHEMES = "bf16,int4_g128,fp8_block,mxfp4,nvfp4"
PROMPT = "The function returns"
QUESTION = "What is the Python programming language used for?"
WINDOW = 1024


def answer(name: str) -> None:
    """Stream one answer of a model as it is stored, bf16."""
    llm = LLM(MODELS / name)  # which says on stderr where it runs
    console.out().print(Text.assemble((name, "bold"), f" (bf16): {PROMPT}"), end="")
    start, count = time.perf_counter(), 0
    for chunk in llm.stream(PROMPT, SamplingParams(temperature=0.7, seed=7, max_tokens=80)):
        print(chunk.text, end="", flush=True)
        count += len(chunk.token_ids)
    print(f"\n  [{count} tokens in {time.perf_counter() - start:.1f} s]\n", flush=True)


def measure(name: str, scheme: str, windows: int) -> tuple[list[str], list[dict[str, Any]]]:
    """A row of the table of formats, and the kernels that ran."""
    llm = LLM(MODELS / name, dtype="bf16", quant=None if scheme == "bf16" else scheme)
    quality = evaluate(llm.engine, read_tokens(MODELS / "eval_tokens.u16"), WINDOW, windows)
    prompts, params = (
        [[1 + i] * 8 for i in range(4)],
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    )
    llm.generate(prompts, params)  # verifies and loads the kernels of these sizes
    speeds = []
    for _ in range(5):
        start = time.perf_counter()
        count = sum(len(result.token_ids) for result in llm.generate(prompts, params))
        speeds.append(count / (time.perf_counter() - start))
    speed = statistics.median(speeds)
    row = [
        name,
        scheme,
        f"{quality.perplexity:.3f}",
        f"{quality.loss:.4f}",
        f"{llm.weight_bytes / 1e6:.2f}",
        f"{speed:.0f}",
    ]
    return row, llm.explain()


def converse() -> None:
    """Stream an answer of the chat model that `gristmill chat` and `gristmill serve` take where none is named; say so if it is out of reach."""
    try:
        path = default_model()
    except ModelUnavailableError as error:
        print(f"\nNo chat model: {error}", flush=True)
        return
    llm = LLM(path)
    session = Session.of(llm, {"temperature": 0, "max_tokens": 100})
    title = Text.assemble("\n", (DEFAULT.name, "bold"), f" ({DEFAULT.license}): {QUESTION}")
    console.out().print(title)
    answer = Answer()
    for delta in session.ask(QUESTION, answer):
        print(delta.content, end="", flush=True)
    print(f"\n  [{answer.output_tokens} tokens in {answer.seconds:.1f} s]", flush=True)


def main() -> None:
    """Answers, the table of formats, the table of kernels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--windows", type=int, default=16, help="windows of 1,024 held-out tokens (default 16)"
    )
    parser.add_argument("--schemes", default=SCHEMES, help=f"comma-separated (default {SCHEMES})")
    options = parser.parse_args()
    print(
        "Every kernel is compared with its reference before its first run on this machine: the first start takes longer.\n",
        flush=True,
    )
    for name in NAMES:
        answer(name)
    rows, ran = [], []
    work = [(name, scheme) for name in NAMES for scheme in options.schemes.split(",")]
    for name, scheme in console.progress(work, lambda item: f"{item[0]} in {item[1]}"):
        row, kernels = measure(name, scheme, options.windows)
        rows.append(row)
        ran += kernels
    numbers = ("perplexity", "loss (nats)", "weights (MB)", "tokens/s, 4 requests")
    console.table(
        f"Number formats, rounded to nearest: perplexity on {options.windows} windows of {WINDOW:,} held-out tokens",
        ["model", "format", *numbers],
        rows,
        right=numbers,
    )
    print()
    console.table(
        "Which kernel each operation ran, and why",
        ["operation", "kernel", "weights", "why"],
        [
            [r["op"], r["kernel"], ", ".join(r["formats"]), r["reason"]]
            for r in sorted(summarize(ran), key=lambda r: (r["op"], r["kernel"]))
        ],
    )
    converse()
    print(
        '\nNext: gristmill chat, gristmill serve, kernelbench explain linear --problem "n=768,k=256,w=int4_g128"'
    )


if __name__ == "__main__":
    main()
