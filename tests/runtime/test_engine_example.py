"""The example at the top of runtime/engine.py runs as written."""

from __future__ import annotations

import re

import pytest

import gristmill
from gristmill.runtime import engine as module
from gristmill.runtime.errors import UsageError
from gristmill.runtime.runner import Runner
from gristmill.runtime.scheduler import SchedulerConfig
from tests.runtime.oracle import LLAMA, MODELS


def test_the_example_works_as_written(policy_file, capsys: pytest.CaptureFixture[str]) -> None:
    policy_file()
    example = (module.__doc__ or "").partition("\n\n")[2]
    assert example.startswith("engine = Engine(model_directory)\n")
    scope = {
        "model_directory": MODELS / LLAMA,
        "Engine": gristmill.Engine,
        "SamplingParams": gristmill.SamplingParams,
    }
    exec(compile(example, "runtime/engine.py", "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 16 and all(re.match(r"a [\[(]\d+[\])] ", line) for line in printed), printed
    assert printed[-1].endswith("FinishReason.LENGTH")
    assert not scope["engine"].has_unfinished()
    llm = gristmill.LLM(MODELS / LLAMA, num_blocks=64, warm="off")
    [expected] = llm.generate([1, 2, 3], gristmill.SamplingParams(max_tokens=16))
    assert [int(re.findall(r"\d+", line)[0]) for line in printed] == list(expected.token_ids)


def test_an_engine_of_parts_checks_that_they_fit(shared) -> None:
    runner: Runner = shared(LLAMA).engine.runner
    num_blocks = runner.cache.num_blocks
    engine = gristmill.Engine.from_parts(
        runner, SchedulerConfig(num_blocks=num_blocks, max_seqs=runner.max_seqs)
    )
    assert engine.runner is runner and not engine.has_unfinished()
    with pytest.raises(
        UsageError,
        match=f"the cache has {num_blocks} blocks of 16 tokens, the scheduler {num_blocks - 1} of 16",
    ):
        gristmill.Engine.from_parts(runner, SchedulerConfig(num_blocks=num_blocks - 1))
    rows = runner.max_seqs
    with pytest.raises(
        UsageError, match=f"rows for {rows} requests, and max_seqs of the scheduler is {rows + 1}"
    ):
        gristmill.Engine.from_parts(runner, SchedulerConfig(num_blocks=num_blocks, max_seqs=rows + 1))
