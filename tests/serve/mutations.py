"""Requests with something wrong in them: in their JSON, text, headers, framing."""

from __future__ import annotations

import copy
import json
import random
import zlib
from functools import cache
from typing import Any

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is ☃ in Paris?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"city": "Paris"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Look out of the window.",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
            },
        }
    ],
    "tool_choice": "auto",
    "max_tokens": 5,
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 1,
    "stop": ["\n\n"],
    "logit_bias": {"5": -1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "text"},
    "user": "somebody",
}
COMPLETION = {
    "model": "m",
    "prompt": ["The function", "returns"],
    "max_tokens": 5,
    "temperature": 0,
    "logprobs": 1,
    "echo": True,
    "n": 2,
    "stop": ["x"],
    "presence_penalty": 0.5,
    "min_tokens": 1,
    "ignore_eos": True,
    "structured_outputs": {"choice": ["a", "b"]},
}
TOKENIZE = {"prompt": "Some text", "add_special_tokens": True, "return_token_strs": True}
DETOKENIZE = {"tokens": [1, 2, 3, 4]}
MESSAGES = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "What is ☃ in Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "s"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "12 degrees", "is_error": False},
                {"type": "text", "text": "and?"},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 3, "display": "summarized"},
    "output_config": {"effort": "low"},
    "stop_sequences": ["\n\n"],
    "temperature": 0.7,
    "top_k": 5,
    "stream": True,
    "metadata": {"user_id": "somebody"},
}
RESPONSES = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What is ☃ in Paris?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "12 degrees"},
    ],
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}]},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 5,
    "truncation": "auto",
    "metadata": {"user": "somebody"},
    "stream": True,
    "store": False,
}
SCORE = {
    "model": "m",
    "query": "The function",
    "items": ["returns", [1, 2, 3]],
    "label_token_ids": [5, 6, 4000],
    "apply_softmax": True,
    "item_first": False,
    "add_special_tokens": True,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/score": SCORE,
    "/generative_scoring": SCORE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/chat/completions/render": CHAT,
}
POOLING_BODIES: dict[str, Any] = {
    "/v1/embeddings": {
        "model": "m",
        "input": ["a text", "another one", [1, 2, 3]],
        "encoding_format": "base64",
        "dimensions": 8,
        "normalize": True,
        "truncate_prompt_tokens": -1,
    },
    "/v1/rerank": {
        "model": "m",
        "query": "a text",
        "documents": ["another one", {"text": "a third"}],
        "top_n": 1,
        "return_documents": True,
        "truncate": True,
    },
    "/v1/score": {"model": "m", "text_1": "a text", "text_2": ["another one", "a third"]},
}
"""Of a model for embeddings and scores."""
CLASSIFYING_BODIES: dict[str, Any] = {
    "/v1/classify": {
        "model": "m",
        "input": ["a text", ["one", "another"], [1, 2, 3]],
        "use_activation": True,
        "truncate_prompt_tokens": -1,
    },
}
"""Of a classifier with several labels."""
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    -(10**30),
    0.5,
    1e308,
    -1e-320,
    "",
    "x" * 5000,
    "\x00",
    "\u202e\U0010ffff",
    "{{ 7*7 }}{% raise %}",
    [],
    {},
    [[]],
    [None],
    [1, "a", [2]],
    {"a": {"b": {"c": []}}},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}},
    [0] * 3000,
    {str(i): i for i in range(2000)},
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += _places(inner)
    return found


def _changed(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(body))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = _places(changed)
        if not places:
            break
        container, key = rng.choice(places)
        how = rng.randrange(5)
        if how == 0:
            del container[key]
        elif how == 1 and isinstance(container, dict):
            container[key + rng.choice(["", "_", "2", "\u0301"])] = copy.deepcopy(rng.choice(ODD))
        elif how == 2 and isinstance(container, list):
            container.extend([container[key]] * rng.choice([1, 3, 200]))
        else:
            container[key] = copy.deepcopy(rng.choice(ODD))
    return changed


