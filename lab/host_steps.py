"""What the host takes for a decode step: an engine with a device that computes nothing.

    python -m lab.host_steps --requests 256 --out bench/results/cpu/host_steps.json

`LLM.generate` runs as on a GPU, two steps in flight and each prepared as for a graph, but no kernel is called: logits are not computed, and samples
are the same token, or the first legal one of a grammar. What is left is the scheduler, the inputs of steps, processed rows, log-probabilities and
results. Launching is not in it, which only a GPU has. A step that is longer on a device hides the host's time; where it is shorter, the
host's time is the step's.

One row for each kind of requests: plain ones, and a tenth with penalties, log-probabilities (5 tokens), a JSON schema, or each of these in turn
(`lab.engine_turns_child.SPECIAL`). ``us``: processor time of the engine's thread for each step of the fastest round, less what samples with a
grammar take, which a device computes.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gristmill import LLM, SamplingParams
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.bench.result_file import SCHEMA
from gristmill.runtime.decode_graphs import DecodeGraph, DecodeGraphs
from gristmill.runtime.engine_memory import freeze_heap
from gristmill.runtime.logits_processors import LogitsProcessors
from gristmill.runtime.logprobs import LogprobReader
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import Sampler
from gristmill.runtime.structured_output import StructuredOutput
from lab.engine_turns_child import SCHEMA as JSON_SCHEMA
from lab.engine_turns_child import SPECIAL, wishes
from lab.result import write_result

KINDS = ("plain", *SPECIAL, "special")
MODEL = "examples/models/docs-llama"
TOKEN = 300
"""What is sampled where anything may come."""
TOP = 21
"""Columns of log-probabilities that are read: of a token, and of the most likely ones."""


class Idle:
    """A device that computes nothing. It samples at once what the host asks for."""

    def __init__(self, vocab_size: int, rows: int) -> None:
        self.logits = torch.zeros(rows, vocab_size)
        self.largest = torch.zeros(2, rows, 1)
        self.ids = torch.full((rows,), TOKEN)
        self.logprobs = torch.zeros(rows, TOP), torch.zeros(rows, TOP, dtype=torch.int32)
        self.mask: Tensor | None = None
        self.seconds = 0.0
        """Processor time of samples with grammars."""

    def compute(self, graphs: DecodeGraphs, made: DecodeGraph) -> None:
        made.buffers.read_tokens()
        made.buffers.ids.fill_(TOKEN)
        made.buffers.write_tokens()

    def forward(self, runner: Runner, batch: Any, entries: object) -> Tensor:
        return torch.zeros(len(batch.tokens), runner.model.config.hidden_size)

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return self.logits[: len(hidden)]

    def process(self, processors: LogitsProcessors, logits: Tensor, places: Tensor, *rest: Tensor) -> Any:
        *_, words, _ = rest
        self.mask = words if len(words) else None
        return self.logits[: len(places)], self.largest[:, : len(places)]

    def draw(self, sampler: Sampler, logits: Tensor, sampling: object, ids: Tensor) -> None:
        mask, self.mask = self.mask, None
        if mask is None:
            ids.copy_(self.ids[: len(ids)])
            return
        begin = time.thread_time()
        word = (mask != 0).to(torch.uint8).argmax(1)
        bits = mask.gather(1, word[:, None]).bitwise_right_shift(torch.arange(32)) & 1
        ids.copy_(32 * word + bits.argmax(1))
        self.seconds += time.thread_time() - begin

    def read(self, reader: LogprobReader, logits: Tensor, places: Tensor, *rest: object) -> Any:
        return tuple(part[: len(places)].clone() for part in self.logprobs)


@contextmanager
def idle(device: Idle) -> Iterator[None]:
    """While the block runs, engines compute by this device."""
    places: list[tuple[type, str, Any]] = [
        (DecodeGraphs, "compute", device.compute),
        (DecodeGraphs, "record", device.compute),
        (Runner, "_forward", device.forward),
        (LogitsProcessors, "_process", device.process),
        (Sampler, "draw", device.draw),
        (LogprobReader, "read", device.read),
    ]
    with ExitStack() as stack:
        for owner, name, function in places:
            stack.enter_context(
                patch.object(
                    owner, name, lambda *given, _function=function, **named: _function(*given, **named)
                )
            )
        yield


def requests(kind: str, count: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 60 tokens that differ from the first on, and parameters."""
    prompts = [[1 + request, *range(100, 159)] for request in range(count)]
    names = [""] * count
    if kind != "plain":
        own = [*SPECIAL] if kind == "special" else [kind]
        names[3::10] = [own[i % len(own)] for i in range(len(names[3::10]))]
    grammar: dict[str, Any] = {"structured_output": StructuredOutput(json_schema=JSON_SCHEMA)}
    return prompts, [
        SamplingParams(**wishes(tokens, name), **(grammar if name == "grammar" else {})) for name in names
    ]


def microseconds(llm: LLM, device: Idle, kind: str, count: int, tokens: int, rounds: int) -> float:
    """Processor time of a step in the fastest of so many rounds, after one that is not counted."""
    best = float("inf")
    for number in range(rounds + 1):
        llm.engine.reset_prefix_cache()
        prompts, params = requests(kind, count, tokens)
        device.seconds, begin = 0.0, time.thread_time()
        llm.generate(prompts, params)
        if number:
            best = min(best, time.thread_time() - begin - device.seconds)
    return 1e6 * best / tokens


def measure(model: str, count: int, tokens: int, rounds: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each kind."""
    llm = LLM(
        model,
        device="cpu",
        dtype="fp32",
        max_seqs=count,
        num_blocks=count * (2 + (60 + tokens) // 16),
        decode_graphs=True,
        async_steps=True,
        warm="off",
    )
    device = Idle(llm.config.vocab_size, count)
    llm.engine.runner.model.logits = device.head  # type: ignore[method-assign, union-attr]
    rows = []
    with idle(device):
        microseconds(llm, device, "plain", count, min(tokens, 20), 0)
        freeze_heap(llm.engine)  # as engines do that have warmed up
        for kind in kinds:
            us = microseconds(llm, device, kind, count, tokens, rounds)
            rows.append({"kind": kind, "requests": count, "tokens": tokens, "us": round(us, 1)})
            print(f"{kind:12} {us:8.1f} us per step", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=MODEL, help="a small model with a tokenizer")
    parser.add_argument("--requests", type=int, default=256, metavar="N", help="requests at a time")
    parser.add_argument("--tokens", type=int, default=900, metavar="N", help="tokens of each output")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="rounds, the fastest of which counts"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="of requests, comma-separated")
    parser.add_argument("--out", required=True, help="result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.model, args.requests, args.tokens, args.rounds, args.kinds.split(","))
    command = shlex.join(["python", "-m", "lab.host_steps", *sys.argv[1:]])
    write_result(
        args.out, {"schema": SCHEMA, "about": environment(place("cpu").target, command), "rows": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
