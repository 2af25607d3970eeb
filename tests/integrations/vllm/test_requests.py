"""Steps of vLLM's scheduler as entries of the runner: its own data classes, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

from gristmill import UsageError
from gristmill.integrations.vllm import HOST
from gristmill.integrations.vllm.cache import BlockTables
from gristmill.integrations.vllm.requests import Requests
from gristmill.integrations.vllm.sampling import SERVED_BY_RUNTIME, SERVED_BY_VLLM, check, translate, unserved
from gristmill.runtime.logits_processors import LogitsProcessors
from tests.runtime.processed import cpu_plans

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}


def config_of(*groups: tuple[Any, list[int]]) -> Any:
    """A KVCacheConfig as far as it is read."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{layer}" for layer in layers])
            for spec, layers in groups
        ]
    )


def requests_of() -> Requests:
    tables = BlockTables(config_of((FullAttentionSpec(**SHAPE), [0])))
    return Requests(0, LogitsProcessors(100, cpu_plans()), tables, 4)


def new(name: str, prompt: list[int], blocks: list[int], computed: int = 0, **fields: Any) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(temperature=0),
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=computed,
        lora_request=None,
        **fields,
    )


def step(
    news: tuple[NewRequestData, ...] = (),
    cached: dict[str, tuple[int, list[int] | None, int]] | None = None,
    counts: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
    finished: tuple[str, ...] = (),
) -> SchedulerOutput:
    """cached: name -> (computed tokens, new blocks, output tokens). counts: name -> scheduled tokens."""
    output, cached = SchedulerOutput.make_empty(), cached or {}
    output.scheduled_new_reqs = list(news)
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=set(resumed),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in cached.values()],
        num_computed_tokens=[computed for computed, _, _ in cached.values()],
        num_output_tokens=[count for _, _, count in cached.values()],
    )
    output.num_scheduled_tokens = counts or {}
    output.total_num_scheduled_tokens = sum((counts or {}).values())
    output.finished_req_ids = set(finished)
    return output


def append(requests: Requests, entries: list[Any], ids: list[int]) -> None:
    """A step is computed, and has sampled these ids."""
    requests.sampled(requests.sampling(entries), [[token] for token in ids])


def shown(entries: list[Any]) -> list[tuple[Any, ...]]:
    return [(e.id, e.start, e.tokens, e.samples, e.block_ids) for e in entries]


def test_chunks_of_a_prompt_then_its_tokens() -> None:
    requests = requests_of()
    entries = requests.step(step((new("a", [1, 2, 3, 4, 5], [7]),), counts={"a": 3}))
    assert shown(entries) == [("a", 0, [1, 2, 3], False, [7])]
    append(requests, entries, [])
    entries = requests.step(step(cached={"a": (3, [9], 0)}, counts={"a": 2}))
    assert shown(entries) == [("a", 3, [4, 5], True, [7, 9])]
    assert [row.index for _, row in requests.rows(entries)] == [0]
    append(requests, entries, [42])
    entries = requests.step(step(cached={"a": (5, None, 1)}, counts={"a": 1}))
    assert shown(entries) == [("a", 5, [42], True, [7, 9])]
    assert [row.index for _, row in requests.rows(entries)] == [1]
    assert requests.step(step(finished=("a",))) == [] and not requests.active


def test_a_prefix_that_is_in_the_cache_is_not_computed() -> None:
    entries = requests_of().step(step((new("a", [1, 2, 3, 4, 5], [7, 9], computed=4),), counts={"a": 1}))
    assert shown(entries) == [("a", 4, [5], True, [7, 9])]


