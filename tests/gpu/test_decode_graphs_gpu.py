"""Decode steps as CUDA graphs: same ids as without graphs, under preemption and prefix caching, and on two
streams."""

from __future__ import annotations

import threading

import pytest
import torch

from gristmill.autotune.captures import capturing
from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.kernel import Workspace
from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.decode_graphs import DecodeGraph, DecodeGraphs
from gristmill.runtime.engine import Engine
from gristmill.runtime.kv_cache.paged import PagedCache
from gristmill.runtime.layers.plans import Workspaces
from gristmill.runtime.llm import LLM
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import SchedulerConfig
from gristmill.runtime.speculation.config import Speculation
from tests.runtime import oracle
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS

pytestmark = pytest.mark.gpu
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3),
    SamplingParams(max_tokens=17, temperature=1.2, top_k=20, top_p=0.9, seed=5),
    SamplingParams(max_tokens=30),
]
# The rows of these kernels do not depend on the batch: a padded step gives the same bits.
TRITON = Policy(pins={"*": ("*_triton",)}, strict=True, origin="strict Triton")


def prompts() -> list[list[int]]:
    start = oracle.eval_tokens()[:40]
    return [start + oracle.eval_tokens()[n : n + 7] for n in (100, 200, 300, 400)] + [start] * 3


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK])
@pytest.mark.parametrize("method", ["ngram:4", "draft"])
def test_same_ids_with_drafts(model: str, method: str) -> None:
    """Verified steps are captured, those of the draft model too, and give the ids of single tokens without graphs."""
    speculate = Speculation(
        method.split(":")[0], 4, MODELS / LLAMA if method == "draft" else None, adaptive=False
    )
    options = {"dtype": "fp32", "device": "cuda", "policy": TRITON, "num_blocks": 256}
    without = LLM(MODELS / model, warm="off", decode_graphs=False, **options)
    through = LLM(MODELS / model, warm="off", decode_graphs=True, speculate=speculate, **options)
    params = [PARAMS[i % 4] for i in range(len(prompts()))]
    assert through.generate(prompts(), params) == without.generate(prompts(), params)
    status = through.engine.status().speculation
    assert status is not None and status.accepted_tokens > 0
    verified = [row for row in through.explain_graphs() if row["tokens_per_seq"] == 5]
    assert verified and all(row["captured"] for row in verified)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 14, "max_seqs": 4}, {"max_chunk": 8}],
    ids=["plain", "preemption", "chunks"],
)
@pytest.mark.parametrize("quant", [None, "int4_g128"])
def test_same_ids(quant: str | None, options: dict[str, int]) -> None:
    engine_options = {"num_blocks": 256, **options}
    without, through = (
        LLM(
            MODELS / LLAMA,
            warm="off",
            dtype="fp32",
            quant=quant,
            device="cuda",
            policy=TRITON,
            decode_graphs=on,
            **engine_options,
        )
        for on in (False, True)
    )
    params = [PARAMS[i % 4] for i in range(7)]
    expected = without.generate(prompts(), params)
    assert through.generate(prompts(), params) == expected
    assert through.generate(prompts(), params) == expected  # replays only
    rows = through.explain_graphs()
    assert (
        all(row["captured"] for row in rows if row["seqs"])
        and sum(row["steps"] for row in rows if row["seqs"]) > 40
    )


def test_processed_logits() -> None:
    """Steps whose logits are processed replay graphs that end with the logits; penalties, bans and
    log-probabilities are computed on the device."""
    without, through = (
        LLM(
            MODELS / LLAMA,
            warm="off",
            dtype="fp32",
            device="cuda",
            policy=TRITON,
            decode_graphs=on,
            num_blocks=256,
        )
        for on in (False, True)
    )
    params = [
        SamplingParams(max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(
            max_tokens=20, temperature=1.0, seed=1, frequency_penalty=0.5, logprobs=3, ignore_eos=True
        ),
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, bad_words=[[5], [6, 7]], logit_bias={9: 3.0}, min_tokens=10),
        SamplingParams(max_tokens=20, allowed_token_ids=range(50, 900), ignore_eos=True),
        SamplingParams(max_tokens=20, prompt_logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=20, presence_penalty=1.0, ignore_eos=True),
    ]
    expected = [result.token_ids for result in without.generate(prompts(), params)]
    for _ in range(2):
        assert [result.token_ids for result in through.generate(prompts(), params)] == expected
    rows = [row for row in through.explain_graphs() if row["seqs"]]
    assert rows and all(row["captured"] for row in rows) and sum(row["steps"] for row in rows) > 30


