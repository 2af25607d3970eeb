"""`gristmill bench serve` against a server whose delays are known, and its parts one by one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gristmill.runtime.errors import UsageError
from gristmill.tools.bench_serve import events, results
from gristmill.tools.bench_serve.client import Answer, Client
from gristmill.tools.bench_serve.command import bench
from gristmill.tools.bench_serve.events import Stream, StreamError
from gristmill.tools.bench_serve.load import Load, arrivals
from gristmill.tools.bench_serve.prompts import Range, file_prompts, random_prompts
from tests.serve import paced, virtual_time
from tests.serve.paced import CUT, END, HEAD, Paced, chunk, event, serving, sse, tokens, usage, whole

FIRST, GAP, COUNT = 0.06, 0.02, 6


def measure(url: str, *options: str, status: int = 0) -> dict[str, Any]:
    """The JSON of a run."""
    result = CliRunner().invoke(bench, ["serve", "--base-url", url, "--json", "-", *options])
    assert result.exit_code == status, (result.output, result.exception)
    return json.loads(result.stdout)


# Times


def check_times(found: dict[str, Any]) -> None:
    """The times of `tokens` with FIRST, GAP and COUNT."""
    milliseconds = found["milliseconds"]
    for name, expected in {
        "ttft": FIRST,
        "tpot": GAP,
        "itl": GAP,
        "e2e": FIRST + (COUNT - 1) * GAP,
    }.items():
        for value in ("mean", "p50"):
            assert milliseconds[name][value] / 1e3 == pytest.approx(expected, abs=1e-5), (name, value)
        assert milliseconds[name]["p50"] <= milliseconds[name]["p90"] <= milliseconds[name]["p99"]
        assert milliseconds[name]["p99"] <= milliseconds[name]["max"]


def test_known_delays_are_measured() -> None:
    with virtual_time.serving(partial(tokens, first=FIRST, gap=GAP, count=COUNT)) as server:
        found = measure(server.url, "--num-prompts", "12", "--max-concurrency", "4", "--output-tokens", "6")
        assert server.most == 4 and len(server.bodies) == 13  # with the warm-up
        body = server.bodies[-1]
        assert body["model"] == "paced-model" and body["max_tokens"] == 6 and body["stream"] is True
        assert len(body["messages"][0]["content"].split()) == 256
        assert server.connections == 4  # they are used again
    check_times(found)
    assert found["requests"]["complete"] == 12 and found["requests"]["failed"] == 0 and found["errors"] == {}
    assert (found["input_tokens"], found["output_tokens"], found["chunks"]) == (84, 72, 72)
    assert found["cached_tokens"] == 36 and found["output_tokens_counted_by"] == "server"
    seconds = 3 * (FIRST + (COUNT - 1) * GAP)  # three rounds of four
    assert found["seconds"] == pytest.approx(seconds)
    assert found["output_tokens_per_second"] == pytest.approx(72 / found["seconds"])


def _first_chunk_counts(self: Stream, payload: bytes, now: float) -> None:
    if b'"role"' in payload:
        self._token(now)
    chunk_of(self, payload, now)


def _first_two_as_one(self: Stream, now: float) -> None:
    if self.chunks == 1 and not self.gaps:
        self.first = self.last = now
        self.gaps.append(0.0)
        return
    token_of(self, now)


def _shifted(values: Any) -> Any:
    return {**distribution_of(values), "p50": float(np.percentile(values, 95)) + 20}


chunk_of, token_of, distribution_of = Stream._chunk, Stream._token, results.distribution


@pytest.mark.parametrize(
    ("place", "name", "wrong"),
    [
        (events.Stream, "_chunk", _first_chunk_counts),
        (events.Stream, "_token", _first_two_as_one),
        (results, "distribution", _shifted),
    ],
)
def test_the_check_of_times_sees_a_wrong_measurement(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, wrong: Callable[..., Any]
) -> None:
    monkeypatch.setattr(place, name, wrong)
    with virtual_time.serving(partial(tokens, first=FIRST, gap=GAP, count=COUNT)) as server:
        found = measure(server.url, "--num-prompts", "2", "--max-concurrency", "2", "--warmup", "0")
    with pytest.raises(AssertionError):
        check_times(found)


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 102)]
    random.Random(1).shuffle(values)
    found = results.distribution(values)
    assert found == {"mean": 51.0, "p50": 51.0, "p90": 91.0, "p95": 96.0, "p99": 100.0, "max": 101.0}
    assert results.distribution([3.0])["p99"] == 3.0 and results.distribution([]) is None


def test_a_server_that_cannot_keep_up_shows_at_a_rate() -> None:
    """One request at a time, 20 ms each, at 100 per second: the last of 30 waits about 300 ms, however few are sent at a time."""

    async def one_by_one(server: Paced, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async with server.turn:
            async for piece in tokens(server, body, 0.02, 0.0, 1):
                yield piece

    with virtual_time.serving(one_by_one) as server:
        for limit in ((), ("--max-concurrency", "1")):
            options = ("--request-rate", "100", "--burstiness", "1000", "--num-prompts", "30", *limit)
            found = measure(server.url, *options, "--warmup", "0", "--slo", "e2e:60", "--slo", "ttft:1000")
            for latency in ("e2e", "ttft"):
                assert found["milliseconds"][latency]["max"] == pytest.approx(20 + 29 * 10, abs=10)
            assert found["milliseconds"]["e2e"]["p50"] == pytest.approx(20 + 14.5 * 10, abs=10)
            assert 4 <= found["goodput"]["requests"] <= 6
        assert found["client"]["sent_late_ms"]["max"] > 270  # they waited here
        closed = measure(server.url, "--max-concurrency", "1", "--num-prompts", "5", "--warmup", "0")
        assert closed["milliseconds"]["e2e"]["max"] == pytest.approx(20)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_arrivals(burstiness: float) -> None:
    due = list(islice(arrivals(Load(rate=50.0, burstiness=burstiness, seed=3)), 20_001))
    gaps = np.diff(due)
    assert due[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.06)
    assert due != list(islice(arrivals(Load(rate=50.0, burstiness=burstiness, seed=4)), 20_001))


def test_seconds_end_the_sending_and_not_the_requests() -> None:
    with virtual_time.serving(partial(tokens, first=0.05, gap=0.0, count=1)) as server:
        found = measure(server.url, "--seconds", "0.18", "--max-concurrency", "2", "--warmup", "0")
        assert found["requests"]["failed"] == 0 and found["requests"]["complete"] == 8
        assert found["seconds"] == pytest.approx(0.2)
        found = measure(
            server.url, "--seconds", "0.2", "--request-rate", "50", "--burstiness", "100", "--warmup", "0"
        )
        assert 9 <= found["requests"]["complete"] <= 11 and 0.21 < found["seconds"] < 0.25


# Streams


def _fed(data: bytes, size: int) -> Stream:
    stream = Stream()
    for number, begin in enumerate(range(0, len(data), size)):
        stream.feed(data[begin : begin + size], float(number + 1))
    return stream


ANSWER = b"".join(
    [
        b": a comment\n\n",
        event(role="assistant", content=""),
        event(reasoning_content="hm"),
        event(content="\U0001f9ec ä\r\n"),
        b'event: chunk\nid: 7\ndata: {"choices": [{"delta":\ndata: {"content": "in two lines"}}]}\n\n',
        event(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        b'data:{"choices":[{"text":"of a completion"}],"usage":null,"error":null}\n\n',
        event(finish="stop"),
        usage(11, 9),
        b"data: [DONE]\n\n",
    ]
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 10_000])
@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
def test_events_that_are_cut_anywhere(size: int, line: bytes) -> None:
    stream = _fed(ANSWER.replace(b"\n", line), size)
    assert (stream.chunks, len(stream.gaps)) == (5, 4)
    assert (stream.prompt_tokens, stream.output_tokens, stream.cached_tokens) == (11, 9, 3)
    assert stream.finished and stream.done
    assert stream.first + sum(stream.gaps) == pytest.approx(stream.last)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (sse({"error": {"message": "out of memory", "code": 500}}), "error event"),
        (sse({"choices": [], "error": "busy"}), "error event"),
        (b"data: {not json}\n\n", "malformed event"),
        (b'data: {"choices": 3}\n\n', "malformed event"),
        (b"data: []\n\n", "malformed event"),
        (b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', "malformed event"),
    ],
)
def test_events_that_are_errors(data: bytes, kind: str) -> None:
    with pytest.raises(StreamError) as found:
        _fed(event(content="a") + data, 5)
    assert found.value.kind == kind


# Failures


def _answering(*pieces: bytes) -> paced.Script:
    async def script(server: Paced, body: dict[str, Any]) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return script


@pytest.mark.parametrize(
    ("pieces", "kind", "said"),
    [
        ([whole(429, b'{"error": {"message": "the queue is full", "code": 429}}')], "HTTP 429", "the queue is full"),
        ([whole(404, b'{"detail": "no model x"}')], "HTTP 404", "no model x"),
        ([whole(503, b"<html>down</html>")], "HTTP 503", "<html>down</html>"),
        ([HEAD + chunk(event(content="a")), CUT], "connection lost", ""),
        ([HEAD + chunk(event(content="a")) + END], "no finish", "without a finish_reason"),
        ([HEAD + chunk(event(content="a") + sse({"error": {"message": "dead"}}))], "error event", "dead"),
        ([HEAD + b"zz\r\n"], "malformed response", ""),
        ([b"SSH-2.0-OpenSSH\r\n"], "malformed response", ""),
    ],
)  # fmt: skip
def test_failures_are_counted_by_kind(pieces: list[bytes], kind: str, said: str) -> None:
    with serving(_answering(*pieces)) as server:
        found = measure(server.url, "--num-prompts", "3", "--warmup", "0", "--max-concurrency", "1", status=1)
        assert set(found["errors"]) == {kind} and found["errors"][kind]["count"] == 3
        assert said in found["errors"][kind]["example"]
        assert found["requests"] == {"complete": 0, "failed": 3, "per_second": 0.0}
        assert found["milliseconds"]["ttft"] is None
        result = CliRunner().invoke(bench, ["serve", "--base-url", server.url, "--num-prompts", "1"])
        assert isinstance(result.exception, UsageError) and kind in str(result.exception)  # of the warm-up


def test_some_requests_fail_and_others_count() -> None:
    async def every_third(server: Paced, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if len(server.bodies) % 3 == 0:
            yield HEAD + chunk(event(content="half"))
            yield CUT
            return
        async for piece in tokens(server, body, 0.0, 0.0, 2):
            yield piece

    with serving(every_third) as server:
        found = measure(server.url, "--num-prompts", "9", "--warmup", "0", "--max-concurrency", "1")
    assert found["requests"]["complete"] == 6 and found["errors"]["connection lost"]["count"] == 3
    assert found["output_tokens"] == 12


def test_a_request_that_takes_too_long() -> None:
    with virtual_time.serving(partial(tokens, first=5.0, gap=0.0, count=1)) as server:
        found = measure(server.url, "--num-prompts", "2", "--warmup", "0", "--timeout", "0.1", status=1)
    assert found["errors"]["timeout"]["count"] == 2 and found["seconds"] == pytest.approx(0.1)


def test_nobody_listens() -> None:
    found = measure("http://127.0.0.1:9", "--model", "m", "--num-prompts", "2", "--warmup", "0", status=1)
    assert found["errors"]["connection refused"]["count"] == 2


def test_a_connection_that_was_closed_while_idle_is_made_anew() -> None:
    async def then_close(server: Paced, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if len(server.bodies) == 2:  # it closes as the second request comes
            yield CUT
            return
        async for piece in tokens(server, body, 0.0, 0.0, 1):
            yield piece

    with serving(then_close) as server:
        found = measure(server.url, "--num-prompts", "3", "--warmup", "0", "--max-concurrency", "1")
        assert found["requests"]["complete"] == 3 and len(server.bodies) == 4 and server.connections == 2


def test_answers_without_a_length_and_in_single_bytes() -> None:
    stream = event(content="a") + event(content="b") + event(finish="stop") + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    chunked = HEAD + b"".join(chunk(stream[i : i + 1]) for i in range(len(stream))) + END
    for pieces in ([head + stream, CUT], [chunked[i : i + 1] for i in range(len(chunked))]):
        with serving(_answering(*pieces)) as server:
            found = measure(server.url, "--num-prompts", "2", "--warmup", "0", "--max-concurrency", "1")
            assert found["requests"]["complete"] == 2 and found["output_tokens"] == 4
            assert found["output_tokens_counted_by"] == "chunks" and found["input_tokens"] is None


def test_an_interrupted_run_shows_what_there_is() -> None:
    with serving(partial(tokens, first=0.01, gap=0.0, count=1)) as server:
        command = [sys.executable, "-m", "gristmill.tools.cli", "bench", "serve", "--base-url", server.url]
        process = subprocess.Popen(
            [*command, "--seconds", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while len(server.bodies) < 20:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted with 8 requests unfinished" in out and "TTFT" in out, (
        err
    )
    assert "of a core" in err and "Traceback" not in err


def test_tables_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(partial(tokens, first=0.0, gap=0.0, count=3)) as server:
        options = ["--num-prompts", "4", "--slo", "ttft:500", "--header", "X-Team: a:b", "--json", str(file)]
        result = CliRunner().invoke(bench, ["serve", "--base-url", f"{server.url}/v1/", *options])
        assert (
            b"\r\nAuthorization: Bearer secret\r\n" in server.heads[-1]
            and b"\r\nX-Team: a:b\r\n" in server.heads[-1]
        )
        assert server.heads[-1].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert result.exit_code == 0, result.exception
    for text in ("4 complete, 0 failed", "TTFT", "TPOT", "ITL", "E2E", "p99", "within ttft 500 ms"):
        assert text in result.output, text
    assert json.loads(file.read_text())["requests"]["complete"] == 4 and "secret" not in file.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base-url", "localhost:8000"], "must be http"),
        (["--base-url", "http://h:99999"], "must be http"),
        (["--slo", "ttft"], "--slo must be"),
        (["--slo", "itl:3"], "--slo must be"),
        (["--slo", "e2e:nan"], "--slo must be"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--extra-body", "{"], "is not JSON"),
        (["--header", "X"], "NAME:VALUE"),
        (["--header", "X: a\nY: b"], "line break"),
        (["--dataset", "/absent"], "cannot read /absent"),
    ],
)
def test_mistaken_options(options: list[str], message: str) -> None:
    result = CliRunner().invoke(
        bench, ["serve", "--base-url", "http://127.0.0.1:9", "--model", "m", *options]
    )
    assert isinstance(result.exception, UsageError) and message in str(result.exception), result.exception


# Prompts


def test_random_prompts() -> None:
    made = list(islice(random_prompts(Range(5, 9), Range(3, 3), 4, 2, seed=1), 200))
    assert {len(prompt.completion().split()) for prompt in made} == {9, 10, 11, 12, 13}
    begins = [prompt.completion().split()[:4] for prompt in made]
    assert begins[0] != begins[1] and all(begin == begins[i % 2] for i, begin in enumerate(begins))
    assert len({prompt.completion() for prompt in made}) == 200 and {p.max_tokens for p in made} == {3}
    again = islice(random_prompts(Range(5, 9), Range(3, 3), 4, 2, seed=1), 200)
    assert [prompt.text for prompt in again] == [prompt.text for prompt in made]


def test_lengths_by_a_tokenizer() -> None:
    from gristmill.runtime.tokenizer import Tokenizer
    from tests.serve.server import MODEL

    with serving(partial(tokens, first=0.0, gap=0.0, count=1)) as server:
        options = ("--api", "completions", "--tokenizer", str(MODEL), "--input-tokens", "40", "--ignore-eos")
        measure(
            server.url, *options, "--num-prompts", "8", "--extra-body", '{"temperature": 0, "max_tokens": 5}'
        )
        lengths = [len(Tokenizer(MODEL).encode(body["prompt"], False)) for body in server.bodies]
        assert statistics.mean(lengths) == pytest.approx(40, abs=1)
        body = server.bodies[0]
        assert (body["temperature"], body["max_tokens"], body["ignore_eos"]) == (0, 5, True)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        '{"messages": [{"role": "user", "content": "hällo"}], "max_tokens": 7}\n\n{"prompt": "x\u2028y"}\n"bare"\n',
        encoding="utf-8",
    )
    made = {(p.completion(), p.max_tokens) for p in file_prompts(lines, None, 0)}
    assert made == {("hällo", 7), ("x\u2028y", None), ("bare", None)}
    assert {p.max_tokens for p in file_prompts(lines, Range(2, 2), 0)} == {2}
    shared = tmp_path / "shared.json"
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "for these three reasons"}]
    shared.write_text(
        json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": turns[::-1]}])
    )
    assert [(p.text, p.max_tokens) for p in file_prompts(shared, None, 0)] == [("Why?", 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": "a"}\n{"prompt": 3}',
            "line 2: expected 'messages', 'prompt' or 'conversations', got 'prompt'",
        ),
        ('{"prompt": "a"}\n{', "line 2: not JSON"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be an integer of at least 1"),
        ("[3]", "entry 0: expected an object, got int"),
        ('{"messages": [1]}', "messages must be objects"),
        ("", "has no prompts"),
        ("[", "is not JSON"),
    ],
)
def test_files_that_have_no_prompts(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        file_prompts(file, None, 0)


# The client's own cost


@pytest.mark.slow
def test_the_client_costs_little_per_chunk() -> None:
    """The server is another process, so that this one's CPU time is the client's."""
    code = (
        "import sys, time; from functools import partial; from tests.serve.paced import serving, tokens\n"
        "with serving(partial(tokens, first=0.0, gap=0.002, count=500)) as server:\n"
        "    print(server.url, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        found = measure(url, "--num-prompts", "32", "--max-concurrency", "16", "--input-tokens", "8")
    finally:
        process.communicate()
    assert found["chunks"] == 16_000 and found["client"]["cpu_microseconds_per_chunk"] < 40


def test_requests_at_once_do_not_mix() -> None:
    """Each answer has as many tokens as its request asked for."""

    async def as_asked(server: Paced, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for piece in tokens(server, body, 0.001, 0.001, body["max_tokens"]):
            yield piece

    async def main(url: str) -> list[Answer]:
        client = Client(url, {})
        asked = [Answer(0.0) for _ in range(40)]
        bodies = [json.dumps({"max_tokens": 1 + number % 9}).encode() for number in range(40)]
        await asyncio.gather(
            *(
                client.send(client.request("/chat/completions", body), answer)
                for body, answer in zip(bodies, asked, strict=True)
            )
        )
        client.close()
        return asked

    with serving(as_asked) as server:
        answers = asyncio.run(main(server.url))
    for number, answer in enumerate(answers):
        assert not answer.error
        assert answer.stream.chunks == answer.output_tokens == 1 + number % 9