def test_a_preempted_request_gets_other_blocks_and_keeps_its_tokens_and_its_seed() -> None:
    requests = requests_of()
    for known, cached in ((None, None), (42, {"a": (2, None, 1)})):
        output = step(() if cached else (new("a", [1, 2], [7]),), cached, {"a": 1 if cached else 2})
        entries = requests.step(output)
        append(requests, entries, [42 if known is None else 43])
    seed = requests.active["a"].seed
    again = step(cached={"a": (0, [3, 4], 2)}, counts={"a": 4}, resumed=("a",))
    entries = requests.step(again)
    assert shown(entries) == [("a", 0, [1, 2, 42, 43], True, [3, 4])]
    # Model Runner V2's scheduler sends it as a new request.
    entries = requests.step(step((new("a", [1, 2], [5], prefill_token_ids=[1, 2, 42, 43]),), counts={"a": 4}))
    assert shown(entries) == [("a", 0, [1, 2, 42, 43], True, [5])]
    assert (requests.active["a"].seed, requests.active["a"].row.index) == (seed, 2)


def test_a_scheduler_that_runs_ahead_takes_tokens_back() -> None:
    requests = requests_of()
    append(requests, requests.step(step((new("a", [1, 2], [7]),), counts={"a": 2})), [42])
    append(requests, requests.step(step(cached={"a": (2, None, 1)}, counts={"a": 1})), [43])
    entries = requests.step(step(cached={"a": (2, None, 1)}, counts={"a": 1}))
    assert shown(entries) == [("a", 2, [42], True, [7])]


def test_tokens_that_are_not_there_are_an_error() -> None:
    requests = requests_of()
    with pytest.raises(RuntimeError, match="scheduled tokens 0 to 3, and it has 2"):
        requests.step(step((new("a", [1, 2], [7]),), counts={"a": 3}))


def test_drafts_follow_the_known_tokens() -> None:
    requests = requests_of()
    append(requests, requests.step(step((new("a", [1, 2], [7]),), counts={"a": 2})), [42])
    output = step(cached={"a": (2, None, 1)}, counts={"a": 3})
    output.scheduled_spec_decode_tokens = {"a": [5, 6]}
    (entry,) = requests.step(output)
    assert (entry.start, entry.tokens, entry.samples, entry.draft_tokens) == (2, [42, 5, 6], True, [5, 6])
    requests.sampled(requests.sampling([entry]), [[5, 9]])  # the second draft is rejected
    (entry,) = requests.step(step(cached={"a": (4, None, 3)}, counts={"a": 1}))
    assert (entry.start, entry.tokens, entry.drafts) == (4, [9], 0)


@pytest.mark.parametrize("rows", [[1, 2, 3, 9], [1, 2, 3, 0, 9, 0, 0, 0]], ids=["0.32", "0.33"])
def test_rows_of_grammars(rows: list[int]) -> None:
    requests = requests_of()
    for name, prompt in (("a", [1]), ("b", [2]), ("c", [3])):
        one = new(name, prompt, [7])
        if name != "b":
            one.sampling_params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        append(requests, requests.step(step((one,), counts={name: 1})), [42])
    output = step(cached=dict.fromkeys("abc", (1, None, 1)), counts={"a": 3, "b": 1, "c": 1})
    output.scheduled_spec_decode_tokens = {"a": [5, 6]}
    entries = requests.step(output)
    given = SimpleNamespace(
        structured_output_request_ids=["a", "c"], grammar_bitmask=np.array(rows, np.int32)[:, None]
    )
    assert requests.allow(entries, given) == {"a", "c"}
    grammars = [requests.active[name].grammar for name in "ac"]
    assert [g.mask.flatten().tolist() for g in grammars if g and g.mask is not None] == [[1, 2, 3], [9]]
    assert requests.allow(entries, None) == {"a", "c"}
    assert [g.mask for g in grammars if g] == [None, None], "vLLM limits nothing while a model reasons"


