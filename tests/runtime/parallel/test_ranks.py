"""Models over two ranks on this CPU, with gloo: the ids of one process; ranks that die or sleep end with an error that names them, and
the next request is served."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.errors import RankError, UsageError
from gristmill.runtime.grammars import Grammar
from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel import rank_processes
from gristmill.runtime.parallel.choices import difference
from gristmill.runtime.parallel.driver import ParallelRunner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.structured_output import StructuredOutput
from gristmill.tools.evaluate import window_logits
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS
from tests.runtime.proofs import proves

PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=3),
    SamplingParams(max_tokens=24, repetition_penalty=1.3, logprobs=2),
    SamplingParams(max_tokens=6, prompt_logprobs=1),
]


def runner_of(llm: LLM) -> ParallelRunner:
    runner = llm.engine.runner
    assert isinstance(runner, ParallelRunner)
    return runner


def pids(llm: LLM) -> list[int]:
    return [process.process.pid for process in runner_of(llm)._processes]


def is_gone(pid: int) -> bool:
    """Returns whether a process has ended, and was waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def llama(make: Callable[..., LLM]) -> Iterator[LLM]:
    """Returns the example Llama on two ranks, in int4, with steps in flight, and with a deadline that a loaded machine meets."""
    llm = make(
        LLAMA,
        quant="int4_g128",
        quant_head="int8",
        tensor_parallel=2,
        rank_timeout=60,
        async_steps=True,
    )
    yield llm
    llm.close()


@proves("ranks", "2", "LlamaForCausalLM")
def test_two_ranks_generate_the_ids_of_one(llama: LLM, make: Callable[..., LLM]) -> None:
    """Prompts of several lengths, greedy and sampled, with logits that are processed or read; twice, from the prefix cache too."""
    alone = make(LLAMA, quant="int4_g128", quant_head="int8")
    prompts = oracle.prompts()[3:15:4] + [oracle.prompts()[18]]
    expected = alone.generate(prompts, PARAMS)
    for _ in range(2):
        actual = llama.generate(prompts, PARAMS)
        assert [a.token_ids for a in actual] == [e.token_ids for e in expected]
        for a, e in zip(actual, expected, strict=True):
            for ours, theirs in zip(a.logprobs or (), e.logprobs or (), strict=True):
                assert abs(ours.logprob - theirs.logprob) < 1e-3
    prompt_logprobs = actual[3].prompt_logprobs
    assert prompt_logprobs is not None and all(token is not None for token in prompt_logprobs[1:])
    llama.engine.scheduler.check()
    ids = oracle.window(0)[:33]
    error = (window_logits(llama.engine, ids) - window_logits(alone.engine, ids)).abs().max()
    assert float(error) < 1e-4
    # Every weight that is cut is on one rank only; k and v have as many heads as there are ranks.
    assert llama.weight_bytes < 1.1 * alone.weight_bytes
    assert {"all_reduce", "all_gather"} <= {row["op"] for row in llama.explain()}


def test_structured_output_on_two_ranks(llama: LLM, make: Callable[..., LLM]) -> None:
    """The ids of one process, beside requests without a grammar, with penalties, and after a request that was aborted."""
    alone = make(LLAMA, quant="int4_g128", quant_head="int8")
    shapes = [
        StructuredOutput(regex=r"[a-f]{3}-[0-9]{2}(, [a-f]{3}-[0-9]{2}){2}"),
        StructuredOutput(choice=["the first of them", "the second"]),
        StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}),
        None,
    ]
    params = [
        SamplingParams(max_tokens=20, structured_output=shape, repetition_penalty=1.0 + 0.1 * (i == 0))
        for i, shape in enumerate(shapes)
    ]
    prompts = oracle.prompts()[3:15:4] + [oracle.prompts()[18]]
    expected = alone.generate(prompts, params)
    stream = llama.stream(prompts[:2], params[:2])
    next(stream)
    stream.close()
    actual = llama.generate(prompts, params)
    assert [a.token_ids for a in actual] == [e.token_ids for e in expected]
    assert actual[1].text in ("the first of them", "the second")
    assert re.fullmatch(r"[a-f]{3}-[0-9]{2}(, [a-f]{3}-[0-9]{2}){2}", actual[0].text)


