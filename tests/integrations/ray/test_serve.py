"""Ray Serve on a local cluster: answers, streams and cancellation by handle and over HTTP, refusals, health."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import httpx
import psutil
import pytest
from ray.exceptions import RayError

from gristmill import LLM, EngineStatus, SamplingParams
from gristmill.integrations.ray import build
from gristmill.integrations.ray import serve as deployment
from gristmill.integrations.ray.serve import Server, _read
from gristmill.runtime.errors import UsageError
from tests.integrations.ports import free_port
from tests.integrations.ray.slow import SlowServer
from tests.runtime.oracle import LLAMA, MODELS

MODEL = str(MODELS / LLAMA)
PARAMS = {"max_tokens": 8, "logprobs": 0}
LONG = {"max_tokens": 3000, "ignore_eos": True}
"""By the deployment a minute and a half: whatever ends within 45 seconds was ended."""
PROMPT = "The value of"


@pytest.fixture(scope="module")
def served(cluster: Any) -> Iterator[tuple[Any, str]]:
    """(handle, address) of a deployment with slow steps."""
    from ray import serve

    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployment, "Server", SlowServer)
        application = build(
            {"model": MODEL, "dtype": "fp32", "num_blocks": "512", "max_queued": "4", "max_seqs": "2"}
        )
    handle = serve.run(application, name="gristmill", route_prefix="/")
    # The first request verifies kernels.
    handle.generate.remote(PROMPT, PARAMS).result(timeout_s=300)
    yield handle, f"http://127.0.0.1:{port}/"
    serve.shutdown()


@pytest.fixture(scope="module")
def expected(cluster: Any) -> Any:
    [answer] = LLM(MODEL, dtype="fp32", num_blocks=512).generate(PROMPT, SamplingParams(**PARAMS))
    return answer


def idle(handle: Any) -> dict[str, Any]:
    """The status as soon as nothing runs; fails after 45 seconds."""
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        status: dict[str, Any] = handle.status.remote().result(timeout_s=60)
        if not status["running"] + status["waiting"]:
            return status
        time.sleep(0.1)
    raise AssertionError(f"requests still run: {status}")


def test_an_answer_by_handle(served: tuple[Any, str], expected: Any) -> None:
    [answer] = served[0].generate.remote(PROMPT, PARAMS).result(timeout_s=60)
    assert answer["text"] == expected.text and tuple(answer["token_ids"]) == expected.token_ids
    assert answer["finish_reason"] == "length" and len(answer["logprobs"]) == 8
    two = served[0].generate.remote(PROMPT, {**PARAMS, "n": 2, "temperature": 1.0}).result(timeout_s=60)
    assert [one["choice"] for one in two] == [0, 1]


def test_a_stream_by_handle_and_its_cancellation(served: tuple[Any, str], expected: Any) -> None:
    handle = served[0]
    chunks = [*handle.options(stream=True).stream.remote(PROMPT, PARAMS)]
    assert "".join(chunk["text"] for chunk in chunks) == expected.text and len(chunks) > 1
    assert [chunk.get("finish_reason") for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    stream = handle.options(stream=True).stream.remote(PROMPT, LONG)
    next(iter(stream))
    assert handle.status.remote().result(timeout_s=60)["running"] == 1
    stream.cancel()
    assert idle(handle)["used_blocks"] == 0


def test_over_http(served: tuple[Any, str], expected: Any) -> None:
    body = {"prompt": PROMPT, "params": PARAMS}
    answer = httpx.post(served[1], json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["completions"][0]["text"] == expected.text
    with httpx.stream("POST", served[1], json={**body, "stream": True}, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["text"] for line in lines[:-1]) == expected.text
    status = httpx.get(served[1], timeout=60).json()
    assert set(status) == {field.name for field in fields(EngineStatus)} and status["max_seqs"] == 2


def test_a_client_that_goes_away_ends_its_request(served: tuple[Any, str]) -> None:
    body = {"prompt": PROMPT, "params": LONG, "stream": True}
    with httpx.stream("POST", served[1], json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert served[0].status.remote().result(timeout_s=60)["running"] == 1
        del lines
    assert idle(served[0])["used_blocks"] == 0


def test_many_at_once(served: tuple[Any, str], expected: Any) -> None:
    """Twice max_seqs: as many as may wait (max_queued) if all arrive within one step."""
    idle(served[0])
    answers = [served[0].generate.remote(PROMPT, PARAMS) for _ in range(4)]
    assert {tuple(answer.result(timeout_s=60)[0]["token_ids"]) for answer in answers} == {expected.token_ids}


@pytest.mark.parametrize(
    "body,status,message",
    [
        (b"{", 400, "the body must be JSON"),
        (b'{"params": {}}', 400, "the body must be an object with prompt"),
        (b'{"prompt": "a", "temperature": 0}', 400, "the body must be an object with prompt"),
        (b'{"prompt": "a", "stream": 1}', 400, "stream must be a boolean"),
        (b'{"prompt": ""}', 400, "the prompt is empty"),
        (b'{"prompt": "a", "params": {"top_p": 2}}', 400, "top_p must be a number in"),
        (b'{"prompt": "a", "params": {"max_token": 2}}', 400, "SamplingParams has no max_token"),
        (b'{"prompt": ' + json.dumps([5] * 5000).encode() + b', "stream": true}', 400, "can never run"),
    ],
)
def test_refusals(served: tuple[Any, str], body: bytes, status: int, message: str) -> None:
    answer = httpx.post(served[1], content=body, timeout=60)
    assert answer.status_code == status and message in answer.json()["error"]


def test_two_processes_share_the_model_of_a_replica(served: tuple[Any, str], expected: Any) -> None:
    from ray import serve

    options = {"dtype": "fp32", "num_blocks": "512", "tensor_parallel": "2", "device": "cpu"}
    handle = serve.run(build({"model": MODEL, **options}), name="two", route_prefix="/two")
    [answer] = handle.generate.remote(PROMPT, PARAMS).result(timeout_s=300)
    serve.delete("two")
    assert tuple(answer["token_ids"]) == expected.token_ids


def test_a_full_queue(served: tuple[Any, str]) -> None:
    async def flood() -> list[int]:
        async with httpx.AsyncClient(timeout=120) as client:
            body = {"prompt": PROMPT, "params": {"max_tokens": 32, "ignore_eos": True}}
            answers = await asyncio.gather(*(client.post(served[1], json=body) for _ in range(24)))
            assert all("retry-after" in a.headers for a in answers if a.status_code == 503)
            return [answer.status_code for answer in answers]

    idle(served[0])
    codes = asyncio.run(flood())
    assert set(codes) == {200, 503} and codes.count(200) >= 4
    idle(served[0])


def test_a_dead_engine_is_unhealthy() -> None:
    server = Server(MODEL, {"dtype": "fp32", "num_blocks": 512})

    async def main() -> None:
        await server.check_health()
        await server.engine.close()
        with pytest.raises(RuntimeError, match="the engine was closed"):
            await server.check_health()

    asyncio.run(main())


def test_a_killed_replica_is_replaced(served: tuple[Any, str], expected: Any) -> None:
    """The last test with the deployment: its stream ends with an error, and a new replica answers."""
    handle = served[0]

    def replica() -> psutil.Process:
        """The only one: Ray names its processes after what runs in them."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if "ServeReplica:gristmill" in " ".join(child.cmdline()):
                    found.append(child)
        (one,) = found
        return one

    killed, stream = replica(), handle.options(stream=True).stream.remote(PROMPT, LONG)
    next(iter(stream))
    killed.kill()
    with pytest.raises(RayError):
        for _ in stream:
            pass
    deadline = time.monotonic() + 300
    while True:
        with contextlib.suppress(RayError):
            [answer] = handle.generate.remote(PROMPT, PARAMS).result(timeout_s=300)
            break
        assert time.monotonic() < deadline, "no replica answers"
        time.sleep(1)
    assert tuple(answer["token_ids"]) == expected.token_ids and replica().pid != killed.pid


def test_arguments() -> None:
    with pytest.raises(UsageError, match="model=MODEL is missing"):
        build({"dtype": "fp32"})
    with pytest.raises(UsageError, match="an engine has no option 'quants'; did you mean quant"):
        build({"model": MODEL, "quants": "int4_g128"})
    assert _read(b'{"prompt": [1, 2], "priority": 3}') == ([1, 2], None, False, 3)
