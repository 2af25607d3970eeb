"""Engines with stores: the ids of an engine without, whatever the stores do; what was computed once is loaded; nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from gristmill.runtime import Runner, SchedulerConfig, load_model
from gristmill.runtime.async_engine import AsyncEngine
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from gristmill.runtime.kv_cache.external import ExternalCache
from gristmill.runtime.kv_cache.size import make_cache
from gristmill.runtime.kv_transfer import blocks as blocks_module
from gristmill.runtime.kv_transfer import record_carrier
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.kv_transfer.statistics import TransferStatus
from gristmill.runtime.kv_transfer.transfer import EVICTED, LATE, NO_MEMORY, NO_ROOM, RAISED, TOO_MUCH
from gristmill.runtime.llm import LLM
from gristmill.runtime.metrics import Metrics
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.tools.cli import cli
from tests.runtime import oracle
from tests.runtime.kv_transfer.faulty_store import FaultyStore
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS
from tests.runtime.test_models import build

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPTS = [oracle.window(0)[:100], oracle.window(1)[:70], oracle.window(3)[:50] + oracle.window(2)[:30], [5]]
WHOLE = 6 * 16 + 4 * 16 + 4 * 16
"""Tokens of the prompts in whole blocks, without the last token of each."""
HOST = "host:1GiB,save_after=1,timeout=60"
"""With a limit that a busy machine does not reach, as every store here."""


def ids(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Returns the ids, after a check of the scheduler, and waits for what is saved."""
    answers = [done.token_ids for done in llm.generate(prompts, PARAMS)]
    llm.engine.scheduler.check()
    assert llm.engine.flush_kv_transfer(60)
    return answers


