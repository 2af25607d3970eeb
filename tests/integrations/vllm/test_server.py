"""``vllm serve`` with the worker, and the real `openai` client: streaming, aborts, 32 at a time, refusals, a killed worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest

import gristmill
from tests.integrations.ports import free_port
from tests.integrations.vllm.conftest import MODELS, ROOT
from tests.integrations.vllm.test_worker import own, texts

PAGE = (ROOT / "docs" / "embedding" / "vllm.md").read_text(encoding="utf-8")
MODEL = "examples/models/docs-llama"
START_S = 900
END_S = 180


def page_command(beginning: str, option: str = "") -> list[str]:
    """The first command of the page that begins so and has the option."""
    commands = re.findall(r"^```sh\n(.*?)^```", PAGE, re.S | re.M)
    text = next(text for text in commands if text.startswith(beginning) and option in text)
    return shlex.split(text.replace("\\\n", ""))


@dataclass
class Server:
    """``vllm serve`` of docs-llama. url: of its root. log: the file of its output."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """The sum over labels of a metric."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextlib.contextmanager
def serve(folder: Path, environment: dict[str, str], option: str = "") -> Iterator[Server]:
    """The page's server; option: which one."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *page_command("vllm serve", option)[1:]]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-num-batched-tokens", "256"]
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + START_S
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vllm serve did not start:\n{log.read_text()[-4000:]}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                server.get("/health")
                break
            time.sleep(0.5)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), environment) as running:
        yield running


def test_a_completion_is_the_runtimes(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt="The index", max_tokens=24, temperature=0)
    (done,) = gristmill.LLM(MODELS / "docs-llama", dtype="float32", num_blocks=64, block_size=128).generate(
        "The index", gristmill.SamplingParams(max_tokens=24)
    )
    assert answer.choices[0].text == done.text
    assert answer.usage is not None and answer.usage.completion_tokens == 24


def test_the_page_shows_the_answer(server: Server) -> None:
    """The second command of the page, and what it prints: the text, the usage, the reason of the end."""
    body = page_command("curl")[-1]
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    (shown,) = [json.loads(text) for text in re.findall(r"^```json\n(.*?)^```", PAGE, re.S | re.M)]
    for part, given in (
        (shown, answer),
        (shown["choices"][0], answer["choices"][0]),
        (shown["usage"], answer["usage"]),
    ):
        assert {name: given[name] for name in part if name not in ("choices", "usage")} == {
            name: value for name, value in part.items() if name not in ("choices", "usage")
        }
    log = server.log.read_text()
    for line in re.findall(r"^gristmill: \w+.*: .*verified here.*", PAGE, re.M):
        assert line in log, line


def test_streaming_gives_the_same_text_in_pieces(server: Server) -> None:
    whole = server.client.completions.create(model=MODEL, prompt="How to", max_tokens=24, temperature=0)
    # vLLM joins pieces that it has not sent yet: on a busy machine 24 tokens may come in two, though not each time.
    deadline, most = time.monotonic() + END_S, 0
    while most <= 8:
        assert time.monotonic() < deadline, f"24 tokens came in {most} pieces at most"
        stream = server.client.completions.create(
            model=MODEL, prompt="How to", max_tokens=24, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == whole.choices[0].text
        most = max(most, len(pieces))


def test_an_aborted_request_gives_its_blocks_back(server: Server) -> None:
    deadline, generated = time.monotonic() + END_S, 3000.0
    # A client that is stopped may leave too late: the request has ended then.
    while generated >= 3000:
        before = server.metric("vllm:generation_tokens_total")
        stream = server.client.completions.create(
            model=MODEL,
            prompt="How to",
            max_tokens=3000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
        while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline, "the request goes on"
            time.sleep(0.2)
        generated = server.metric("vllm:generation_tokens_total") - before


def test_32_at_a_time(server: Server) -> None:
    ids = [text[: 3 + 5 * i] for i, text in enumerate(texts(8) * 4)]
    expected = own("docs-llama", ids)

    def ask(prompt: list[int]) -> list[int]:
        body = {"ignore_eos": True, "return_token_ids": True}
        answer = server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=24, temperature=0, extra_body=body
        )
        return answer.choices[0].token_ids  # type: ignore[attr-defined]  # of vLLM's, not OpenAI's, answers

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, ids)) == expected


def test_prefixes_are_counted(server: Server) -> None:
    before = server.metric("vllm:prefix_cache_hits_total")
    for _ in range(2):
        server.client.completions.create(model=MODEL, prompt=texts(5)[4][:400], max_tokens=2, temperature=0)
    assert server.metric("vllm:prefix_cache_hits_total") - before >= 384


def test_a_refusal_is_a_400_that_names_the_parameter(server: Server) -> None:
    ask = server.client.completions.create
    with pytest.raises(openai.BadRequestError, match="the gristmill worker does not serve extra_args="):
        ask(model=MODEL, prompt="The", max_tokens=2, extra_body={"vllm_xargs": {"a": 1}})
    grammar = {"structured_outputs": {"regex": "[0-9]{3}"}}
    answer = ask(model=MODEL, prompt="The", max_tokens=8, extra_body=grammar)
    assert re.fullmatch("[0-9]{3}", answer.choices[0].text)


def test_log_probabilities(server: Server) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt="The", max_tokens=3, temperature=0, logprobs=2
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
    assert len(found.token_logprobs) == 3
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert value == max(top.values()) < 0


def test_the_log_names_the_kernels(server: Server) -> None:
    log = server.log.read_text()
    assert "gristmill: paged_attention: paged_attention_" in log
    assert "Traceback" not in log


def end_by_killing_the_worker(server: Server) -> None:
    """The server ends by itself, says why, and leaves no process behind."""
    family = server.family()
    (worker,) = [
        process for process in family if "Worker" in process.name() or "Worker" in "".join(process.cmdline())
    ]
    worker.send_signal(signal.SIGKILL)
    server.process.wait(END_S)
    assert "died unexpectedly" in server.log.read_text()
    _, alive = psutil.wait_procs(family, END_S)
    assert alive == []


def test_a_killed_worker_ends_the_server(server: Server) -> None:
    """The last test with the server of the module."""
    end_by_killing_the_worker(server)


@pytest.mark.host
@pytest.mark.slow
def test_vllms_own_model_by_the_commands_of_the_page(tmp_path: Path, environment: dict[str, str]) -> None:
    """Serve it with --quantization gristmill, ask it; then vLLM's own worker is killed, and the server ends."""
    with serve(tmp_path, environment, "--quantization gristmill") as running:
        body = page_command("curl")[-1]
        request = urllib.request.Request(
            f"{running.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] == 24 and len(answer["choices"][0]["text"]) > 24
        log = running.log.read_text()
        (line,) = re.findall(r"^gristmill: model.*the first of its kind.*", PAGE, re.M)
        assert line in log, line
        end_by_killing_the_worker(running)
