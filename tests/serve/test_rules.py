"""Keys, limits, clients that leave or do not read, draining, the log: with an engine that costs nothing."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill import LLM
from gristmill.runtime.completion import Chunk
from gristmill.runtime.errors import UsageError
from gristmill.serve import app, exchange
from gristmill.serve.engines import open_engines
from gristmill.serve.launch import bind, listen
from tests.serve.scripted import ScriptedEngine
from tests.serve.server import service_of, serving

ASK = {"prompt": [1, 2, 3], "max_tokens": 4}


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it holds; TimeoutError. What takes long is asked for less often, since a question keeps a server busy that starts."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(pause)
        pause = min(0.1, 1.2 * pause)


def test_keys_are_asked_for_and_read_again(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key 401; either header counts; a new key in the file counts at once, an old one no more; /health needs none."""
    monkeypatch.setattr("gristmill.serve.keys.CHECK_SECONDS", 0.0)
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    with serving(service_of(llm, api_key_file=str(keys)), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)

        def status(**headers: str) -> int:
            return httpx.post(f"{url}/v1/completions", json=ASK, headers=headers).status_code

        refused = httpx.post(f"{url}/v1/completions", json=ASK)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert status(authorization="Bearer first-key") == 200
        assert status(**{"x-api-key": "second-key"}) == 200
        for wrong in ("Bearer", "Bearer first", "Bearer first-key2", "Basic first-key", "Bearer # ours"):
            assert status(authorization=wrong) == 401
        keys.write_text("third-key\n")
        assert status(authorization="Bearer third-key") == 200
        assert status(authorization="Bearer first-key") == 401
        keys.unlink()  # while it is being replaced
        assert status(authorization="Bearer third-key") == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/ui/state").status_code == 401


