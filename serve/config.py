"""The options of the server: declared once, for `serve` and the command line."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gristmill.runtime.errors import UsageError
from gristmill.runtime.parallel.route import Route


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The options of the server.

    Args:
        host: the address to listen at. The default is reached from this machine only; ``0.0.0.0`` and ``::`` are reached from outside.
        port: the port; 0 = a free one, which the log names.
        uds: listen at a Unix socket with this path instead.
        admin_port: the port of the admin plane, at 127.0.0.1 only; None = there is none.
        api_key_file: a file of API keys, one per line, read again when it changes; None = no key is asked for.
        admin_key_file: the same for the admin plane.
        tls_certificate, tls_key: PEM files; with them the server speaks HTTPS.
        cors_origins: origins whose pages may call the API, or ``*``.
        root_path: the path prefix under which a reverse proxy offers the server.
        served_model_name: names of the model in the API; the first is used in answers. Default: the name it was given by.
        replicas: engine processes that share the requests, each with the model.
        restarts: deaths of an engine process within ten minutes after which it is started again; one more, and it is given up.
        route: how they share them. ``prefix``: to the one that has computed the longest part of the prompt; ``round_robin``: in turn.
        chat_template: a Jinja template, or the path of one, instead of the model's.
        chat_format: the format of tool calls and reasoning in the model's output; None = found by the template.
        generation_config: where the defaults of sampling come from. ``model``: its generation_config.json; ``none``: temperature 1, no filters.
        render_only: serve what needs a tokenizer alone: tokenize, detokenize, render, count_tokens. No weights are read.
        drain_seconds: seconds that unfinished requests have after SIGTERM, or a drain without a limit of its own.
        max_body_bytes: bytes of a request's body, also after it was decompressed.
        max_choices: the most completions of one request, `n` times prompts.
        max_schema_bytes: bytes of a JSON schema or a grammar in a request.
        store_responses: how many responses of /v1/responses are kept, to go on from and to be made in the background; 0 = none.
        store_bytes: bytes of JSON that they have together, in memory.
        slow_reader_seconds: seconds that a stream waits for a client that does not read; then the request is aborted.
        stream_interval_ms: the least time between two parts of a stream; requests may have their own.
        log_file: where the log goes; None = stderr. One JSON object per line.
        otlp_endpoint: where spans of requests are sent, such as ``http://localhost:4318/v1/traces``; None = nowhere.
        metrics_prefix: prefix of the names of metrics, before a colon.

    Raises:
        UsageError: an invalid value; the message names it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    admin_port: int | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    cors_origins: Sequence[str] = ()
    root_path: str | None = None
    served_model_name: Sequence[str] = ()
    replicas: int = 1
    restarts: int = 5
    route: Route = "prefix"
    chat_template: str | None = None
    chat_format: str | None = None
    generation_config: Literal["model", "none"] = "model"
    render_only: bool = False
    drain_seconds: float = 30.0
    max_body_bytes: int = 16 << 20
    max_choices: int = 128
    max_schema_bytes: int = 64 << 10
    store_responses: int = 0
    store_bytes: int = 256 << 20
    slow_reader_seconds: float = 60.0
    stream_interval_ms: float = 0.0
    log_file: str | None = None
    otlp_endpoint: str | None = None
    metrics_prefix: str = "vllm"

    def __post_init__(self) -> None:
        for name in ("port", "admin_port"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 0 <= value <= 65535):
                raise UsageError(f"{name} must be a port, 0 to 65535, got {value!r}")
        for name in ("replicas", "max_body_bytes", "max_choices", "max_schema_bytes", "store_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be an integer of at least 1, got {value!r}")
        for name in ("restarts", "store_responses"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UsageError(f"{name} must be an integer of at least 0, got {value!r}")
        for name in ("drain_seconds", "slow_reader_seconds", "stream_interval_ms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
                raise UsageError(f"{name} must be a number of at least 0, got {value!r}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise UsageError("tls_certificate and tls_key are given together")
        for name in ("api_key_file", "admin_key_file", "tls_certificate", "tls_key"):
            value = getattr(self, name)
            if value is not None and not Path(value).is_file():
                raise UsageError(f"{name}: there is no file {value}")
        if self.tls_certificate is not None and self.tls_key is not None:
            try:  # before the model is loaded
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_certificate, self.tls_key)
            except OSError as error:
                raise UsageError(
                    f"tls_certificate {self.tls_certificate} and tls_key {self.tls_key} are not a certificate and its key in PEM: {error}"
                ) from error
        if isinstance(self.cors_origins, str) or isinstance(self.served_model_name, str):
            raise UsageError("cors_origins and served_model_name are lists of texts")