def again(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[tuple[int, ...]]:
    """Returns the ids with an empty prefix cache."""
    llm.engine.reset_prefix_cache()
    return ids(llm, prompts)


def status(llm: LLM) -> TransferStatus:
    found = llm.engine.status().kv_transfer
    assert found is not None
    return found


@pytest.fixture(scope="module")
def expected(shared: Callable[..., LLM]) -> list[tuple[int, ...]]:
    return [done.token_ids for done in shared(LLAMA).generate(PROMPTS, PARAMS)]


@pytest.fixture
def faulty(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[LLM, FaultyStore]]:
    """Makes a Llama with a store that fails on request."""

    def build(text: str = HOST, **options: Any) -> tuple[LLM, FaultyStore]:
        store = FaultyStore()
        monkeypatch.setattr(KVTransfer, "open", lambda _: store)
        return make(LLAMA, kv_transfer=text, **options), store

    return build


def windowed(make: Callable[..., LLM], folder: Path, **options: Any) -> LLM:
    if not (folder / "config.json").exists():
        kinds = ["sliding_attention", "full_attention"] * 2
        build("gpt-oss", folder, num_hidden_layers=4, layer_types=kinds, sliding_window=16)
    return make(folder, **options)


@pytest.mark.parametrize("name", [LLAMA, DEEPSEEK, "fp8_token_head", "windows"])
def test_what_one_engine_has_saved_another_one_loads(
    name: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    def engine(**options: Any) -> LLM:
        if name == "windows":
            return windowed(make, tmp_path / "gpt-oss", **options)
        if name == "fp8_token_head":
            return make(LLAMA, kv_dtype=name, **options)
        return make(name, **options)

    (tmp_path / "gpt-oss").mkdir()
    prompts = [[token % 300 for token in prompt] for prompt in PROMPTS]
    store = f"file:{tmp_path / 'kv'},save_after=1,timeout=60"
    alone, first, second = engine(), engine(kv_transfer=store), engine(kv_transfer=store)
    expected = ids(alone, prompts)
    assert ids(first, prompts) == expected and status(first).saved_blocks
    assert ids(second, prompts) == expected
    loaded = status(second)
    assert loaded.loaded_tokens == loaded.queried_tokens == WHOLE and not loaded.failures
    assert again(first, prompts) == expected and status(first).loaded_tokens == WHOLE
    other = engine(kv_transfer=store, quant="int8_ch") if name != "windows" else None
    if other is not None:
        ids(other, prompts)
        assert status(other).loaded_tokens == 0, "blocks of other weights are not found"


def test_loaded_blocks_are_those_that_were_computed(make: Callable[..., LLM], tmp_path: Path) -> None:
    """Bit for bit."""
    llm = make(LLAMA, kv_transfer=f"file:{tmp_path},save_after=1,timeout=60")
    prompt = [PROMPTS[0]]
    ids(llm, prompt)

    def content() -> list[torch.Tensor]:
        scheduler, tokens = llm.engine.scheduler, PROMPTS[0]
        hashes: list[int] = []
        scheduler.cache.extend_hashes(hashes, tokens)
        table = scheduler.cache.table(scheduler.cache.match(hashes, tokens))
        return [layer[0][table].clone() for layer in llm.engine.runner.cache.layers]

    before = content()
    again(llm, prompt)
    assert status(llm).loaded_tokens == 96
    for old, new in zip(before, content(), strict=True):
        assert len(old) == 6 and torch.equal(old, new)


def test_a_damaged_record_is_computed_and_replaced(
    make: Callable[..., LLM], tmp_path: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA, kv_transfer=f"file:{tmp_path},save_after=1,timeout=60")
    ids(llm)
    files = sorted(tmp_path.iterdir())
    whole = {file: file.read_bytes() for file in files}
    for file, other in zip(files[1:], files, strict=False):
        file.write_bytes(whole[other])  # blocks of other prefixes
    files[0].write_bytes(whole[files[0]][:-100])
    assert again(llm) == expected
    found = status(llm)
    assert found.loaded_tokens == 0 and found.failures[record_carrier.DAMAGED] == 3, (
        "one each: the first block"
    )
    for _ in range(7):  # each finds the next damaged block of a prompt
        assert again(llm) == expected
    before = status(llm).loaded_tokens
    assert again(llm) == expected and status(llm).loaded_tokens == before + WHOLE

    for file in tmp_path.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    monkeypatch.setattr(record_carrier, "check", lambda *_: None)
    assert again(llm) != expected, "without the check wrong blocks are used"


@pytest.mark.parametrize("fault", ["damage", "swap", "cut", "raise", "forget"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_store_that_fails_costs_a_computation(
    fault: str,
    threads: int,
    faulty: Callable[..., tuple[LLM, FaultyStore]],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_carrier, "THREADS", threads)
    monkeypatch.setattr(record_carrier, "LEAST", 1)
    llm, store = faulty()
    ids(llm)
    store.fault = fault
    assert again(llm) == expected and store.faults
    found = status(llm)
    reason = {"raise": RAISED, "forget": record_carrier.GONE}.get(fault, record_carrier.DAMAGED)
    assert found.failures.keys() == {reason} and found.loaded_tokens == 0
    store.fault = ""
    assert again(llm) == expected and again(llm) == expected
    assert status(llm).loaded_tokens >= WHOLE, "it is used again"


def test_a_store_that_does_not_answer_is_waited_for_once(
    faulty: Callable[..., tuple[LLM, FaultyStore]], expected: list[tuple[int, ...]]
) -> None:
    llm, store = faulty()
    ids(llm)
    store.hang.set()
    object.__setattr__(llm.engine.transfer.config, "timeout", 0.3)
    try:
        llm.engine.reset_prefix_cache()
        begin = time.monotonic()
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == expected
        assert time.monotonic() - begin >= 0.3
        found = status(llm)
        assert found.failures == {LATE: 3} and not found.answers and found.loading == 0
        llm.engine.reset_prefix_cache()
        queried = found.queried_tokens
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == expected
        assert status(llm).queried_tokens == queried, "no request waits for it"
        assert llm.engine.flush_kv_transfer(0.05)
    finally:
        store.hang.clear()
    object.__setattr__(llm.engine.transfer.config, "timeout", 60.0)
    assert llm.engine.transfer._loads.wait(60) and status(llm).answers
    assert again(llm) == expected and status(llm).loaded_tokens == WHOLE


def test_blocks_are_saved_when_they_are_seen_again(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, kv_transfer="host:1GiB,timeout=60")
    ids(llm, PROMPTS[:1])
    assert status(llm).saved_blocks == 0
    ids(llm, [PROMPTS[0][:40] + [1] * 20])
    assert status(llm).saved_blocks == 2, "the two whole blocks that both have"
    ids(llm, PROMPTS[:1])
    ids(llm, PROMPTS[:1])
    assert status(llm).saved_blocks == 6
    reader = make(LLAMA, kv_transfer="host:1GiB,save_after=0")
    for _ in range(3):
        again(reader)
    assert status(reader).saved_blocks == 0


OUTPUT = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize(
    "store", ["host:1GiB,timeout=60", "file:{},timeout=60", "host:300KiB+file:{},timeout=60"]
)
@pytest.mark.parametrize("name", [LLAMA, "windows"])
def test_preempted_requests_get_their_blocks_back(
    name: str, store: str, make: Callable[..., LLM], tmp_path: Path
) -> None:
    def engine(**options: Any) -> LLM:
        if name == "windows":
            return windowed(make, tmp_path / "gpt-oss", **options)
        return make(name, **options)

    (tmp_path / "gpt-oss").mkdir()
    prompts = [[(token + i) % 300 for token in PROMPTS[0][:20]] for i in range(4)]
    expected = [done.token_ids for done in engine().generate(prompts, OUTPUT)]
    blocks = {"num_blocks": 20 if name == "windows" else 13, "max_seqs": 4, "max_batch_tokens": 32}
    llm = engine(kv_transfer=store.format(tmp_path / "kv"), **blocks)
    preemptions = 0
    engine_, transfer = llm.engine, llm.engine.transfer
    for index, prompt in enumerate(prompts):
        engine_.add_request(str(index), prompt, OUTPUT)
    answers: dict[str, list[int]] = {str(index): [] for index in range(4)}
    while engine_.has_unfinished():
        # All four begin together, and a block that is taken from one is in the store, not left in the cache, when it goes on.
        assert transfer._loads.wait(60) and transfer._saves.wait(60)
        for output in engine_.step():
            answers[output.id] += output.new_ids
        preemptions += len(engine_.last_step.preempted) if engine_.last_step else 0
        engine_.scheduler.check()
    assert [tuple(one) for one in answers.values()] == expected
    assert preemptions and status(llm).loaded_tokens and not status(llm).failures


@pytest.mark.parametrize("seed", range(2))
def test_any_requests_with_any_faults_give_the_same_ids(
    seed: int, shared: Callable[..., LLM], faulty: Callable[..., tuple[LLM, FaultyStore]]
) -> None:
    dice = random.Random(seed)
    prompts = [
        PROMPTS[dice.randrange(2)][: dice.randrange(1, 70)] + PROMPTS[1][: dice.randrange(20)]
        for _ in range(24)
    ]
    expected = [done.token_ids for done in shared(LLAMA).generate(prompts, PARAMS)]
    llm, store = faulty(num_blocks=12, max_seqs=4, max_batch_tokens=32)
    store.fault, store.part = "any", 0.2
    engine = llm.engine
    for _ in range(3):  # from the second one on, the store has most of what is asked for
        waiting = dict(enumerate(prompts))
        answers: dict[str, list[int]] = {str(index): [] for index in waiting}
        while waiting or engine.has_unfinished():
            while waiting and dice.random() < 0.5:
                index = next(iter(waiting))
                engine.add_request(str(index), waiting.pop(index), PARAMS)
            for output in engine.step():
                answers[output.id] += output.new_ids
            engine.scheduler.check()
            if dice.random() < 0.02:
                engine.reset_prefix_cache()
        assert [tuple(one) for one in answers.values()] == expected
        assert engine.flush_kv_transfer(60)
        engine.reset_prefix_cache()
    assert status(llm).loaded_tokens > 200 and store.faults > 5
    known = {LATE, RAISED, NO_ROOM, EVICTED, TOO_MUCH, record_carrier.DAMAGED, record_carrier.GONE}
    assert set(status(llm).failures) <= known


def test_requests_that_wait_can_be_aborted_and_outlive_a_pause(
    faulty: Callable[..., tuple[LLM, FaultyStore]], expected: list[tuple[int, ...]]
) -> None:
    llm, store = faulty()
    ids(llm)
    engine = llm.engine
    engine.reset_prefix_cache()
    store.hang.set()
    for index, prompt in enumerate(PROMPTS[:2]):
        engine.add_request(str(index), prompt, PARAMS)
    assert engine.step() == [] and status(llm).loading == 2
    [ended] = engine.abort(["0"])
    assert ended.id == "0" and status(llm).loading == 1
    engine.pause("keep")
    assert engine.paused
    store.hang.clear()
    engine.resume()
    answer: list[int] = []
    while engine.has_unfinished():
        for output in engine.step():
            answer += output.new_ids
    assert tuple(answer) == expected[1] and status(llm).loaded_tokens == 64
    engine.scheduler.check()


def test_a_device_without_memory_for_a_copy_costs_a_computation(
    make: Callable[..., LLM], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(LLAMA, kv_transfer=HOST)
    transfer = llm.engine.transfer
    assert transfer is not None

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(transfer._carrier._blocks, "read", fails)
        assert again(llm) == expected
    assert status(llm).failures.keys() == {NO_MEMORY} and status(llm).saved_blocks == 0
    assert again(llm) == expected and status(llm).saved_blocks
    with monkeypatch.context() as patch:
        patch.setattr(transfer._carrier._blocks, "write", fails)
        assert again(llm) == expected
    assert status(llm).failures[NO_MEMORY] == 6 and status(llm).loaded_tokens == 0
    assert again(llm) == expected and status(llm).loaded_tokens == WHOLE


def test_copies_in_parts(make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "STAGED", 250_000)  # two blocks
    llm = make(LLAMA, kv_transfer=HOST)
    before = ids(llm, PROMPTS[:1])
    assert again(llm, PROMPTS[:1]) == before and status(llm).loaded_tokens == 96


def test_new_weights_do_not_find_the_blocks_of_the_old_ones(make: Callable[..., LLM]) -> None:
    llm = make(LLAMA, kv_transfer=HOST)
    before = ids(llm)
    llm.engine.update_weights(MODELS / LLAMA)
    assert ids(llm) == before and status(llm).loaded_tokens == 0
    assert again(llm) == before and status(llm).loaded_tokens == WHOLE
    llm.engine.sleep()
    llm.engine.wake_up()
    assert ids(llm) == before and status(llm).loaded_tokens == 2 * WHOLE


def test_choices_logprobs_and_steps_in_flight(make: Callable[..., LLM]) -> None:
    params = [
        SamplingParams(max_tokens=6, n=2, temperature=1.0, seed=1),
        SamplingParams(max_tokens=6, prompt_logprobs=1),
        SamplingParams(max_tokens=6, repetition_penalty=1.2),
    ]
    expected = [done.token_ids for done in make(LLAMA).generate(PROMPTS[:3], params)]
    llm = make(LLAMA, kv_transfer=HOST, async_steps=True, speculate=None)
    for _ in range(2):
        llm.engine.reset_prefix_cache()
        done = llm.generate(PROMPTS[:3], params)
        assert [one.token_ids for one in done] == expected
        assert all(token is not None for token in done[2].prompt_logprobs[1:])
        assert llm.engine.flush_kv_transfer(60)
    assert status(llm).loaded_tokens == 6 * 16 + 4 * 16, "the prompt whose logits are read is computed"


def test_an_async_engine_counts_in_its_metrics(
    make: Callable[..., LLM], expected: list[tuple[int, ...]]
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    llm = make(LLAMA, kv_transfer=HOST)

    async def main() -> None:
        async with AsyncEngine(llm, metrics=Metrics("toy", registry)) as engine:
            for _ in range(2):
                done = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in PROMPTS))
                assert [choices[0].token_ids for choices in done] == expected
                assert await engine.call(lambda core: core.flush_kv_transfer(60))
                await engine.call(lambda core: core.reset_prefix_cache())

    asyncio.run(main())
    label = {"model_name": "toy"}
    assert registry.get_sample_value("vllm:external_prefix_cache_queries_total", label) == 2 * WHOLE
    assert registry.get_sample_value("vllm:external_prefix_cache_hits_total", label) == WHOLE
    assert registry.get_sample_value("vllm:kv_transfer_saved_blocks_total", label) == status(llm).saved_blocks


def test_an_external_cache_is_transferred_too(tmp_path: Path, expected: list[tuple[int, ...]]) -> None:
    model = load_model(MODELS / LLAMA, "float32", None, "cpu", None, 16, "auto")
    config = SchedulerConfig(num_blocks=64, block_size=16, max_seqs=4)
    transfer = KVTransfer([f"file:{tmp_path}"], save_after=1, timeout=60, identity="llama")

    def engine(layers: Any) -> Engine:
        cache = ExternalCache(model, layers)
        return Engine.from_parts(Runner(model, cache, max_seqs=4), config, kv_transfer=transfer)

    plain = make_cache(model, 64, 16).layers
    strided = [
        tuple(torch.zeros(64, 2, 16, t.shape[-1]).transpose(1, 2) for t in layer)
        for layer in make_cache(model, 64, 16).layers
    ]
    for layers in (plain, strided):
        core, answers = engine(layers), {}
        for index, prompt in enumerate(PROMPTS):
            core.add_request(str(index), prompt, PARAMS)
        while core.has_unfinished():
            for output in core.step():
                answers.setdefault(output.id, []).extend(output.new_ids)
        assert [tuple(answers[str(index)]) for index in range(4)] == expected
        assert core.flush_kv_transfer(60)
    found = core.status().kv_transfer
    assert found is not None and found.loaded_tokens == WHOLE
    core.close()


@pytest.fixture
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    yield {"kv_transfer": "host:1GiB", **request.param}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_cache": False}, "cannot be combined with enable_prefix_cache=False"),
        ({"speculate": f"draft:{MODELS / LLAMA}"}, "kv_transfer cannot be combined with speculate='draft'"),
        ({"kv_transfer": "tape"}, "unknown KV store 'tape'"),
    ],
    indirect=["options"],
)
def test_what_does_not_go_together_is_refused(
    options: dict[str, Any], message: str, make: Callable[..., LLM]
) -> None:
    with pytest.raises(UsageError, match=message):
        make(LLAMA, **options)


def test_parts_need_an_identity(shared: Callable[..., LLM]) -> None:
    runner = shared(LLAMA).engine.runner
    config = SchedulerConfig(num_blocks=runner.cache.num_blocks, max_seqs=runner.max_seqs)
    with pytest.raises(UsageError, match=r"give KVTransfer\(identity=...\)"):
        Engine.from_parts(runner, config, kv_transfer="host:1GiB")


def test_the_command_line_saves_and_loads(policy_file: Callable[[], Path], tmp_path: Path) -> None:
    policy_file()
    command = ["generate", "--model", str(MODELS / LLAMA), "--prompt", "The index of all words. " * 8]
    command += ["--max-tokens", "4", "--kv-transfer", f"file:{tmp_path},save_after=1"]
    first, second = (
        json.loads(CliRunner().invoke(cli, [*command, "--json"], catch_exceptions=False).stdout)
        for _ in range(2)
    )
    assert first["token_ids"] == second["token_ids"]
    assert first["kv_transfer"]["saved_blocks"] and not first["kv_transfer"]["loaded_tokens"]
    assert second["kv_transfer"]["loaded_tokens"] == second["kv_transfer"]["queried_tokens"] > 0
    shown = CliRunner().invoke(cli, [*command, "--stats"], catch_exceptions=False)
    assert "tokens loaded" in shown.stderr
