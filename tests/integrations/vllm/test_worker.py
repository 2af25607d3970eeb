"""The worker under vLLM's scheduler: the ids of gristmill's own runtime, prefix cache, preemption, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

import gristmill
from gristmill.integrations.vllm import HOST, Worker
from gristmill.integrations.vllm.requests import Requests
from gristmill.runtime.errors import UsageError
from tests.integrations.vllm.conftest import MODELS
from tests.runtime.test_weight_update import directory, tensors

Host = Callable[..., Any]
REFUSAL = UsageError if HOST.require().startswith("0.24.") else VLLMValidationError
"""vLLM 0.24 passes a ValueError of a logits processor on, and answers it with HTTP 400 as well."""
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NAMES = ("docs-llama", "docs-deepseek")
BLOCK_SIZES = {"docs-llama": 128, "docs-deepseek": 16}  # what vLLM takes on a CPU


def texts(count: int) -> list[list[int]]:
    """Prompts of the evaluation text, from one token to several chunks of a step."""
    tokens = np.fromfile(MODELS / "eval_tokens.u16", dtype=np.uint16)
    lengths = [1, 7, 128, 257, 600, 16, 33, 90][:count]
    return [tokens[1000 * i : 1000 * i + length].tolist() for i, length in enumerate(lengths)]


def prompts(ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": list(one)} for one in ids]


@cache
def runtime_of(name: str) -> gristmill.LLM:
    """gristmill's own runtime, once for all tests, without what it could keep from one to the next."""
    options: dict[str, Any] = {"block_size": BLOCK_SIZES[name], "enable_prefix_cache": False, "warm": "off"}
    return gristmill.LLM(MODELS / name, dtype="float32", num_blocks=512, **options)


_ANSWERS: dict[str, list[list[int]]] = {}


def own(name: str, ids: Sequence[list[int]], **params: Any) -> list[list[int]]:
    """The ids of gristmill's own runtime; computed once."""
    key = repr((name, ids, sorted(params.items())))
    if key not in _ANSWERS:
        wish = gristmill.SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
        _ANSWERS[key] = [list(done.token_ids) for done in runtime_of(name).generate(list(ids), wish)]
    return _ANSWERS[key]


def generated(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=NAMES)
def engine(request: pytest.FixtureRequest, host: Host) -> Iterator[tuple[str, Any]]:
    yield request.param, host(request.param)


def test_the_ids_are_those_of_the_runtime(engine: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    name, llm = engine
    ids = texts(8)  # several chunks of 256 tokens, mixed with decode steps
    expected = own(name, ids)
    assert generated(llm.generate(prompts(ids), GREEDY)) == expected

    entry = Requests._entry

    def planted(self: Requests, request: str, start: int, count: int, drafts: Any) -> Any:
        made = entry(self, request, start, count, drafts)
        made.tokens = [0, *made.tokens[1:]]  # a wrong first token in every chunk
        return made

    monkeypatch.setattr(Requests, "_entry", planted)
    llm.reset_prefix_cache()
    assert generated(llm.generate(prompts(ids), GREEDY)) != expected


def test_seeded_requests_sample_what_the_runtime_samples(engine: tuple[str, Any]) -> None:
    name, llm = engine
    ids = texts(3)  # one chunk each: a sum in another order may cross the border of top_p
    wish = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11}
    params = SamplingParams(max_tokens=24, ignore_eos=True, **wish)
    together = generated(llm.generate(prompts(ids), params))
    assert together == own(name, ids, **wish)
    assert generated(llm.generate(prompts(ids[2:]), params)) == together[2:]
    other = SamplingParams(max_tokens=24, ignore_eos=True, **{**wish, "seed": 12})
    assert generated(llm.generate(prompts(ids), other)) != together


def test_a_common_prefix_is_read_from_the_cache(engine: tuple[str, Any]) -> None:
    name, llm = engine
    llm.reset_prefix_cache()
    (first,) = llm.generate(prompts([texts(5)[4][:400]]), GREEDY)
    (second,) = llm.generate(prompts([texts(5)[4][:400]]), GREEDY)
    # vLLM 0.32 has no prefix cache for MLA on a CPU; 0.24 has.
    caches = name == "docs-llama" or HOST.require().startswith("0.24.")
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 384 if caches else 0)
    assert generated([first]) == generated([second])