def _nested(rng: random.Random) -> bytes:
    depth = rng.choice([50, 127, 129, 1000, 100_000])
    opened, closed = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opened * depth + b"1" + closed * depth
    return b'{"model":"m","prompt":"a","response_format":' + inner + b"}"


def _bytes(text: bytes, rng: random.Random) -> bytes:
    """JSON text with something wrong in it."""
    data = bytearray(text)
    for _ in range(rng.choice([1, 2, 10])):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(5)
        if how == 0:
            del data[at:]
        elif how == 1:
            data[at:at] = bytes([rng.randrange(256)])
        elif how == 2 and at < len(data):
            data[at] = rng.randrange(256)
        elif how == 3:
            data[at:at] = rng.choice(
                [b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"\x00"]
            )
        else:
            del data[at : at + rng.randrange(8)]
    return bytes(data)


def request(number: int) -> tuple[bytes, bool]:
    """(the bytes of a request, whether the connection can be used for another one by the client's own rules), by its number."""
    rng = random.Random(number)
    path = rng.choice(list(BODIES))
    kind = rng.randrange(10)
    body = json.dumps(_changed(BODIES[path], rng)).encode()
    headers = {"Host": "x", "Content-Type": "application/json", "Connection": "close"}
    method = "POST"
    if kind == 0:
        body = _bytes(body, rng)
    elif kind == 1:
        body = _nested(rng)
    elif kind == 2:
        packed = zlib.compress(body) if rng.random() < 0.5 else _gzip(body)
        encoding = rng.choice(["gzip", "deflate", "br", "gzip, gzip", "GZIP", ""])
        headers["Content-Encoding"] = encoding
        body = rng.choice([packed, packed[:-3], b"\x00" + packed, body, _bomb()])
    elif kind == 3:
        name = rng.choice(
            ["Authorization", "X-Request-Id", "X-Api-Key", "Accept-Encoding", "Origin", "Expect"]
        )
        headers[name] = rng.choice(
            ["", "Bearer", "Bearer \xff", "a" * 9000, "\t\t", "é", "../../etc", "100-continue"]
        )
    elif kind == 4:
        method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"])
    elif kind == 5:
        path = rng.choice(
            [
                "/",
                "//",
                "/v1/models/x",
                "/v1/../health",
                "/v1/chat/completions/",
                "/%00",
                "/v1/models/%ff%fe",
                "/" + "a" * 8000,
                "/v1/models/" + "b/" * 100,
                "/metrics?" + "q=1&" * 500,
            ]
        )
    # What is no HTTP is answered before its body is read: the answer may be lost with the connection.
    sound = kind != 6 and method != "BREW"
    return _message(method, path, headers, body, rng if kind == 6 else None), sound


@cache
def _bomb() -> bytes:
    """A small body that unpacks to a large one."""
    return _gzip(b" " * 60_000_000)


def _gzip(data: bytes) -> bytes:
    stream = zlib.compressobj(9, zlib.DEFLATED, 31)
    return stream.compress(data) + stream.flush()


def _message(
    method: str, path: str, headers: dict[str, str], body: bytes, framing: random.Random | None
) -> bytes:
    if framing is None:
        headers["Content-Length"] = str(len(body))
        sent = body
    else:
        how = framing.randrange(6)
        sent = body
        if how == 0:
            headers["Content-Length"] = framing.choice(["-1", "abc", "1e3", str(2**70), "", "5, 5"])
        elif how == 1:
            headers["Content-Length"] = str(len(body) + framing.choice([-7, 100]))
        else:
            headers["Transfer-Encoding"] = framing.choice(
                ["chunked", "chunked", "chunked", "identity, chunked", "x"]
            )
            sent = b""
            at = 0
            while at < len(body):
                size = framing.choice([1, 7, 100, 5000])
                piece = body[at : at + size]
                sent += b"%x\r\n%b\r\n" % (len(piece), piece)
                at += size
                if len(sent) > 60_000:
                    break
            sent += framing.choice(
                [b"0\r\n\r\n", b"0\r\n\r\n", b"", b"ffffffffffffffff\r\n", b"-1\r\n", b"zz\r\n"]
            )
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in headers.items()
    )
    return head.encode("latin-1", "replace") + b"\r\n" + sent
