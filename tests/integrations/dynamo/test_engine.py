"""The engine class with Dynamo's real base classes, contexts and errors: ids, cancellation, events, load, controls, clean-up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo._core import Context
from dynamo.common.backend.engine import LLMEngine
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

from gristmill import LLM, SamplingParams
from gristmill.integrations.dynamo import GristmillEngine
from gristmill.runtime.engine import Engine
from gristmill.runtime.errors import UsageError
from tests.integrations.slow_steps import slow_step
from tests.runtime.oracle import LLAMA, MODELS, window

MODEL = str(MODELS / LLAMA)
PROMPT = window(4, 50)
GREEDY = {"sampling_options": {"temperature": 0.0}}
ARGUMENTS = [
    "--model",
    MODEL,
    "--option",
    "dtype=fp32",
    "--option",
    "num_blocks=256",
    "--option",
    "max_queued=4",
]


class Publisher:
    """What Dynamo hands over, as a record."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.snapshots: list[Any] = []

    def publish_batch(self, events: list[dict[str, Any]]) -> None:
        assert all(-(2**63) <= hash_ < 2**63 for event in events for hash_ in event["block_hashes"])
        self.events += events

    def publish(self, rank: int, snapshot: Any) -> None:
        assert rank == snapshot.dp_rank == 0
        self.snapshots.append(snapshot)


def request(**changes: Any) -> dict[str, Any]:
    return {
        "token_ids": PROMPT,
        **GREEDY,
        "stop_conditions": {"max_tokens": 8, "ignore_eos": True},
        **changes,
    }


async def ask(engine: GristmillEngine, **changes: Any) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(request(**changes), Context())]


