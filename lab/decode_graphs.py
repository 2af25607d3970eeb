"""What the graph of a decode step costs beyond its requests: the same step from graphs for longer contexts, and by the number of requests.

    python -m lab.decode_graphs --model qwen3-0.6b --out bench/results/h200/decode_graphs.json

``us``: microseconds of one replay, of 60 in a row. ``bound``: the longest context of the graph; there is one of each of `--bounds` for each number of
requests and each context that it holds. Rows with the bound 4096 and a context of 1,000 tokens are there for every size that a graph has. The blocks
of all requests are the same, and what a step copies to the device before a replay is not in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gristmill import LLM, SamplingParams
from gristmill.autotune.device import device_target
from gristmill.autotune.environment import environment
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.scheduler import ScheduledRequest
from lab.engine import SHAPES, random_model, wait
from lab.result import write_result

ROW = SamplingRow(SamplingParams(temperature=1.0, top_p=0.9, top_k=40), 0, 0)
REPLAYS = 60


def timed(runner: Runner, seqs: int, context: int, bound: int) -> dict[str, Any]:
    """A row: a step of `seqs` requests with `context` tokens each, from the graph for contexts up to `bound`."""
    graphs, size = runner.decode, runner.cache.block_size
    assert graphs is not None
    blocks = list(range(cdiv(context, size)))
    entries = [
        ScheduledRequest(f"request {i}", context - 1, 1, True, [0], blocks, [], 0) for i in range(seqs)
    ]
    with patch.object(graphs, "bound", lambda longest: bound):
        graph = graphs.graph(seqs, context)
        for _ in range(5):
            runner.run(entries, [ROW] * seqs)
    replay: Callable[[], object] = graph.graph.replay if graph.captured else partial(graphs.compute, graph)
    wait()
    begin = time.perf_counter()
    for _ in range(REPLAYS):
        replay()
    wait()
    return {
        "seqs": seqs,
        "context": context,
        "bound": bound,
        "us": (time.perf_counter() - begin) / REPLAYS * 1e6,
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """Time the graphs of one model."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("python -m lab.decode_graphs", description=str(__doc__).split("\n")[0])
    parser.add_argument("--model", required=True, help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seqs", type=numbers, default=[1, 8, 64, 256], help="requests of a step")
    parser.add_argument("--contexts", type=numbers, default=[300, 1000, 3000], help="tokens of each request")
    parser.add_argument("--bounds", type=numbers, default=[512, 4096, 40960], help="of the graphs")
    parser.add_argument("--out", required=True, help="where the JSON goes")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        named = options.model in SHAPES
        folder = random_model(options.model, Path(scratch)) if named else Path(options.model)
        longest = max(options.bounds)
        llm = LLM(folder, device=options.device, max_seqs=max(options.seqs), max_model_len=longest)
        runner = llm.engine.runner
        assert isinstance(runner, Runner) and runner.decode is not None
        rows = [
            timed(runner, seqs, context, bound)
            for seqs in options.seqs
            for context in options.contexts
            for bound in options.bounds
            if context <= bound
        ]
        sizes = [size for size in runner.decode.sizes if size <= max(options.seqs)]
        rows += [timed(runner, seqs, min(1000, longest), min(4096, longest)) for seqs in sizes]
    about = environment(
        device_target(options.device, Policy()), f"python -m lab.decode_graphs {' '.join(argv)}"
    )
    write_result(options.out, {"about": about, "rows": rows})
    for row in rows:
        print(
            f"{row['seqs']:4} requests of {row['context']:6} tokens, up to {row['bound']:6}: {row['us']:.0f} µs"
        )


if __name__ == "__main__":
    main()