def test_a_capture_without_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its graph is left out, what it took is given back, and later captures into the same pool succeed."""
    options = {"dtype": "fp32", "device": "cuda", "policy": TRITON, "num_blocks": 256}
    without, through = (LLM(MODELS / LLAMA, warm="off", decode_graphs=on, **options) for on in (False, True))
    compute, failed = DecodeGraphs.compute, []

    def exhausting(graphs: DecodeGraphs, made: DecodeGraph) -> None:
        compute(graphs, made)
        if torch.cuda.is_current_stream_capturing() and made.seqs > 2:
            failed.append(made.seqs)
            kept = torch.empty(1 << 26, device="cuda")  # of the pool of the graphs
            torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
            del kept

    monkeypatch.setattr(DecodeGraphs, "compute", exhausting)
    params = [SamplingParams(max_tokens=8 * (1 + i), ignore_eos=True) for i in range(7)]
    expected = without.generate(prompts(), params)
    assert through.generate(prompts(), params) == expected
    rows = {row["seqs"]: row for row in through.explain_graphs() if row["seqs"]}
    assert {seqs: row["captured"] for seqs, row in rows.items()} == {1: True, 2: True, 4: False, 8: False}
    assert rows[8]["reason"] == "there was no memory to capture it" and failed == [8, 8, 4, 4]
    assert len([record for record in caplog.records if "no memory to capture" in record.message]) == 1
    before = torch.cuda.memory_reserved()
    assert through.generate(prompts(), params) == expected
    assert torch.cuda.memory_reserved() <= before + (1 << 26)
    monkeypatch.setattr(DecodeGraphs, "compute", compute)
    params = [SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=1.2)] * 14
    assert through.generate(prompts() * 2, params) == without.generate(prompts() * 2, params)
    assert any(row["captured"] and row["seqs"] == 16 for row in through.explain_graphs())


@pytest.mark.parametrize("quant", [None, "int4_g128"])
def test_a_warm_up_captures_most_steps_at_once(quant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without running them first, by whatever kernels selection chooses; ids are those of graphs that have run."""
    run_before, ran = DecodeGraphs._run_before, []

    def counted(graphs: DecodeGraphs, made: DecodeGraph, stream: torch.cuda.Stream) -> None:
        ran.append((made.seqs, made.bound))
        run_before(graphs, made, stream)

    monkeypatch.setattr(DecodeGraphs, "_run_before", counted)
    options = {"dtype": "bf16", "quant": quant, "device": "cuda", "num_blocks": 256, "max_seqs": 256}
    llm = LLM(MODELS / LLAMA, **options)
    rows = [row for row in llm.explain_graphs() if row["seqs"]]
    assert len(rows) > 10 and all(row["captured"] for row in rows)
    assert 0 < len(ran) <= len(rows) // 2, f"{len(ran)} of {len(rows)} ran: {ran}"
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    answers = [llm.generate(prompts(), params) for _ in range(2)]
    first = LLM(MODELS / LLAMA, warm="off", **options)  # captures what it needs as it needs it
    assert [first.generate(prompts(), params) for _ in range(2)] == answers