def test_a_token_in_flight_is_read_on_the_device() -> None:
    requests = requests_of()
    first = requests.step(step((new("a", [1, 2], [7]), new("b", [3], [8])), counts={"a": 2, "b": 1}))
    sampling = requests.sampling(first)
    # Sent before the results of the first step: vLLM counts the tokens that it has not seen.
    second = requests.step(step(cached={"a": (2, None, 1), "b": (1, None, 1)}, counts={"a": 1, "b": 1}))
    assert shown(second) == [("a", 2, None, True, [7]), ("b", 1, None, True, [8])]
    assert [entry.row for entry in first] == [entry.row for entry in second]
    assert [row.index for _, row in requests.rows(second)] == [1, 1]
    later = requests.sampling(second)
    requests.sampled(sampling, [[42], [43]])
    requests.sampled(later, [[44], [45]])
    # b waits for a step, and gives its row to c.
    third = requests.step(step((new("c", [9], [6]),), {"a": (3, None, 2)}, {"a": 1, "c": 1}, finished=("b",)))
    assert shown(third) == [("a", 3, [44], True, [7]), ("c", 0, [9], True, [6])]
    assert third[1].row != third[0].row


def test_a_token_in_flight_that_is_taken_back_does_not_come() -> None:
    requests = requests_of()
    sampling = requests.sampling(requests.step(step((new("a", [1, 2], [7]),), counts={"a": 2})))
    again = requests.step(step(cached={"a": (0, [5], 0)}, counts={"a": 2}, resumed=("a",)))
    assert shown(again) == [("a", 0, [1, 2], True, [5])]
    later = requests.sampling(again)
    requests.sampled(sampling, [[42]])
    requests.sampled(later, [[43]])
    assert requests.active["a"].tokens == [1, 2, 43]


SAMPLES: dict[str, Any] = {
    "extra_args": {"a": 1},
    "logprob_token_ids": [1],
    "prompt_logprob_token_ids": [[1]],
    "trace_decode_token_ids": [1],
    "watermarking": True,
}


def fields() -> list[Any]:
    served = SERVED_BY_RUNTIME | SERVED_BY_VLLM
    return [f for f in msgspec.structs.fields(SamplingParams) if f.name not in served and f.name[0] != "_"]


def test_the_parameters_that_are_served_exist() -> None:
    known = {field.name for field in msgspec.structs.fields(SamplingParams)}
    newer = {"stream_interval"} if HOST.require().startswith("0.24.") else set()
    assert (SERVED_BY_RUNTIME | SERVED_BY_VLLM) - known == newer


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.name)
def test_every_other_parameter_is_refused(field: Any) -> None:
    params = SamplingParams(temperature=0.5, top_k=3, stop=["a"], n=2, seed=1)
    check(params)
    setattr(params, field.name, SAMPLES.get(field.name, 3))
    assert len(fields()) > (3 if HOST.require().startswith("0.24.") else 7)
    assert [text.partition("=")[0] for text in unserved(params)] == [field.name]
    with pytest.raises(UsageError, match=f"does not serve {field.name}="):
        check(params)


def test_values_are_translated() -> None:
    params = translate(SamplingParams(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.05, seed=5))
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (
        0.7,
        0,
        0.9,
        0.05,
        5,
    )
    assert translate(SamplingParams(temperature=0, top_k=7)).temperature == 0


def test_requests_that_edit_logits_are_processed_until_they_end() -> None:
    requests = requests_of()
    one = new("a", [1, 2], [7])
    one.sampling_params = SamplingParams(temperature=0, repetition_penalty=1.5, logit_bias={3: 2.0})
    entries = requests.step(step((one, new("b", [1], [8])), counts={"a": 2, "b": 1}))
    assert len(requests.processors) == 1
    append(requests, entries, [42, 43])
    again = step(cached={"a": (0, [5], 0)}, counts={"a": 2}, resumed=("a",))
    assert shown(requests.step(again)) == [
        ("a", 0, [1, 2], True, [5])
    ]  # 42 is taken back, and no longer penalized
    assert len(requests.processors) == 1
    requests.step(step(finished=("a",)))
    assert len(requests.processors) == 0
