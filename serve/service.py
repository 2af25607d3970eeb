"""What a server serves: the model's engine, tokenizer and conversations, and the rules for requests."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

from gristmill import __version__
from gristmill.runtime.completion import Chunk
from gristmill.runtime.progress import PHASES
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.tokenizer import Tokenizer
from gristmill.serve.config import ServeConfig
from gristmill.serve.errors import ApiError, unavailable
from gristmill.serve.keys import KeyFile
from gristmill.serve.request_log import RequestLog
from gristmill.serve.responses.store import ResponseStore
from gristmill.serve.token_text import TextOffsets, TokenTexts

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry

    from gristmill.runtime.chat.chat import Chat
    from gristmill.runtime.pooling.async_pooling import PoolingMethods
    from gristmill.runtime.status import EngineStatus


class Engine(Protocol):
    """The engine as requests use it: an `AsyncEngine`, or `Replicas`."""

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        request_id: str | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """As `AsyncEngine.stream`."""
        ...

    async def status(self) -> Sequence[EngineStatus | BaseException]:
        """As `Replicas.status`."""
        ...

    async def explain(self) -> Sequence[Any]:
        """For each replica the rows of `LLM.explain`."""
        ...

    async def drain(self, timeout: float | None = None) -> Any:
        """As `Engine.drain`, for each replica."""
        ...

    def close(self) -> Any:
        """End the processes."""
        ...


@dataclass
class Service:
    """A model behind an API.

    Attributes:
        names: the names of the model; the first is used in answers.
        max_model_len: tokens of prompt and output of one request.
        vocab_size: token ids are below it.
        defaults: sampling parameters that the model recommends, by the names of `SamplingParams`.
        engine: None while it loads, and with `ServeConfig.render_only`.
        registry: of the metrics; None = there are none.
        tracer: for a span for each request; None = none.
        on_drain: begins to drain the server.
        draining: new requests are refused.
        problem: why there is no engine.
        loading: how far each replica is that loads: its phase, what is done of it, and what there is in all.
        restarting: no engine lives.
        failed: there will be none.
        active: the exchanges that are being answered.
        in_engine: the names of the engine's requests.
        pools: whether the model makes embeddings or scores, and generates nothing.
    """

    config: ServeConfig
    names: tuple[str, ...]
    tokenizer: Tokenizer
    chat: Chat
    max_model_len: int
    vocab_size: int
    defaults: Mapping[str, Any]
    log: RequestLog
    engine: Engine | None = None
    registry: CollectorRegistry | None = None
    tracer: Tracer | None = None
    on_drain: Callable[[float | None], None] = lambda seconds: None
    draining: bool = False
    problem: str = "the model is loading"
    loading: dict[int, Any] = field(default_factory=dict)
    restarting: bool = False
    failed: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    active: set[Any] = field(default_factory=set)
    in_engine: set[str] = field(default_factory=set)
    pools: bool = False

    @property
    def name(self) -> str:
        """The name of the model in answers."""
        return self.names[0]

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Bytes of single tokens."""
        return TokenTexts(self.tokenizer)

    def text_offsets(
        self, skip_special: bool | None = None, begin: int = 0, prompt: Sequence[int] = ()
    ) -> TextOffsets:
        """Where tokens begin in their text, as of `TextOffsets`."""
        return TextOffsets(self.tokenizer, self.token_texts, skip_special is not False, begin, prompt)

    @cached_property
    def fingerprint(self) -> str:
        """What answers say made them."""
        return f"gristmill-{__version__}"

    @cached_property
    def responses(self) -> ResponseStore | None:
        """The responses that are kept; None = this server keeps none."""
        entries = self.config.store_responses
        return ResponseStore(entries, self.config.store_bytes) if entries else None

    @cached_property
    def keys(self) -> KeyFile | None:
        """Who may use the API; None = anybody."""
        path = self.config.api_key_file
        return None if path is None else KeyFile(path)

    def require_engine(self) -> Engine:
        """The engine that generates text. ApiError 503 if requests cannot be served now, 400 if the model does not."""
        if self.pools:
            raise ApiError(
                400,
                f"{self.name} is for embeddings or scores, and generates no text: use /v1/embeddings, /v1/rerank, "
                "/v1/score or /v1/classify",
                code="model_not_supported",
            )
        return self.require_ready()

    def require_pooling(self) -> PoolingMethods:
        """The engine that makes embeddings and scores. ApiError as of `require_engine`."""
        if not self.pools:
            raise ApiError(
                400,
                f"{self.name} generates text: a server with --task embed or score makes embeddings or scores of a decoder",
                code="model_not_supported",
            )
        return cast("PoolingMethods", self.require_ready())

    def require_ready(self) -> Engine:
        """The engine. ApiError 503 if requests cannot be served now."""
        if self.draining:
            raise unavailable("the server is draining: it takes no new requests", "draining")
        if self.config.render_only:
            raise ApiError(501, "this server renders and tokenizes only (--render-only)", code="render_only")
        if self.engine is None:
            raise unavailable(self.problem, "loading")
        if self.failed:
            raise unavailable(f"the engine has failed: {self.problem}", "engine_failed")
        if self.restarting:
            raise unavailable(f"the engine is started again: {self.problem}", "restarting")
        return self.engine

    @property
    def progress(self) -> dict[str, Any] | None:
        """The ``phase`` of the replica with the longest way to go, and the ``fraction`` of it that is done (None = not known), while no engine
        serves; None = one does, or none will."""
        if self.config.render_only or self.failed or (self.engine is not None and not self.restarting):
            return None
        rows = [
            (phase, done / total if total else None) for phase, done, total in self.loading.copy().values()
        ]
        first = min(rows, key=lambda row: (PHASES.index(row[0]), row[1] or 0.0), default=("starting", None))
        return dict(zip(("phase", "fraction"), first, strict=True))

    async def engine_states(self) -> list[dict[str, Any]]:
        """The status of each engine as JSON has it, or the ``error`` that it ended with; [] while there is none."""
        if self.engine is None:
            return []
        return [
            {"error": str(one)} if isinstance(one, BaseException) else asdict(one)
            for one in await self.engine.status()
        ]

    def require_model(self, name: str | None) -> str:
        """The name under which an answer is given. ApiError 404 if the server has no such model."""
        if not name or name in self.names:
            return name or self.name
        raise ApiError(
            404,
            f"the model {name!r} does not exist here; this server has {', '.join(self.names)}",
            param="model",
            code="model_not_found",
        )

    def cors(self, origin: str | None) -> list[tuple[bytes, bytes]] | None:
        """Headers of a response to a page of this origin; None = the page may not read it."""
        allowed = self.config.cors_origins
        if origin is None or not allowed or ("*" not in allowed and origin not in allowed):
            return None
        shown = "*" if "*" in allowed else origin
        return [
            (b"access-control-allow-origin", shown.encode("latin-1", "replace")),
            (b"vary", b"origin"),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
        ]
