"""One engine of `lab.engine_turns` in a process of its own: a JSON line per workload on its input, a JSON line per result on a pipe. A workload
with ``trace`` is traced instead of timed."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol

from gristmill.bench.device_trace import Trace, recorded, summary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1024}
"""An output that does not end before it has as many tokens as a workload asks for."""
SPECIAL: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"logprobs": 5},
    "grammar": {"ignore_eos": False},
}
"""Parameters of special requests, by kind, beside the schema of ``grammar``."""


class Turns(Protocol):
    """An engine with a model. `generate` is greedy and ignores end tokens; it returns the number of tokens. special: a key of `SPECIAL` for each
    request, "" = none."""

    version: str
    step: str
    """Where the function is that runs a step and returns its results: attributes from the engine on."""

    def generate(self, prompts: list[list[int]], outputs: list[int], special: list[str]) -> int: ...


def wishes(count: int, special: str) -> dict[str, Any]:
    """The parameters of a request without its grammar, by names that all engines share."""
    return {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **SPECIAL.get(special, {})}


class Steps:
    """Times of the steps of an engine, and how many requests had ended after each."""

    def __init__(self, engine: Turns) -> None:
        *path, name = engine.step.split(".")
        owner: Any = engine
        for attribute in path:
            owner = getattr(owner, attribute)
        self.rows: list[tuple[float, int, int]] = []
        self.start()
        step = getattr(owner, name)

        def timed() -> Any:
            results = step()
            self.count += 1
            ended = sum(ends(result) for result in results)
            if ended:
                self.ended += ended
                self.rows.append((round(time.perf_counter() - self.begin, 6), self.count, self.ended))
            return results

        setattr(owner, name, timed)

    def start(self) -> None:
        """Of a workload. rows: for each step in which a request ended: seconds, steps and ended requests since here."""
        self.begin, self.count, self.ended = time.perf_counter(), 0, 0
        self.rows = []


def ends(result: Any) -> bool:
    """Whether a request has ended with this result of a step."""
    finished = getattr(result, "finished", None)
    return result.finish_reason is not None if finished is None else bool(finished)


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of an engine of this library, by its own names."""
    return {
        name: options[name] for name in ("device", "memory", "max_seqs", "max_batch_tokens", "max_model_len")
    }


class Gristmill:
    """This library. Limits of the engine that are None are its defaults."""

    step = "llm.engine.step"

    def __init__(self, options: dict[str, Any]) -> None:
        from gristmill import LLM, SamplingParams
        from gristmill.runtime.structured_output import StructuredOutput

        self.version = "gristmill"
        self.params = SamplingParams
        self.grammar: dict[str, Any] = {"structured_output": StructuredOutput(json_schema=SCHEMA)}
        self.llm = LLM(options["model"], tensor_parallel=options["ranks"], **own_options(options))
        self.llm.engine.warm_up()

    def generate(self, prompts: list[list[int]], outputs: list[int], special: list[str]) -> int:
        params = [
            self.params(**wishes(count, kind), **(self.grammar if kind == "grammar" else {}))
            for count, kind in zip(outputs, special, strict=True)
        ]
        return sum(len(result.token_ids) for result in self.llm.generate(prompts, params))


class Replicated:
    """`ranks` copies of the model on a GPU each. Steps are those of the copies, and are not seen here."""

    step = "unseen"

    def __init__(self, options: dict[str, Any]) -> None:
        from gristmill import Replicas, SamplingParams

        self.version = "gristmill"
        self.params = SamplingParams
        self.loop = asyncio.new_event_loop()
        self.replicas = Replicas(options["model"], options["ranks"], **own_options(options))
        self.loop.run_until_complete(self.replicas.__aenter__())

    def unseen(self) -> list[Any]:
        """A step has no results here."""
        return []

    def generate(self, prompts: list[list[int]], outputs: list[int], special: list[str]) -> int:
        if any(special):
            raise ValueError("workloads with special requests are not for replicas")

        async def run() -> int:
            params = [self.params(**wishes(count, "")) for count in outputs]
            pairs = zip(prompts, params, strict=True)
            done = await asyncio.gather(*(self.replicas.generate(prompt, one) for prompt, one in pairs))
            return sum(len(result[0].token_ids) for result in done)

        return self.loop.run_until_complete(run())


class Vllm:
    """vLLM with its own kernels and its default settings, those of its asynchronous scheduler included."""

    step = "llm.llm_engine.step"
    more: ClassVar[dict[str, Any]] = {}

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self.version = f"vllm {vllm.__version__}"
        self.params = vllm.SamplingParams
        self.grammar = {
            "structured_outputs": vllm.sampling_params.StructuredOutputsParams(json=json.dumps(SCHEMA))
        }
        limits = {
            "max_num_seqs": options["max_seqs"],
            "max_num_batched_tokens": options["max_batch_tokens"],
            "max_model_len": options["max_model_len"],
            "tensor_parallel_size": options["ranks"],
        }
        self.llm = vllm.LLM(
            options["model"],
            skip_tokenizer_init=not (Path(options["model"]) / "tokenizer.json").exists(),
            gpu_memory_utilization=options["share"],
            kv_cache_memory_bytes=options["memory"],
            **{name: value for name, value in limits.items() if value is not None},
            **self.more,
        )

    def generate(self, prompts: list[list[int]], outputs: list[int], special: list[str]) -> int:
        params = [
            self.params(
                **wishes(count, kind), detokenize=False, **(self.grammar if kind == "grammar" else {})
            )
            for count, kind in zip(outputs, special, strict=True)
        ]
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(texts, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)


class VllmGristmill(Vllm):
    """vLLM with gristmill's kernels in the layers where measurements say that they are faster: its default choice."""

    more: ClassVar[dict[str, Any]] = {"quantization": "gristmill"}

    def __init__(self, options: dict[str, Any]) -> None:
        from gristmill.integrations.vllm import register

        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"  # a process with what is registered
        register()  # a checkout has no entry point
        super().__init__(options)


class VllmGristmillAll(VllmGristmill):
    """The same in all layers that gristmill's kernels serve."""

    more: ClassVar[dict[str, Any]] = VllmGristmill.more | {
        "additional_config": {"gristmill": {"take": "all"}}
    }


ENGINES: dict[str, type[Turns]] = {
    "gristmill": Gristmill,
    "gristmill-replicas": Replicated,
    "vllm": Vllm,
    "vllm-gristmill": VllmGristmill,
    "vllm-gristmill-all": VllmGristmillAll,
}


def traced(engine: Turns, prompts: list[list[int]], outputs: list[int], special: list[str]) -> Trace:
    """What the device did in the steps of these requests, which run once before. ValueError: nothing was recorded, say because the steps of the
    engine run in another process."""
    engine.generate(prompts, outputs, special)
    spans = recorded(lambda: engine.generate(prompts, outputs, special))
    return summary(spans, len(prompts), max(outputs))


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
        steps = Steps(engine)
        for line in sys.stdin:
            work = json.loads(line)
            steps.start()
            special = work["special"] or [""] * len(work["outputs"])
            if work.get("trace"):
                say(asdict(traced(engine, work["prompts"], work["outputs"], special)))
                continue
            busy = time.process_time()
            tokens = engine.generate(work["prompts"], work["outputs"], special)
            say(
                {
                    "seconds": time.perf_counter() - steps.begin,
                    "cpu_seconds": time.process_time() - busy,
                    "steps": steps.count,
                    "tokens": tokens,
                    "ends": steps.rows,
                }
            )
