"""What speculation saves on real text: acceptance of drafts, and steps of the model with drafts and without.

    python -m lab.speculation --model examples/models/docs-llama --draft examples/models/docs-deepseek \\
        --tokens examples/models/eval_tokens.u16 --out bench/results/cpu/speculation.json

Prompts are windows of held-out text, answered one at a time. Only counts are recorded, no times: they do not depend on the machine but
for rounding. Every method's ids are compared with those without drafts; a prompt whose ids differ fails the program.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gristmill import LLM, SamplingParams, Speculation
from gristmill.autotune.environment import environment
from gristmill.autotune.place import place
from gristmill.bench.result_file import SCHEMA
from gristmill.tools.evaluate import read_tokens
from lab.result import write_result

STRIDE = 3001
"""Tokens between the beginnings of two prompts."""


def methods(draft: str | None, counts: list[int]) -> list[Speculation]:
    """All methods, each with these numbers of drafts per step."""
    drafts = [Speculation("draft", count, draft, adaptive=False) for count in counts if draft is not None]
    return [
        *(Speculation(name, count, adaptive=False) for name in ("ngram", "suffix") for count in counts),
        *drafts,
    ]


def answer(
    model: str, prompts: list[list[int]], params: SamplingParams, speculate: Speculation | None
) -> tuple[list[tuple[int, ...]], int, LLM]:
    """The ids of each prompt, the steps of the model after the prompts, and the LLM."""
    llm = LLM(model, dtype="fp32", max_seqs=1, enable_prefix_cache=False, speculate=speculate)
    engine = llm.engine
    step, steps = engine.step, 0

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    engine.step = counted  # type: ignore[method-assign]
    ids = [completion.token_ids for completion in llm.generate(prompts, params)]
    return ids, steps - len(prompts), llm


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--draft", help="a draft model with the same tokenizer")
    parser.add_argument("--tokens", required=True, help="token ids of the prompts, little-endian uint16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--counts", default="2,4,8", help="drafts per step, comma-separated")
    parser.add_argument("--temperatures", default="0,0.7", help="comma-separated")
    parser.add_argument("--out", type=Path, required=True, help="JSON result file")
    options = parser.parse_args()
    text = read_tokens(options.tokens)
    prompts = [text[i * STRIDE :][: options.prompt_tokens] for i in range(options.prompts)]
    counts = [int(count) for count in options.counts.split(",")]
    rows = []
    for temperature in map(float, options.temperatures.split(",")):
        params = SamplingParams(
            max_tokens=options.max_tokens, temperature=temperature, seed=0, ignore_eos=True
        )
        expected, without, _ = answer(options.model, prompts, params, None)
        for method in methods(options.draft, counts):
            ids, steps, llm = answer(options.model, prompts, params, method)
            if ids != expected:
                raise SystemExit(
                    f"{method} at temperature {temperature}: ids differ from those without drafts"
                )
            status = llm.engine.status().speculation
            assert status is not None
            counted = {
                name: value
                for name, value in asdict(status).items()
                if name not in ("reasons", "gains", "draft_bytes")
            }
            rows.append(
                {
                    **counted,
                    "tokens": method.tokens,
                    "draft_model": None if method.model is None else Path(method.model).name,
                    "temperature": temperature,
                    "steps": steps,
                    "steps_without": without,
                }
            )
            print(
                f"{method.method:7} {method.tokens} T={temperature}: accepted {status.acceptance:.3f}, steps {steps / without:.3f} of "
                f"{without}",
                flush=True,
            )
    command = shlex.join(["python", "-m", "lab.speculation", *sys.argv[1:]])
    settings = {
        "model": Path(options.model).name,
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "max_tokens": options.max_tokens,
    }
    about = environment(place("cpu").target, command) | {"settings": settings}
    write_result(options.out, {"schema": SCHEMA, "about": about, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
