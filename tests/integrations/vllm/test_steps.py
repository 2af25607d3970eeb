"""Steps that vLLM schedules ahead of the results of the last one, and steps with drafts: the ids of the runtime."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm import SamplingParams

import gristmill
from gristmill.integrations.vllm import worker
from gristmill.integrations.vllm.drafts import Drafts
from gristmill.integrations.vllm.requests import Requests
from gristmill.integrations.vllm.steps import StepOutput
from gristmill.runtime.logits_processors import ProcessedRows
from gristmill.runtime.runner import Runner
from tests.integrations.vllm.test_cache import worker_of
from tests.integrations.vllm.test_worker import GREEDY, Host, generated, own, prompts, texts
from tests.runtime.late_runner import LateRunner

EDITED: dict[str, Any] = {"repetition_penalty": 1.2, "presence_penalty": 0.3}
SEEDED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


def wish(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **fields})


@pytest.fixture
def ahead(host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """vLLM with asynchronous scheduling, which it turns off on a CPU, and a device that computes a step when its ids are asked for."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(checked))
    monkeypatch.setattr(worker, "Runner", LateRunner)
    return host


def test_steps_ahead_of_their_results(ahead: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = ahead("docs-llama")
    steps, most = worker_of(llm).steps, 0
    assert steps is not None and steps.asynchronous
    launch = Runner.launch

    def launched(self: Any, entries: Any, *rest: Any) -> Any:
        nonlocal most
        most = max(most, sum(entry.tokens is None for entry in entries))
        return launch(self, entries, *rest)

    monkeypatch.setattr(Runner, "launch", launched)
    ids = texts(5)
    assert generated(llm.generate(prompts(ids), GREEDY)) == own("docs-llama", ids)
    assert most == 5, "tokens were read on the device"
    mixed = [wish(**EDITED), wish(**SEEDED), wish(logprobs=2, prompt_logprobs=1)]
    outputs = llm.generate(prompts(ids[:3]), mixed)
    for output, text, fields in zip(outputs, ids, (EDITED, SEEDED, {}), strict=False):
        assert generated([output]) == own("docs-llama", [text], **fields)
    runtime = gristmill.LLM("examples/models/docs-llama", dtype="float32", num_blocks=64, warm="off")
    (done,) = runtime.generate(
        [ids[2]], gristmill.SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    )
    for theirs, ours in zip(outputs[2].outputs[0].logprobs, done.logprobs, strict=True):
        assert theirs[ours.token_id].logprob == pytest.approx(ours.logprob, abs=1e-3)
    assert len(outputs[2].prompt_logprobs) == len(done.prompt_logprobs)

    # Planted: what the device has is not read.
    entry = Requests._entry

    def planted(self: Requests, *rest: Any) -> Any:
        made = entry(self, *rest)
        made.tokens = [7] if made.tokens is None else made.tokens
        return made

    monkeypatch.setattr(Requests, "_entry", planted)
    assert generated(llm.generate(prompts(ids), GREEDY)) != own("docs-llama", ids)


def test_requests_that_end_or_are_preempted_ahead_of_their_results(ahead: Host) -> None:
    ids = [text[:100] for text in texts(5)[2:]] * 2
    options: dict[str, Any] = {
        "block_size": 128,
        "num_gpu_blocks_override": 8,
        "enable_prefix_caching": False,
    }
    llm = ahead("docs-llama", max_model_len=256, **options)
    params = wish(max_tokens=120)
    assert generated(llm.generate(prompts(ids), params)) == own("docs-llama", ids, max_tokens=120)
    assert next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions") > 0
    # An end token is seen one step late: the token after it is dropped.
    (plain,) = own("docs-llama", ids[:1])
    (stopped,) = llm.generate(prompts(ids[:1]), wish(stop_token_ids=[plain[5]]))
    assert generated([stopped]) == [plain[: plain.index(plain[5]) + 1]]
    for _ in range(3):  # rows are given back
        assert generated(llm.generate(prompts(ids), GREEDY)) == own("docs-llama", ids)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def test_drafts_change_no_ids(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = host("docs-llama", speculative_config=NGRAM)
    counts = {"drafted": 0, "accepted": 0}
    runs = StepOutput.runs

    def counted(self: StepOutput) -> list[list[int]]:
        found = runs(self)
        counts["drafted"] += sum(entry.drafts for entry in self.entries)
        counts["accepted"] += sum(len(run) - 1 for run in found)
        return found

    monkeypatch.setattr(StepOutput, "runs", counted)
    ids, long = texts(5), 64
    params = [wish(max_tokens=long, **fields) for fields in ({}, EDITED, SEEDED, {"logprobs": 2}, {})]
    outputs = llm.generate(prompts(ids), params)
    assert counts["drafted"] > counts["accepted"] > 10
    for output, text, fields in zip(outputs, ids, ({}, EDITED, SEEDED, {}, {}), strict=True):
        assert generated([output]) == own("docs-llama", [text], max_tokens=long, **fields)
    logprobs = outputs[3].outputs[0].logprobs
    assert [token in of for token, of in zip(generated(outputs)[3], logprobs, strict=True)] == [True] * long

    # Planted: every draft is accepted.
    from gristmill.integrations.vllm import steps

    monkeypatch.setattr(
        steps,
        "accepted_runs",
        lambda entries, ids: [
            [*entry.draft_tokens, ids[sum(1 + e.drafts for e in entries[: i + 1]) - 1]]
            for i, entry in enumerate(entries)
        ],
    )
    assert generated(llm.generate(prompts(ids), wish(max_tokens=long))) != own(
        "docs-llama", ids, max_tokens=long
    )


def test_the_drafts_have_the_limits_of_vllms_option(host: Host) -> None:
    drafts = worker_of(host("docs-llama", speculative_config=NGRAM)).drafts
    assert isinstance(drafts, Drafts) and drafts.count == 3
    assert drafts.proposer._sizes == (2, 4)


def structured(**fields: Any) -> SamplingParams:
    from vllm.sampling_params import StructuredOutputsParams

    return wish(max_tokens=12, ignore_eos=False, structured_outputs=StructuredOutputsParams(**fields))


@pytest.mark.parametrize(
    "options", [{}, {"speculative_config": NGRAM}, None], ids=["plain", "drafts", "ahead"]
)
def test_structured_outputs(
    options: dict[str, Any] | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = request.getfixturevalue("host" if options is not None else "ahead")
    llm = make("docs-llama", **(options or {}))
    ids = texts(4)
    grammars = [
        structured(choice=["yes", "perhaps"]),
        structured(regex="(ab ){3}c"),
        structured(
            regex="[0-9]{4}",
        ),
        wish(),
    ]
    grammars[2].repetition_penalty = 1.5
    for _ in range(2):  # the second time with other neighbours in flight
        outputs = llm.generate(prompts(ids), grammars)
        found = [output.outputs[0].text for output in outputs]
        assert found[0] in ("yes", "perhaps") and found[1] == "ab ab ab c"
        assert re.fullmatch("[0-9]{4}", found[2])
        assert generated(outputs)[3] == own("docs-llama", ids[3:])[0]
        ids = ids[1:3] + ids[:1] + ids[3:]

    # Planted: what the grammars allow is not taken.
    monkeypatch.setattr(Requests, "allow", lambda self, entries, output: set())
    monkeypatch.setattr(
        ProcessedRows,
        "process",
        lambda self, logits, fed, arrays: (
            logits[self.places].float(),
            torch.tensor(self.places),
            [*map(torch.from_numpy, arrays)],
        ),
    )
    assert llm.generate(prompts(ids[:1]), grammars[1:2])[0].outputs[0].text != "ab ab ab c"