def test_memory_of_graphs_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that has reached its bound gives the ids of one without; what it counts is what the device lost."""
    options = {
        "dtype": "fp32",
        "device": "cuda",
        "policy": TRITON,
        "num_blocks": 256,
        "max_seqs": 64,
        "max_batch_tokens": 256,
        "prompt_graphs": 0,  # their memory is counted together with that of decode graphs
    }
    free = LLM(MODELS / LLAMA, **options)
    rows = [row for row in free.explain_graphs() if row["seqs"]]
    taken = free.engine.status().graph_bytes
    assert (
        len(rows) > 10 and all(row["captured"] for row in rows) and sum(row["bytes"] for row in rows) == taken
    )
    assert taken is not None and taken >= 1 << 21 and free.engine.warmed is not None
    assert free.engine.warmed.graph_bytes == taken
    bound = LLM(MODELS / LLAMA, graph_memory=taken // 2, **options)
    left_out = [row["seqs"] for row in bound.explain_graphs() if row["seqs"] and not row["captured"]]
    used = bound.engine.status().graph_bytes
    assert 64 in left_out and used is not None and used <= taken // 2
    said = [record.getMessage() for record in caplog.records if "graph_memory allows" in record.getMessage()]
    assert len(said) == 1 and "64" in said[0]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert bound.generate(prompts(), params) == free.generate(prompts(), params)


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK])
def test_default_kernels_in_bf16(name: str) -> None:
    """Whatever kernels selection chooses can be captured; the ids need not be bitwise equal to those without
    graphs."""
    llm = LLM(MODELS / name, warm="off", dtype="bf16", quant="int4_g128", device="cuda", num_blocks=256)
    results = llm.generate(prompts(), SamplingParams(max_tokens=20, ignore_eos=True))
    assert all(len(result.token_ids) == 20 for result in results)
    assert {row["captured"] for row in llm.explain_graphs() if row["seqs"]} == {True}


def test_a_kernel_that_cannot_be_captured_is_named() -> None:
    policy = Policy(pins={"moe": ("moe_chain_torch",)}, origin="torch experts")
    llm = LLM(MODELS / DEEPSEEK, warm="off", dtype="fp32", device="cuda", policy=policy, num_blocks=64)
    completions = llm.generate([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    assert len(completions[0].token_ids) == 5
    (row,) = [r for r in llm.explain_graphs() if r["seqs"]]
    assert not row["captured"] and "moe_chain_torch" in row["reason"] and row["steps"] == 0


def test_two_engines_on_two_streams() -> None:
    """One model with two caches on two threads, each with its stream: graphs and workspaces are separate."""
    llm = LLM(
        MODELS / LLAMA,
        warm="off",
        dtype="fp32",
        quant="int4_g128",
        device="cuda",
        policy=TRITON,
        num_blocks=128,
    )
    model, config = llm.model, SchedulerConfig(num_blocks=128, max_seqs=8)
    answers: dict[int, list[list[int]]] = {}

    def serve(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            engine = Engine.from_parts(runners[index], config)
            for place, prompt in enumerate(prompts()):
                engine.add_request(str(place), prompt, SamplingParams(max_tokens=40, ignore_eos=True))
            ids: list[list[int]] = [[] for _ in prompts()]
            while engine.has_unfinished():
                for output in engine.step():
                    ids[int(output.id)] += output.new_ids
            answers[index] = ids

    runners = [
        Runner(model, PagedCache(model.config, 128, 16, model.plans.dtype, model.plans.device))
        for _ in range(2)
    ]
    serve(0)
    expected = answers.pop(0)
    serve(1)
    assert answers.pop(1) == expected  # both engines have their graphs: what follows only replays
    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {0: expected, 1: expected}


def test_workspaces_of_streams_and_graphs() -> None:
    workspaces = Workspaces(torch.device("cuda", 0))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        workspace = workspaces.take("a", Workspace(1000))
        held = workspaces.held()
    with torch.cuda.stream(second):
        assert (
            workspaces.take("a", Workspace(1000)) is not workspace and workspaces.held()[0] is not workspace
        )
    assert workspace is not None and len(held) == 1 and held[0] is workspace
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, stream=first):
        workspace.add_(1)
        with pytest.raises(UnpreparedError, match="a workspace of 2000 bytes"):
            workspaces.take("a", Workspace(2000))