def test_cors_is_off_unless_asked_for(llm: LLM) -> None:
    """Only pages of a listed origin may read answers."""
    origin = {"origin": "https://a.example"}
    with serving(service_of(llm), lambda service: ScriptedEngine()) as url:
        assert "access-control-allow-origin" not in httpx.get(f"{url}/version", headers=origin).headers
        assert httpx.options(f"{url}/v1/completions", headers=origin).status_code == 403
    with serving(
        service_of(llm, cors_origins=["https://a.example"]), lambda service: ScriptedEngine()
    ) as url:
        answer = httpx.get(f"{url}/version", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.get(f"{url}/version", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        asked = httpx.options(f"{url}/v1/completions", headers=origin)
        assert asked.status_code == 204
        assert "authorization" in asked.headers["access-control-allow-headers"]
        wanted = {"access-control-request-headers": "authorization,x-stainless-os"}
        asked = httpx.options(f"{url}/v1/completions", headers=origin | wanted)
        assert asked.headers["access-control-allow-headers"] == "authorization,x-stainless-os"


def test_pages_of_other_origins_call_nothing(llm: LLM, tmp_path: Path) -> None:
    """What a page sends as plain text comes without a preflight. Its own page, programs, and pages of listed origins are served; the admin plane
    is for no page, also by a name that was made to point here."""
    log = tmp_path / "log"
    page = {"origin": "https://a.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    ask = json.dumps(ASK)
    with serving(service_of(llm, admin_port=0, log_file=str(log)), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        refused = httpx.post(f"{url}/v1/completions", content=ask, headers=page)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "origin_not_allowed"
        assert "--cors-origins https://a.example" in refused.json()["error"]["message"]
        own = {"origin": url, "sec-fetch-site": "same-origin"}
        for headers in ({}, own, {"sec-fetch-site": "cross-site"}):  # the last: a link to /ui
            assert httpx.post(f"{url}/v1/completions", content=ask, headers=headers).status_code == 200
        admin = next(
            json.loads(line)["address"] for line in log.read_text().splitlines() if '"admin"' in line
        )
        port = admin.rpartition(":")[2]
        for headers in (
            page,
            {"origin": admin},
            {"host": f"a.example:{port}"},
            {"host": "127.0.0.1.a.example"},
        ):
            answer = httpx.post(f"{admin}/drain", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "127.0.0.2"):
            assert httpx.get(f"{admin}/version", headers={"host": host}).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200  # nobody has drained it
    keys = tmp_path / "keys"
    keys.write_text("key\n")
    listed = service_of(
        llm, admin_port=0, admin_key_file=str(keys), cors_origins=["https://a.example"], log_file=str(log)
    )
    with serving(listed, lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert httpx.post(f"{url}/v1/completions", content=ask, headers=page).status_code == 200
        admin = [json.loads(line)["address"] for line in log.read_text().splitlines() if '"admin"' in line][
            -1
        ]
        assert httpx.options(f"{admin}/drain", headers=page).status_code == 403
        keyed = {"authorization": "Bearer key"}
        assert httpx.post(f"{admin}/nothing", headers=keyed | page).status_code == 403
        assert httpx.post(f"{admin}/nothing", headers=keyed | {"host": "a.example"}).status_code == 404


def test_bodies(llm: LLM) -> None:
    """Compressed bodies are read; too large ones are refused, before and after they are unpacked."""
    with serving(service_of(llm, max_body_bytes=10_000), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        packed = gzip.compress(json.dumps(ASK).encode())
        encoded = {"content-encoding": "gzip"}
        assert httpx.post(f"{url}/v1/completions", content=packed, headers=encoded).status_code == 200
        large = json.dumps({**ASK, "user": "x" * 20_000}).encode()
        assert httpx.post(f"{url}/v1/completions", content=large).status_code == 413
        assert (
            httpx.post(f"{url}/v1/completions", content=gzip.compress(large), headers=encoded).status_code
            == 413
        )
        assert httpx.post(f"{url}/v1/completions", content=iter([large])).status_code == 413


def test_request_ids(llm: LLM) -> None:
    """A sound id of the client is kept; another is replaced."""
    with serving(service_of(llm), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        for given, kept in (("abc-1", True), ("x" * 129, False), ("a b", False)):
            answer = httpx.post(f"{url}/v1/completions", json=ASK, headers={"x-request-id": given})
            assert (answer.headers["x-request-id"] == given) is kept
            assert (answer.json()["id"] == f"cmpl-{given}") is kept


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(llm: LLM, stream: bool) -> None:
    """Also one whose answer is not streamed."""
    engine = ScriptedEngine(seconds=0.01)
    with serving(service_of(llm), lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({**ASK, "max_tokens": 1000, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            wait_for(lambda: engine.active == 1)
        wait_for(lambda: engine.active == 0)
        assert engine.left == 1


def test_a_client_that_does_not_read_is_given_up(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Its request ends after slow_reader_seconds; others are served meanwhile. The HTTP server has nothing to say about it."""
    engine = ScriptedEngine(lambda ids, params: _long(params.max_tokens))
    with serving(service_of(llm, slow_reader_seconds=0.5), lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({**ASK, "max_tokens": 4000, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            wait_for(lambda: len(engine.whole) == 1)
            assert httpx.post(f"{url}/v1/completions", json=ASK).status_code == 200
            wait_for(lambda: engine.active == 0)
            assert engine.left == 1
    assert "ASGI" not in caplog.text
    logging.getLogger("uvicorn.error").error("something else")
    assert "something else" in caplog.text


def _long(count: int) -> list[Any]:
    from gristmill.runtime.completion import Chunk

    return [Chunk(0, (1,), "x" * 5000, "length" if i == count - 1 else None) for i in range(count)]


def test_a_body_that_does_not_come(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for only so long."""
    monkeypatch.setattr(app, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.3)
    with serving(service_of(llm), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_stream_that_waits_gets_comments(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that proxies do not close it; clients ignore them."""
    monkeypatch.setattr(app, "HEARTBEAT_SECONDS", 0.2)
    engine = ScriptedEngine()
    engine.go_on.clear()
    with serving(service_of(llm), lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        body = {**ASK, "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            text = ""
            for part in answer.iter_text():
                text += part
                if ": waiting\n\n" in text:
                    engine.go_on.set()
        assert ": waiting\n\n" in text
        assert text.endswith("data: [DONE]\n\n")


def test_draining(llm: LLM) -> None:
    """New requests get 503, running ones end, then the server does; the log says so without their text."""
    engine = ScriptedEngine()
    engine.go_on.clear()
    service = service_of(llm, drain_seconds=60.0)
    answers: list[httpx.Response] = []
    with serving(service, lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        client = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{url}/v1/completions", json={**ASK, "max_tokens": 20, "stream": True})
            )
        )
        client.start()
        wait_for(lambda: engine.active == 1)
        service.draining = True
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200
        refused = httpx.post(f"{url}/v1/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert engine.active == 1
        service.draining = False
        threading.Timer(0.2, engine.go_on.set).start()  # when the server is about to end
    client.join()
    assert answers[0].text.endswith("data: [DONE]\n\n")
    assert engine.left == 0


def test_the_log_has_no_text(llm: LLM, tmp_path: Path) -> None:
    """A line for each request: what it was, how long it took, its tokens."""
    log = tmp_path / "log"
    with serving(service_of(llm, log_file=str(log)), lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        httpx.post(f"{url}/v1/completions", json={"prompt": "a secret", "max_tokens": 3})
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    [line] = [one for one in lines if one["event"] == "request" and one["path"] == "/v1/completions"]
    assert line["status"] == 200
    assert line["output_tokens"] == 3
    assert line["prompt_tokens"] >= 1
    assert line["finish"] == ["length"]
    assert "secret" not in log.read_text()


def test_the_log_has_the_time_of_the_first_token(llm: LLM, tmp_path: Path) -> None:
    """And not that of another one."""
    log = tmp_path / "log"
    service = service_of(llm, log_file=str(log))
    with serving(service, lambda service: ScriptedEngine(seconds=0.1)) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        httpx.post(f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 5})
        wait_for(lambda: not service.in_engine)  # its name is free again
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    [line] = [one for one in lines if one["event"] == "request" and one["path"] == "/v1/completions"]
    assert 0.09 <= line["first_token_seconds"] <= line["seconds"] - 0.3


def test_only_streams_are_made_in_pieces(llm: LLM, tmp_path: Path) -> None:
    """An answer that is not streamed is one chunk of the engine, which says when its first token came."""
    log = tmp_path / "log"
    begun = time.monotonic() - 0.25

    engine = ScriptedEngine(lambda ids, params: [Chunk(0, (1, 2, 3), "abc", "length", begun=begun)])
    with serving(service_of(llm, log_file=str(log)), lambda service: engine) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        for stream in (False, True):
            httpx.post(f"{url}/v1/completions", json={"prompt": "Hello", "max_tokens": 3, "stream": stream})
    assert engine.whole == [True, False]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = [one for one in lines if one["event"] == "request" and one["path"] == "/v1/completions"]
    assert [one["output_tokens"] for one in found] == [3, 3]
    assert all(one["first_token_seconds"] < 0 for one in found)  # it came before the request, here


def test_what_happens_to_engines_is_known(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has died is not loading any more; whether another one lives, and whether it is started again, says what the service is."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "gristmill.serve.engines.Replicas", lambda model, count, **options: given.update(options)
    )
    service = service_of(llm, restarts=7)
    open_engines("model", {"max_seqs": 3})(service)
    assert (given["restarts"], given["max_seqs"]) == (7, 3)
    given["on_progress"](0, "weights", 1, 2)
    given["on_progress"](1, "verification", 1, 4)
    assert service.progress == {"phase": "weights", "fraction": 0.5}
    given["on_event"]("replica", replica=0, error="it died", alive=1, restarted=True)
    assert service.progress == {"phase": "verification", "fraction": 0.25}
    assert (service.restarting, service.failed) == (False, False)
    for alive, restarted, state in (
        (0, True, (True, False)),
        (0, False, (True, True)),
        (1, False, (False, False)),
    ):
        given["on_event"]("replica", replica=1, error="it died", alive=alive, restarted=restarted)
        assert (service.restarting, service.failed) == state
    assert service.problem == "it died"


def test_an_address_that_is_taken(tmp_path: Path) -> None:
    """The error names it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)


def test_a_unix_socket(llm: LLM, tmp_path: Path) -> None:
    """It serves; another server does not take it away, and one that a killed server has left is replaced."""
    path = tmp_path / "socket"
    service = service_of(llm, uds=str(path))
    with serving(service, lambda service: ScriptedEngine()) as url:
        assert url == f"unix:{path}"
        with pytest.raises(UsageError, match=f"cannot listen at {path}: Address already in use"):
            listen(service.config)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            wait_for(lambda: client.get("/ready").status_code == 200)
            assert client.post("/v1/completions", json=ASK).status_code == 200
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listen(service.config):
        assert path.is_socket()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_wrong_routes(llm: LLM, url: str, method: str, path: str, status: int) -> None:
    """In the API's shape."""
    answer = httpx.request(method, url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    if status == 405:
        assert answer.headers["allow"]


def test_spans_begin_at_the_route(llm: LLM) -> None:
    """Under the client's trace, with status and error."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    service = service_of(llm)
    service.tracer = provider.get_tracer("tests")
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with serving(service, lambda service: ScriptedEngine()) as url:
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        assert httpx.post(f"{url}/v1/completions", json=ASK, headers=parent).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={**ASK, "n": 0}, headers=parent).status_code == 400
    sound, wrong = kept.get_finished_spans()
    for span, status in ((sound, 200), (wrong, 400)):
        assert span.name == "POST /v1/completions"
        assert span.attributes is not None
        assert span.attributes["http.response.status_code"] == status
        assert span.parent is not None
        assert f"{span.parent.span_id:x}" == "b7ad6b7169203331"
        assert f"{span.get_span_context().trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert sound.status.is_ok or sound.status.is_unset
    assert not wrong.status.is_ok
