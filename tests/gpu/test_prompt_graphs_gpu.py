"""Steps with prompts as CUDA graphs between attention calls: same ids as kernel by kernel, with decode graphs, on two threads' streams."""

from __future__ import annotations

import threading

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.llm import LLM
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from tests.runtime import oracle
from tests.runtime.oracle import LLAMA, MODELS

pytestmark = pytest.mark.gpu
# The rows of these kernels do not depend on the batch: a padded step gives the same bits.
TRITON = Policy(pins={"*": ("*_triton",)}, strict=True, origin="strict Triton")
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=17, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=20, prompt_logprobs=1, repetition_penalty=1.2),
]


def prompts() -> list[list[int]]:
    start = oracle.eval_tokens()[:40]
    return [start + oracle.eval_tokens()[n : n + 7] for n in (100, 200, 300, 400)] + [start] * 3


def make(prompt_graphs: int | None, **options: object) -> LLM:
    options = {"dtype": "fp32", "device": "cuda", "policy": TRITON, "num_blocks": 256} | options
    return LLM(MODELS / LLAMA, prompt_graphs=prompt_graphs, **options)


def in_pieces(llm: LLM) -> list[dict[str, object]]:
    return [row for row in llm.explain_graphs() if "in pieces" in row["reason"]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 14, "max_seqs": 4},
        {"max_chunk": 8},
        {"decode_graphs": False},
        {"quant": "int4_g128"},
    ],
    ids=["plain", "preemption", "chunks", "no decode graphs", "int4"],
)
def test_same_ids(options: dict[str, object]) -> None:
    without, through = make(0, **options), make(256, **options)
    params = [PARAMS[i % 4] for i in range(7)]
    expected = [result.token_ids for result in without.generate(prompts(), params)]
    for _ in range(2):
        assert [result.token_ids for result in through.generate(prompts(), params)] == expected
    assert not in_pieces(without)
    assert in_pieces(through) and all(row["captured"] for row in in_pieces(through))


def test_warm_up_captures_all_and_sleep_drops_them() -> None:
    through = make(None, max_batch_tokens=256, max_seqs=8)
    through.engine.warm_up()
    runner = through.engine.runner
    assert isinstance(runner, Runner) and runner.prompts is not None
    most = min(size for size in runner.prompts.sizes if size >= 256)
    assert {*runner.prompts.graphs} == {size for size in runner.prompts.sizes if size <= most}
    expected = through.generate(prompts(), PARAMS[0])
    assert {*runner.prompts.graphs} == {size for size in runner.prompts.sizes if size <= most}, (
        "captured late"
    )
    through.engine.sleep()
    assert runner.prompts is None
    through.engine.wake_up()
    assert through.generate(prompts(), PARAMS[0]) == expected and in_pieces(through)


def test_captured_while_another_thread_uses_the_device() -> None:
    """Captures of pieces and work of another thread do not disturb each other. It draws from a generator of its own: torch refuses to draw from its
    default one while any thread captures."""
    expected = make(0).generate(prompts(), PARAMS[0])
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            own = torch.Generator(device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    torch.randn(512, 512, device="cuda", generator=own).sum().item()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert make(256).generate(prompts(), PARAMS[0]) == expected
    finally:
        stop.set()
        thread.join()
    assert not failures