def test_a_grammar_that_cannot_go_on_is_named_by_the_driver(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks only know that no token is allowed."""
    monkeypatch.setattr(
        Grammar, "consume", lambda self, tokens: self.matcher.consume_tokens([5] * len(tokens))
    )
    params = SamplingParams(max_tokens=8, structured_output=StructuredOutput(regex="[a-c]{8}"))
    first, second = llama.generate([oracle.prompts()[5]] * 2, [params, PARAMS[0]])
    assert first.error is not None and first.error.code == "grammar_failed" and second.error is None


@proves("ranks", "2", "DeepseekV3ForCausalLM")
def test_experts_and_latent_attention_on_two_ranks(make: Callable[..., LLM]) -> None:
    limits = {"max_batch_tokens": 128, "max_seqs": 8}
    alone, ranks = make(DEEPSEEK), make(DEEPSEEK, tensor_parallel=2, rank_timeout=60, warm="auto", **limits)
    assert ranks.engine.warmed is not None and ranks.engine.warmed.kernels > 50
    try:
        prompts = oracle.prompts()[3:15:4]
        params = SamplingParams(max_tokens=16)
        expected = [result.token_ids for result in alone.generate(prompts, params)]
        assert [result.token_ids for result in ranks.generate(prompts, params)] == expected
    finally:
        ranks.close()
    assert all(map(is_gone, pids(ranks))), "no process is left"


def test_a_dead_rank_and_a_sleeping_one_are_named_and_replaced(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, runner = oracle.prompts()[5], runner_of(llama)
    expected = llama.generate([prompt], PARAMS[0])[0].token_ids
    for sent, timeout, message in (
        (signal.SIGKILL, 1000.0, r"rank 1 died \(SIGKILL\): 'collect' failed, all ranks were ended"),
        (signal.SIGSTOP, 2.0, r"rank 1 did not answer 'collect' within 2 s; all ranks were ended"),
    ):
        before = pids(llama)
        stream = llama.stream([prompt], SamplingParams(max_tokens=64))
        next(stream)
        runner.ranks = replace(runner.ranks, timeout=timeout)
        # A busy machine may take a while until a status is known; who is stopped says nothing, however long one waits.
        monkeypatch.setattr(rank_processes, "GRACE", 30.0 if sent is signal.SIGKILL else 0.5)
        os.kill(before[1], sent)
        begin = time.monotonic()
        with pytest.raises(RankError, match=message):
            list(stream)
        assert time.monotonic() - begin < 60
        assert all(map(is_gone, before)), "all ranks were ended"
        assert not llama.engine.has_unfinished()
        runner.ranks = replace(runner.ranks, timeout=60.0)
        if sent is signal.SIGKILL:
            assert llama.generate([prompt], PARAMS[0])[0].token_ids == expected, "from an empty cache"


def test_wrong_calls_are_refused(policy: Policy) -> None:
    folder = MODELS / LLAMA
    for world, message in ((3, "can: 1, 2, 4"), (0, "tensor_parallel"), (True, "tensor_parallel")):
        with pytest.raises(UsageError, match=message):
            LLM(folder, tensor_parallel=world, policy=policy)
    with pytest.raises(UsageError, match="speculate cannot be combined with tensor_parallel"):
        LLM(folder, tensor_parallel=2, speculate="ngram:4", policy=policy)
    with pytest.raises(UsageError, match="rank_timeout must be seconds, more than 0, got 0"):
        LLM(folder, tensor_parallel=2, rank_timeout=0, policy=policy)
    with pytest.raises(UsageError, match=r"takes device 'auto', 'cpu' or 'cuda', .* got 'cuda:1'"):
        LLM(folder, tensor_parallel=2, device="cuda:1", policy=policy)


def test_plans_that_differ_are_found() -> None:
    assert difference({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ""
    assert difference({"a": "1", "b": "2"}, {"b": "4"}) == "b"


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_fails_while_it_loads(
    sent: signal.Signals, make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    spawn = rank_processes.spawn

    def spawn_and_hit(module: str, rank: int, choices: list[int]) -> rank_processes.ChildProcess:
        made = spawn(module, rank, choices)
        started.append(made.process.pid)
        if rank == 1:
            threading.Timer(0.5, os.kill, (made.process.pid, sent)).start()
        return made

    monkeypatch.setattr(rank_processes, "spawn", spawn_and_hit)
    begin = time.monotonic()
    with pytest.raises(RankError, match="rank 1 (died|did not answer 'load')"):
        make(LLAMA, tensor_parallel=2, rank_timeout=3)
    assert time.monotonic() - begin < 40
    assert all(map(is_gone, started))


@pytest.mark.slow
@pytest.mark.parametrize("quant", [None, "int8_ch", "fp8_block", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_schemes_and_worlds(name: str, world: int, quant: str | None, make: Callable[..., LLM]) -> None:
    alone, ranks = make(name, quant=quant), make(name, quant=quant, tensor_parallel=world, rank_timeout=120)
    try:
        ids = oracle.window(1)[:65]
        error = (window_logits(ranks.engine, ids) - window_logits(alone.engine, ids)).abs().max()
        assert float(error) < 2e-4
        first, second = (ranks.generate([ids], PARAMS[1]) for _ in range(2))
        assert first[0].token_ids == second[0].token_ids
        assert torch.equal(window_logits(ranks.engine, ids), window_logits(ranks.engine, ids))
    finally:
        ranks.close()


@pytest.mark.slow
def test_the_command_line(policy: Policy, tmp_path: Path) -> None:
    """The option does what the argument does; when the program ends, its ranks do."""
    file = tmp_path / "policy.toml"
    file.write_text(f'cache = "{policy.cache}"\n', encoding="utf-8")
    command = [sys.executable, "-m", "gristmill.tools.cli", "generate", "--model", str(MODELS / LLAMA)]
    command += [
        "--prompt",
        "The index",
        "--max-tokens",
        "8",
        "--dtype",
        "fp32",
        "--policy",
        str(file),
        "--json",
    ]
    one, two = (
        json.loads(subprocess.run([*command, *more], check=True, capture_output=True, text=True).stdout)
        for more in ([], ["--tensor-parallel", "2"])
    )
    assert one["token_ids"] == two["token_ids"] and len(one["token_ids"]) == 8


@pytest.mark.slow
def test_ranks_end_with_a_driver_that_is_killed(policy: Policy) -> None:
    code = (
        "import sys; from gristmill import LLM, Policy\n"
        f"llm = LLM({str(MODELS / LLAMA)!r}, tensor_parallel=2, policy=Policy(cache={policy.cache!r}))\n"
        "print(*[p.process.pid for p in llm.engine.runner._processes], flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as program:
        assert program.stdout is not None
        ranks = [int(pid) for pid in program.stdout.readline().split()]
        assert len(ranks) == 2
        program.kill()
    deadline = time.monotonic() + 10
    while not all(map(is_gone, ranks)):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)