EDITS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {201: -100.0, 13: 4.0}},
    "allowed": {"allowed_token_ids": list(range(200, 400))},
    "bans": {"min_tokens": 20, "stop_token_ids": [201, 16]},
}


@pytest.mark.parametrize("case", EDITS)
def test_edited_logits_give_the_ids_of_the_runtime(engine: tuple[str, Any], case: str) -> None:
    name, llm = engine
    ids = texts(3)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **EDITS[case])
    edited = generated(llm.generate(prompts(ids), params))
    assert edited == own(name, ids, **EDITS[case])
    assert edited != own(name, ids)


def test_bad_words_are_not_generated(host: Host) -> None:
    llm = host("docs-llama")
    for bad, barred in (([], False), (["is"], True)):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=bad)
        (answer,) = llm.generate("The index", params)
        assert (" is " in answer.outputs[0].text) != barred


def test_log_probabilities_are_the_runtimes(engine: tuple[str, Any]) -> None:
    name, llm = engine
    ids = [*texts(5), [5]]  # with a prompt of several chunks, and one whose only token nothing predicts
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(prompts([*ids, [7, 8]]), [params] * len(ids) + [plain])
    assert outputs[-1].outputs[0].logprobs is None and outputs[-1].prompt_logprobs is None
    wish = gristmill.SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    for output, done in zip(outputs, runtime_of(name).generate(ids, wish), strict=False):
        assert generated([output]) == [list(done.token_ids)]
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(done.prompt_logprobs)
        for of_vllm, ours in zip(
            [*output.prompt_logprobs[1:], *output.outputs[0].logprobs],
            [*done.prompt_logprobs[1:], *done.logprobs],
            strict=True,
        ):
            expected = {ours.token_id: ours.logprob, **dict(ours.top)}
            assert {token: one.logprob for token, one in of_vllm.items()} == pytest.approx(expected, abs=1e-3)
            assert of_vllm[ours.token_id].rank == ours.rank


REFUSED = {"logprob_token_ids": [5], "extra_args": {"a": 1}}


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_that_is_not_served_is_refused_by_name(engine: tuple[str, Any], name: str) -> None:
    _, llm = engine
    with pytest.raises(REFUSAL, match=f"the gristmill worker does not serve {name}="):
        llm.generate(prompts([[5, 6]]), SamplingParams(max_tokens=4, **{name: REFUSED[name]}))


def test_the_host_goes_on_after_refusals(engine: tuple[str, Any]) -> None:
    name, llm = engine
    with pytest.raises(REFUSAL, match="the gristmill worker does not serve extra_args="):
        llm.generate(prompts([[5, 6]]), SamplingParams(max_tokens=4, extra_args={"a": 1}))
    with pytest.raises(REFUSAL, match="seed must be an integer of at least 0"):
        llm.generate(prompts([[5, 6]]), SamplingParams(temperature=1, seed=-3))
    assert generated(llm.generate(prompts(texts(2)), GREEDY)) == own(name, texts(2))


