"""One run of `lab.first_token`, in its own process: MODEL BEGIN [--quant-head SCHEME]; `main` prints a sample as JSON.

BEGIN: the monotonic clock of the system when the process was started.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any


def clock() -> float:
    """Seconds, from the same origin in every process."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """The function, with its time added to a phase; calls inside another phase's belong to that."""

    def call(*arguments: Any, **named: Any) -> Any:
        if spent.get("inside"):
            return function(*arguments, **named)
        spent["inside"], begin = 1.0, clock()
        try:
            return function(*arguments, **named)
        finally:
            spent["inside"] = 0.0
            spent[name] += clock() - begin

    return call


def main() -> None:
    """Load a model, generate a token, print the sample."""
    laps = {"begin": float(sys.argv[2]), "start": clock()}
    import torch  # noqa: F401  # its import is a phase

    laps["torch"] = clock()
    from gristmill import ops
    from gristmill.autotune import packing
    from gristmill.quant import packed
    from gristmill.runtime.llm import LLM
    from gristmill.runtime.loader.config import open_checkpoint
    from gristmill.runtime.sampling_params import SamplingParams

    laps["gristmill"] = clock()
    checkpoint = open_checkpoint(sys.argv[1])
    checkpoint.config()
    laps["header"] = clock()
    checkpoint.tokenizer()
    laps["tokenizer"] = clock()
    spent = {"plans": 0.0, "packing": 0.0}
    vars(ops)["bind"] = timed(ops.bind, spent, "plans")
    vars(packing)["plan_layouts"] = timed(packing.plan_layouts, spent, "plans")
    vars(packed)["pack"] = timed(packed.pack, spent, "packing")
    llm = LLM(checkpoint, quant_head=sys.argv[4] if len(sys.argv) > 4 else None, warm="off")
    loaded, before = clock(), dict(spent)
    llm.generate("hello there", SamplingParams(max_tokens=1))
    end = clock()
    names = ("start", "torch", "gristmill", "header", "tokenizer")
    points = [laps["begin"], *(laps[name] for name in names)]
    sample = {name: stop - start for name, start, stop in zip(names, points, points[1:], strict=False)}
    sample["plans"], sample["packing"] = spent["plans"], before["packing"]
    sample["weights"] = loaded - laps["tokenizer"] - before["plans"] - before["packing"]
    sample["step"] = end - loaded - (spent["plans"] - before["plans"])
    sample["total"] = end - laps["begin"]
    sample["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    sample["weights_mb"] = llm.weight_bytes / 1e6
    print(json.dumps(sample))