def run(work: Callable[[GristmillEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine, _ = await GristmillEngine.from_args(ARGUMENTS)
        try:
            await engine.start(1)
            await work(engine)
        finally:
            await engine.cleanup()
            await engine.cleanup()
        with pytest.raises(EngineShutdown, match="was cleaned up"):
            await ask(engine)

    asyncio.run(main())


@pytest.fixture(scope="module")
def expected(environment: dict[str, str]) -> list[int]:
    llm = LLM(MODEL, dtype="fp32", num_blocks=256)
    return list(llm.generate([PROMPT], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids)


def test_registration(environment: dict[str, str]) -> None:
    async def main() -> None:
        engine, worker = await GristmillEngine.from_args([*ARGUMENTS, "--served-model-name", "docs"])
        assert isinstance(engine, LLMEngine) and not GristmillEngine.__abstractmethods__
        assert (worker.model_name, worker.served_model_name) == (MODEL, "docs")
        config = await engine.start(7)
        assert config.model == MODEL and config.served_model_name == "docs" and config.llm is not None
        assert (config.llm.context_length, config.llm.kv_cache_block_size) == (4096, 16)
        assert (config.llm.total_kv_blocks, config.llm.max_num_seqs) == (256, 64)
        await engine.cleanup()

    asyncio.run(main())


def test_ids_and_usage(expected: list[int]) -> None:
    async def work(engine: GristmillEngine) -> None:
        chunks = await ask(engine)
        assert [token for chunk in chunks for token in chunk["token_ids"]] == expected
        assert [chunk.get("finish_reason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1]["completion_usage"] == {
            "prompt_tokens": 50,
            "completion_tokens": 8,
            "total_tokens": 58,
        }
        several = await asyncio.gather(*(ask(engine) for _ in range(4)))
        assert all([t for chunk in chunks for t in chunk["token_ids"]] == expected for chunks in several)
        two = await ask(engine, sampling_options={"temperature": 1.0, "n": 2, "seed": 1})
        assert {chunk["index"] for chunk in two} == {0, 1}
        ends = [chunk["completion_usage"]["completion_tokens"] for chunk in two if "finish_reason" in chunk]
        assert ends == [8, 8]

    run(work)


def test_guided_decoding(environment: dict[str, str]) -> None:
    async def work(engine: GristmillEngine) -> None:
        options = {"temperature": 0.0, "guided_decoding": {"choice": ["yes", "no"]}}
        chunks = await ask(engine, sampling_options=options, stop_conditions={"max_tokens": 8})
        ids = [token for chunk in chunks for token in chunk["token_ids"]]
        assert LLM(MODEL, num_blocks=256).tokenizer.decode(ids) in ("yes", "no")

    run(work)


def test_cancellation(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "step", slow_step)

    async def work(engine: GristmillEngine) -> None:
        assert engine.engine is not None
        context, chunks = Context(), []
        long = request(stop_conditions={"max_tokens": 3000, "ignore_eos": True})
        async for chunk in engine.generate(long, context):
            chunks.append(chunk)
            if len(chunks) == 2:
                await engine.abort(context)
        assert chunks[-1]["finish_reason"] == "cancelled" and len(chunks) < 100
        assert (await engine.engine.check_health()).running == 0
        await engine.abort(context)  # it has ended
        dropped = engine.generate(long, Context())
        await anext(dropped)
        await dropped.aclose()
        assert (await engine.engine.check_health()).running == 0

    run(work)


def test_events_and_load(environment: dict[str, str]) -> None:
    async def work(engine: GristmillEngine) -> None:
        publisher = Publisher()
        assert engine.engine is not None
        await ask(engine)  # when the publisher comes, it gets what the cache holds
        [source] = await engine.kv_event_sources()
        assert publisher.events == []
        source.on_ready(publisher)
        await engine.engine.check_health()
        [first, *_] = publisher.events
        assert (
            first["type"] == "stored" and first["token_ids"] == PROMPT[:48] and first["parent_hash"] is None
        )
        assert first["num_block_tokens"] == [16, 16, 16] and len(set(first["block_hashes"])) == 3

        assert engine.component_metrics_dp_ranks() == [0]
        engine.attach_snapshot_publisher(publisher)
        await ask(engine)
        assert publisher.snapshots[0].kv_used_blocks > 0 and publisher.snapshots[0].kv_total_blocks == 256
        assert publisher.snapshots[-1].kv_cache_hit_rate == 48 / 100
        assert publisher.snapshots[-1].gpu_cache_usage == 0.0

        stored = {h for event in publisher.events for h in event["block_hashes"]}
        assert await engine.engine_control("reset_prefix_cache", {}) == {"status": "ok"}
        assert publisher.events[-1] == {"type": "removed", "block_hashes": sorted(stored)}
        await engine.cleanup()
        count = len(publisher.events)
        engine.events([])
        assert len(publisher.events) == count

    run(work)


def test_no_events_without_routing(environment: dict[str, str]) -> None:
    async def main() -> None:
        engine, worker = await GristmillEngine.from_args([*ARGUMENTS, "--disable-kv-routing"])
        assert worker.enable_kv_routing is False
        await engine.start(1)
        assert engine.engine is not None
        assert len(await ask(engine)) > 0 and await engine.kv_event_sources() == []
        assert await engine.engine.call(lambda e: e.take_cache_events()) == []
        await engine.cleanup()

    asyncio.run(main())


def test_refusals(environment: dict[str, str]) -> None:
    async def work(engine: GristmillEngine) -> None:
        for changes, message in (
            ({"token_ids": []}, "the prompt is empty"),
            ({"token_ids": [5] * 4096}, "can never run: 4096 prompt tokens"),
            ({"sampling_options": {"best_of": 3}}, "does not serve best_of = 3"),
        ):
            with pytest.raises(InvalidArgument, match=message):
                await ask(engine, **changes)
        assert await engine.engine_control("pause", {"mode": "keep"}) == {"status": "ok"}
        waiting = [asyncio.create_task(ask(engine)) for _ in range(4)]
        assert engine.engine is not None
        async with asyncio.timeout(60):
            while (await engine.engine.check_health()).waiting < 4:
                await asyncio.sleep(0.01)
        with pytest.raises(WorkerUnavailable, match="4 requests are waiting, which is max_queued"):
            await ask(engine)
        assert await engine.engine_control("resume", {}) == {"status": "ok"}
        assert all([(await task)[-1]["finish_reason"] == "length" for task in waiting])

    run(work)


def test_controls_and_updates(expected: list[int]) -> None:
    async def work(engine: GristmillEngine) -> None:
        assert engine.supported_controls() == {"pause", "resume", "sleep", "wake_up", "reset_prefix_cache"}
        assert await engine.engine_control("sleep", {"level": 2}) == {"status": "ok"}
        answer = await engine.engine_control("sleep", {})
        assert answer == {"status": "error", "message": "the engine sleeps already: call wake_up first"}
        task = asyncio.create_task(ask(engine))
        assert await engine.engine_control("wake_up", {"tags": ["weights"]}) == {"status": "ok"}
        assert await engine.engine_update("update_weights", {"path": MODEL}) == {"status": "ok"}
        assert await engine.engine_control("wake_up", {}) == {"status": "ok"}
        assert [token for chunk in await task for token in chunk["token_ids"]] == expected
        other = await engine.engine_update("update_weights", {"path": str(MODELS / "docs-deepseek")})
        assert other["status"] == "error" and "differs from that of the loaded model" in other["message"]
        for answer in (
            await engine.engine_control("explode", {}),
            await engine.engine_update("explode", {}),
            await engine.engine_update("update_weights", {}),
        ):
            assert answer["status"] == "error"

    run(work)


def test_chat_needs_a_template(environment: dict[str, str], tmp_path: Path) -> None:
    def endpoints(*more: str) -> str:
        _, worker = asyncio.run(GristmillEngine.from_args(["--model", str(tmp_path), *more]))
        return str(worker.endpoint_types)

    assert endpoints() == "completions"
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert endpoints() == "completions" and endpoints("--endpoint-types", "chat") == "chat"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert endpoints() == "chat,completions"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert endpoints() == "chat,completions"


def test_arguments_that_are_refused(environment: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="an engine has no option 'quants'; did you mean quant"):
        asyncio.run(GristmillEngine.from_args([*ARGUMENTS, "--option", "quants=int4_g128"]))
    with pytest.raises(SystemExit):
        asyncio.run(GristmillEngine.from_args([*ARGUMENTS, "--option", "quant"]))
    assert "--option takes NAME=VALUE, got quant" in capsys.readouterr().err