def test_preempted_requests_end_with_the_same_ids(host: Host) -> None:
    ids = [text[:100] for text in texts(5)[2:]] * 2
    # 6 requests of up to 220 tokens need 12 blocks of 128 tokens; one of the 8 is vLLM's own.
    options = {"block_size": 128, "num_gpu_blocks_override": 8, "enable_prefix_caching": False}
    llm = host("docs-llama", max_model_len=256, **options)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    outputs = generated(llm.generate(prompts(ids), params))
    preempted = next(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    assert preempted > 0
    assert outputs == own("docs-llama", ids, max_tokens=120)


def test_weights_are_quantized_at_load_by_an_option(host: Host) -> None:
    llm = host("docs-llama", additional_config={"gristmill": {"quant": "int4_g128"}})
    quantized = gristmill.LLM(
        MODELS / "docs-llama", dtype="float32", quant="int4_g128", num_blocks=64, block_size=128
    )
    expected = quantized.generate(texts(3), gristmill.SamplingParams(max_tokens=24, ignore_eos=True))
    assert generated(llm.generate(prompts(texts(3)), GREEDY)) == [list(done.token_ids) for done in expected]
    (rows,) = llm.collective_rpc("explain")
    assert {"int4_g128"} <= {scheme for row in rows if row["op"] == "linear" for scheme in row["formats"]}


def test_new_weights(host: Host, tmp_path: Path) -> None:
    folder, ids = directory("docs-llama", tmp_path / "new", tensors("docs-llama")), texts(3)
    llm = host("docs-llama", additional_config={"gristmill": {"quant": "int4_g128"}})
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 512, "block_size": 128, "quant": "int4_g128"}
    wish = gristmill.SamplingParams(max_tokens=24, ignore_eos=True)
    for path in ("docs-llama", folder, "docs-llama"):
        llm.collective_rpc("gristmill_update_weights", args=(str(MODELS / path),))
        llm.reset_prefix_cache()
        expected = [
            list(done.token_ids) for done in gristmill.LLM(MODELS / path, **options).generate(ids, wish)
        ]
        assert generated(llm.generate(prompts(ids), GREEDY)) == expected
    with pytest.raises(Exception, match="config.json differs from that of the loaded model in architecture"):
        llm.collective_rpc("gristmill_update_weights", args=(str(MODELS / "docs-deepseek"),))
    assert generated(llm.generate(prompts(ids), GREEDY)) == expected


@pytest.mark.parametrize(("dtype", "warmed"), [("bfloat16", True), ("float16", False)])
def test_no_kernel_is_resolved_while_requests_are_served(
    host: Host, dtype: str, warmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.autotune.resolve import Resolver
    from gristmill.integrations.vllm import worker
    from gristmill.runtime.warm_up import WarmUp

    if not warmed:
        monkeypatch.setattr(worker, "warm_up", lambda *_, **named: WarmUp({}, 0, 0))
    # Plans are shared in a process: no other test has this dtype.
    llm = host("docs-llama", dtype=dtype, max_num_batched_tokens=200, max_num_seqs=5)
    asked: list[str] = []
    resolve = Resolver.resolve

    def counted(self: Resolver, op: Any, problem: Any, *rest: Any) -> Any:
        asked.append(f"{op.name} {problem}")
        return resolve(self, op, problem, *rest)

    monkeypatch.setattr(Resolver, "resolve", counted)
    edited = SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2)
    llm.generate(prompts(texts(8)), [GREEDY, edited] * 4)
    assert (asked == []) == warmed


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": (
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}},
        "the method ngram_gpu",
    ),
    "parallel": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    "cache": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    "lora": ({"enable_lora": True}, "LoRA"),
    "format": ({"load_format": "tensorizer"}, "--load-format tensorizer"),
    "overrides": ({"hf_overrides": {"rope_theta": 5.0}}, "--hf-overrides"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_is_not_served_is_refused_at_the_start(case: str, environment: dict[str, str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from gristmill.integrations.vllm.refusals import require_served

    options, message = OPTIONS[case]
    arguments = EngineArgs(str(MODELS / "docs-llama"), worker_cls="gristmill.integrations.vllm.Worker")
    require_served(arguments.create_engine_config())
    for name, value in options.items():
        setattr(arguments, name, value)
    with pytest.raises(gristmill.UsageError, match=message):
        require_served(arguments.create_engine_config())


def test_without_the_plugin_the_worker_names_the_option(environment: dict[str, str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(str(MODELS / "docs-llama")).create_engine_config()
    assert not config.model_config.logits_processors  # another worker's requests are not checked
    with pytest.raises(
        gristmill.UsageError, match="--logits-processors gristmill.integrations.vllm:Admission"
    ):
        Worker(config, 0, 0, "")


def copied(tmp_path: Path, **changes: Any) -> Path:
    """docs-llama with other entries in config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (MODELS / "docs-llama").iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((MODELS / "docs-llama" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_model_that_is_not_mapped_is_one_message(host: Host, tmp_path: Path) -> None:
    folder = copied(tmp_path, architectures=["OPTForCausalLM"], model_type="opt", word_embed_proj_dim=256)
    with pytest.raises(
        gristmill.ConfigError,
        match="architecture OPTForCausalLM is not supported; .*known: .*LlamaForCausalLM",
    ):
        host(folder)
