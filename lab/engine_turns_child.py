"""One engine of `lab.engine_turns` in a process of its own: a JSON line per workload on its input, a JSON line per result on a pipe."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, Protocol


class Turns(Protocol):
    """An engine with a model. generate: greedy, without end tokens, so many tokens for each prompt; the number of tokens it gave."""

    version: str

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> int: ...


class Gristmill:
    """This library. Limits of the engine that are None are its defaults."""

    def __init__(self, options: dict[str, Any]) -> None:
        from gristmill import LLM, SamplingParams

        self.version = "gristmill"
        self.params = SamplingParams
        limits = {"max_seqs": options["max_seqs"], "max_batch_tokens": options["max_batch_tokens"]}
        limits |= {"max_model_len": options["max_model_len"], "device": options["device"]}
        self.llm = LLM(options["model"], memory=options["memory"], **limits)
        self.llm.engine.warm_up()

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> int:
        params = [self.params(temperature=0.0, max_tokens=count, ignore_eos=True) for count in outputs]
        return sum(len(result.token_ids) for result in self.llm.generate(prompts, params))


class Vllm:
    """vLLM with its own kernels and its default settings, those of its asynchronous scheduler included."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self.version = f"vllm {vllm.__version__}"
        self.params = vllm.SamplingParams
        limits = {
            "max_num_seqs": options["max_seqs"],
            "max_num_batched_tokens": options["max_batch_tokens"],
            "max_model_len": options["max_model_len"],
        }
        self.llm = vllm.LLM(
            options["model"],
            skip_tokenizer_init=True,
            gpu_memory_utilization=options["share"],
            kv_cache_memory_bytes=options["memory"],
            **{name: value for name, value in limits.items() if value is not None},
        )

    def generate(self, prompts: list[list[int]], outputs: list[int]) -> int:
        params = [
            self.params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in outputs
        ]
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(texts, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)


ENGINES: dict[str, type[Turns]] = {"gristmill": Gristmill, "vllm": Vllm}


def main() -> None:
    """Arguments: the engine, its options as JSON, and the descriptor of the pipe."""
    name, options, pipe = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(pipe, "w") as out:

        def say(row: dict[str, Any]) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        begin = time.perf_counter()
        engine = ENGINES[name](options)  # type: ignore[call-arg]
        say({"version": engine.version, "start": time.perf_counter() - begin})
        for line in sys.stdin:
            work = json.loads(line)
            begin = time.perf_counter()
            tokens = engine.generate(work["prompts"], work["outputs"])
            say({"seconds": time.perf_counter() - begin, "tokens": tokens})
