"""The options of an engine: declared once, for `Engine`, `LLM`, command lines, hosts and replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec

import torch

from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.quant.checkpoints.checkpoint import Checkpoint
from gristmill.runtime.errors import UsageError
from gristmill.runtime.integers import as_flag, check_bytes_or_part, plain
from gristmill.runtime.kv_transfer.config import KVTransfer
from gristmill.runtime.sampling_params import check_integers, is_seconds
from gristmill.runtime.speculation.config import Speculation

P = ParamSpec("P")

MOST_SEQS = 2**31 - 1
"""Kernels number the requests of a step by int32."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of `Engine`, and of everything that makes one.

    Integers may be those of numpy; they are kept as Python's. A policy given as a path is loaded, and `speculate` and `kv_transfer` are parsed.

    Args:
        dtype: the dtype of activations, cache and weights kept in floats: ``auto`` (the checkpoint's), ``float32``, ``float16``,
            ``bfloat16``, or a torch.dtype.
        quant: a scheme to quantize linear weights to at load, such as ``int4_g128``; None = as stored.
        quant_head: a scheme for the embedding and the logits head, tied or not, such as ``int8``: in groups of 128, or by row where 128
            does not divide the hidden size. None = as stored; in floats if `quant` is a float scheme.
        kv_dtype: the format of the KV cache. ``auto``: the dtype of activations. ``fp8``: e4m3 codes with the checkpoint's scales per tensor
            or per head (1.0 where it has none, with a warning); half the memory of bf16. ``fp8_token_head``: e4m3 codes with a scale per
            token and head, which is computed when they are written. MLA models take ``auto`` only.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``. ``auto``: the first GPU that kernels run on, else the CPU; a line says which.
        policy: a Policy or the path of a policy file; None = the one that GRISTMILL_POLICY names.
        block_size: tokens per block of the cache.
        num_blocks: number of blocks in the cache; None = as many as fit in `memory`.
        memory: the size of the cache: bytes (an int), or a fraction of the device's free memory (a float up to 1). None = 85 % of a GPU's
            free memory; on a CPU the memory of max_seqs full sequences, at most 1 GiB.
        max_batch_tokens: tokens per step; None = 8192 on a GPU with at least 40 GiB, else 2048, and at least max_seqs.
        max_seqs: requests per step; None = 256 on such a GPU, else 64.
        max_model_len: tokens of prompt and output of one request; None = the model's own limit.
        max_chunk: prompt tokens of one request per step; None = max_batch_tokens.
        enable_prefix_cache: requests with a common prefix share blocks.
        seed: source of the seeds of requests without one.
        decode_graphs: run decode steps as CUDA graphs, on a CPU as records of native calls; None = on a GPU, and on a CPU of one rank those of up
            to 64 requests, without padding.
        prompt_graphs: tokens of the largest other step that runs as CUDA graphs of what lies between attention calls, padded; 0 = none.
            None = as long as launches take longer than the arithmetic of a step, on a GPU with decode graphs.
        graph_memory: the most memory that all these graphs take: bytes (an int), or a fraction of the device's memory (a float up to 1); of a draft
            model likewise. Graphs that go over it are left out, with a warning: small steps are captured first. None = 5 % of the device's
            memory.
        async_steps: launch each step before the ids of the one before it are on the host, so that the device does not wait for the host;
            outputs are the same. None = on GPUs; on a CPU nothing overlaps.
        queue_order: ``fcfs``: requests are admitted in the order they come; ``priority``: lower priority values first.
        priority_span: under ``priority``, younger requests that may pass a request for each level they are ahead of it, so that
            no request starves; None = any number.
        max_queued, max_queued_tokens: waiting requests, and their prompt tokens, beyond which a request is refused (QueueFull);
            None = no limit.
        max_bypass: number of younger requests that may be admitted before one that waits for cache blocks.
        inter_prefill_budget: prompt tokens that a step may compute in addition to those of its first prompt; None = no limit.
        speculate: how tokens are drafted and verified several at a time, a `Speculation` or its text, such as ``ngram:4``; ids are
            the same as without. None = not at all.
        tensor_parallel: processes that share the model, each on its own device (`docs/parallel.md`): ``cuda:0`` and on, or the CPU.
            weight and cache sizes of such an engine are those of all of them together; `memory` is per device. `close` ends them.
        rank_timeout: seconds that a step of such an engine may take, and a tenth of what loading may; then it ends with a RankError.
        context_parallel: the ranks of tensor_parallel share the cache of every context by tokens: for MLA models, whose latents each of
            them has otherwise, and for models with fewer KV heads than ranks.
        kv_transfer: where blocks of the cache are kept besides it, a `KVTransfer` or its text, such as ``host:8GiB``; ids are the same as
            without. None = nowhere.
        warm: ``auto``: before the first request, kernels for every step within the limits are selected, verified where they have no record,
            and loaded; on a GPU steps also run, which compiles what is left, and decode graphs are captured. ``off``: the first requests wait for
            that; for programs that end after a few requests, as `gristmill generate` and `eval` do by default.
        task: what the model is for: ``generate`` text, ``embed`` texts, ``score`` pairs of texts. ``auto``: an encoder, or a directory with a
            modules.json, is for embeddings, or for scores if it has a classifier; other models generate. Decoders embed by their last token,
            and score by their probability of "yes" (Qwen3-Reranker). Models that do not generate have no use for options of the cache and of
            graphs.

    Raises:
        UsageError: an invalid value; the message names it.
        PolicyError: a policy file that is unreadable.
    """

    dtype: str | torch.dtype = "auto"
    quant: str | QuantScheme | torch.dtype | None = None
    quant_head: str | QuantScheme | None = None
    kv_dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    policy: Policy | str | Path | None = None
    block_size: int = 16
    num_blocks: int | None = None
    memory: int | float | None = None
    max_batch_tokens: int | None = None
    max_seqs: int | None = None
    max_model_len: int | None = None
    max_chunk: int | None = None
    enable_prefix_cache: bool = True
    seed: int = 0
    decode_graphs: bool | None = None
    prompt_graphs: int | None = None
    graph_memory: int | float | None = None
    async_steps: bool | None = None
    queue_order: Literal["fcfs", "priority"] = "fcfs"
    priority_span: int | None = 256
    max_queued: int | None = None
    max_queued_tokens: int | None = None
    max_bypass: int = 8
    inter_prefill_budget: int | None = None
    speculate: Speculation | str | None = None
    tensor_parallel: int = 1
    rank_timeout: float = 300.0
    context_parallel: bool = False
    kv_transfer: KVTransfer | str | None = None
    warm: Literal["auto", "off"] = "auto"
    task: Literal["auto", "generate", "embed", "score"] = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            self._set(field.name, plain(getattr(self, field.name)))
        if isinstance(self.policy, str | Path):
            self._set("policy", Policy.load(self.policy))
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise UsageError(
                f"policy must be a Policy or the path of a policy file, got {type(self.policy).__name__}"
            )
        if self.speculate is not None:
            self._set("speculate", Speculation.parse(self.speculate))
        if self.kv_transfer is not None:
            self._set("kv_transfer", KVTransfer.parse(self.kv_transfer))
        if self.task not in (tasks := ("auto", "generate", "embed", "score")):
            raise UsageError(f"task must be one of {', '.join(tasks)}, got {self.task!r}")
        if self.warm not in ("auto", "off"):
            raise UsageError(f"warm must be 'auto' or 'off', got {self.warm!r}")
        if self.queue_order not in ("fcfs", "priority"):
            raise UsageError(f"queue_order must be 'fcfs' or 'priority', got {self.queue_order!r}")
        if not is_seconds(self.rank_timeout) or not 0 < self.rank_timeout < 1e6:
            raise UsageError(f"rank_timeout must be seconds, more than 0, got {self.rank_timeout!r}")
        for name, wanted in (
            ("enable_prefix_cache", "True or False"),
            ("decode_graphs", "True, False or None"),
            ("async_steps", "True, False or None"),
        ):
            value = getattr(self, name)
            if (flag := as_flag(value)) is None and (value is not None or "None" not in wanted):
                raise UsageError(f"{name} must be {wanted}, got {value!r}")
            self._set(name, flag)
        check_bytes_or_part("memory", self.memory, "the free memory", least=1)
        check_bytes_or_part("graph_memory", self.graph_memory, "the device's memory", least=0)
        check_integers(
            block_size=self.block_size,
            max_seqs=self.max_seqs,
            max_model_len=self.max_model_len,
            tensor_parallel=self.tensor_parallel,
        )
        if self.max_seqs is not None and self.max_seqs > MOST_SEQS:
            raise UsageError(f"max_seqs must be at most {MOST_SEQS}, got {self.max_seqs}")
        if self.prompt_graphs != 0 or isinstance(self.prompt_graphs, bool):
            check_integers(prompt_graphs=self.prompt_graphs)
        if self.speculate is not None and self.tensor_parallel > 1:
            raise UsageError(
                "speculate cannot be combined with tensor_parallel: drafts are not sent to ranks"
            )
        if type(self.context_parallel) is not bool or (self.context_parallel and self.tensor_parallel == 1):
            raise UsageError(
                "context_parallel is True or False, and True with tensor_parallel of at least 2, "
                f"got {self.context_parallel!r} and {self.tensor_parallel}"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """A configuration from options by name. UsageError: an option that there is not; the message has a similar one."""
        cls.require_known(options)
        return cls(**options)

    @classmethod
    def require_known(cls, names: Iterable[str], leave_out: Collection[str] = ()) -> None:
        """UsageError, with a similar name, if one is no option, or is left out because a host has another argument for it."""
        known = [field.name for field in fields(cls) if field.name not in leave_out]
        for name in names:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                raise UsageError(f"an engine has no option {name!r}; {hint}")

    @property
    def loaded_policy(self) -> Policy | None:
        """`policy`, loaded."""
        return self.policy if isinstance(self.policy, Policy) else None

    @property
    def speculation(self) -> Speculation | None:
        """`speculate`, parsed."""
        return self.speculate if isinstance(self.speculate, Speculation) else None

    @property
    def transfer(self) -> KVTransfer | None:
        """`kv_transfer`, parsed."""
        return self.kv_transfer if isinstance(self.kv_transfer, KVTransfer) else None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def takes_options(
    config: Callable[P, EngineConfig],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, str | Path | Checkpoint, P], None]]:
    """Declare that an ``__init__`` takes a model and the options of `config`, for type checkers, `help` and editors."""

    def declare(
        init: Callable[..., None],
    ) -> Callable[Concatenate[Any, str | Path | Checkpoint, P], None]:
        own = [p for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = inspect.signature(config).parameters.values()
        init.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return init

    return declare
