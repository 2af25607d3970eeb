"""Verification beside loading: kernels are resolved, and so verified and compiled, by child processes while weights are read.

Problems are known long before the weights: those of linear layers from the table of the model, the others as layers bind their plans, the
first layer of each kind first. What is found out is a record in the store; the warm-up asks again, and waits for what is not done. Sizes that no
step has may be among them, and a guess of a layer's problem may be wrong: that costs a verification, and changes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import torch

from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.device import free_bytes
from gristmill.autotune.errors import UnverifiableError
from gristmill.autotune.packing import plan_layouts
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.plan import bucket_index, bucket_sizes
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.select import NoKernelError
from gristmill.kernels.load import load
from gristmill.quant.checkpoints.weights import Weights
from gristmill.runtime.config import ModelConfig
from gristmill.runtime.kv_cache.size import step_limits
from gristmill.runtime.layers.plans import Plans
from gristmill.runtime.logprobs import ROWS as PROMPT_ROWS
from gristmill.runtime.logprobs import LogprobReader

MOST_WORKERS = 8
"""Processes that verify kernels of one device at a time."""
MOST_BESIDE = 4
"""Of them, beside loading, which takes memory for the weights."""
WORKER_BYTES = 2 << 30
"""Free memory of the device for each of them; they take about a quarter of it."""


UNCERTAIN = ("rms_norm", "fused_add_rms_norm")
"""Operations of which every norm binds both, and calls one: the warm-up knows which."""


def workers_for(device: torch.device, most: int = MOST_WORKERS) -> int:
    """Processes that verify at a time: on a GPU one for every second core, on a CPU, whose kernels use several, one for every fourth; with room
    for a context and a problem each."""
    cores = len(os.sched_getaffinity(0)) // (2 if device.type == "cuda" else 4)
    return max(1, min(most, cores, free_bytes(str(device)) // WORKER_BYTES))


class VerifiedAhead:
    """The kernels of one model's plans, resolved while it is loaded. `close`, or leaving the context, waits for what runs.

    Args:
        max_seqs, max_batch_tokens: as in `EngineConfig`.
    """

    def __init__(self, max_seqs: int | None, max_batch_tokens: int | None) -> None:
        self._limits = max_seqs, max_batch_tokens
        self._open = ExitStack()
        self._pool: ThreadPoolExecutor | None = None
        self._plans: Plans | None = None
        self._rows = self._tokens = self._workers = 0
        self._vocab: set[int] = set()  # rows of the logits head, of each rank
        self._free = self._reserved = self._tried = 0

    def __enter__(self) -> VerifiedAhead:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self, plans: Plans, config: ModelConfig, weights: Weights) -> None:
        """Begin with the linear layers, for which loading waits, and, where there are several processes, with sampling, whose kernels take longest.
        Plans follow as they are bound."""
        self._plans, self._vocab = plans, head_rows(config, weights)
        self._tried = plans.resolver.tried
        self._rows, self._tokens = step_limits(plans.device, *self._limits)
        if plans.device.type == "cuda":
            self._free = torch.cuda.mem_get_info(plans.device)[0]
            self._reserved = torch.cuda.memory_reserved(plans.device)
        self._workers = self._open.enter_context(
            plans.resolver.several(workers_for(plans.device, MOST_BESIDE))
        )
        # More threads than processes: several wait for the same verification.
        self._pool = ThreadPoolExecutor(2 * self._workers, initializer=plans.resolver.workers.be_patient)
        for problem in linear_problems(plans, weights):
            self._pool.submit(self._layouts, problem)
        plans.on_bind = self._bound
        if self._workers > 1:
            for dtype in dict.fromkeys(("bf16" if plans.x == "bf16" else "fp32", "fp32")):
                plans.bind("sample", v=config.vocab_size, x=dtype)
            LogprobReader(plans, config.vocab_size)

    @property
    def verified(self) -> int:
        """Verifications since the start, also those that somebody else has asked for."""
        return 0 if self._plans is None else self._plans.resolver.tried - self._tried

    def held_bytes(self) -> int:
        """Memory of the device that the processes hold, which is free again when they have ended; 0 on a CPU."""
        if self._plans is None or self._plans.device.type != "cuda" or self._pool is None:
            return 0
        device = self._plans.device
        own = torch.cuda.memory_reserved(device) - self._reserved
        held = self._free - torch.cuda.mem_get_info(device)[0] - own
        return max(0, min(held, self._workers * WORKER_BYTES))

    def make_room(self, nbytes: int) -> None:
        """End the processes if so many bytes of a GPU are not free beside them."""
        if self._plans is None or self._plans.device.type != "cuda" or self._pool is None:
            return
        if torch.cuda.mem_get_info(self._plans.device)[0] < nbytes + WORKER_BYTES:
            self.close()

    def stop(self) -> None:
        """Begin nothing more: from now on it is known what steps call."""
        if self._plans is not None:
            self._plans.on_bind = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Begin nothing more, and wait for what runs."""
        self.stop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._open.close()

    def expect(self, op: Op, static: Problem, layouts: frozenset[str] | None) -> None:
        """A layer, of this process or of another rank, is going to call an operation, in sizes up to that of a step."""
        if self._pool is not None and op.name not in UNCERTAIN:
            for size in bucket_sizes()[: bucket_index(self._most(op, static)) + 1]:
                self._pool.submit(self._resolve, op, op.at_bucket(static, size), layouts)

    def _bound(self, plan: BoundPlan) -> None:
        self.expect(plan.op, plan.static, plan.layouts)

    def _most(self, op: Op, problem: Problem) -> int:
        """The largest size of a problem: that of samples is in rows, and that of the logits head and of log-probabilities too, or in tokens of
        prompts whose log-probabilities are read."""
        axes = problem.as_dict()
        if op.name != "logprobs" and "v" in axes:
            return min(self._rows, self._tokens)
        if op.name == "logprobs" or axes.get("n") in self._vocab:
            return min(max(self._rows, PROMPT_ROWS), self._tokens)
        return self._tokens

    def _resolve(self, op: Op, problem: Problem, layouts: frozenset[str] | None) -> None:
        with suppress(UnverifiableError):  # for want of memory beside others: the warm-up asks again
            if self._plans is not None:
                best = self._plans.resolver.resolve(op, problem, layouts).best
                if best is not None:
                    load(best.kernel)

    def _layouts(self, problem: Problem) -> None:
        if self._plans is not None:
            with suppress(UnverifiableError, NoKernelError):
                plan_layouts(self._plans.resolver, problem)


def head_rows(config: ModelConfig, weights: Weights) -> set[int]:
    """The rows of the logits head: all, and those of each rank."""
    matrices = [w for w in weights.table.weights if w.columns and sum(w.rows) == config.vocab_size]
    return {config.vocab_size, *(n for w in matrices for n, _ in weights.shapes_of_ranks(w.target))}


def linear_problems(plans: Plans, weights: Weights) -> list[Problem]:
    """The problems of the linear layers of a model, as far as they follow from its table: not those of quantized checkpoints, of experts, and
    of layers that are fused otherwise. Over several ranks those of each rank's part, which mostly are the same."""
    if weights.stored is not None or plans.policy.activations is not None:
        return []

    def problems() -> Iterator[Problem]:
        names = {weight.target for weight in weights.table.weights}
        for weight in weights.table.weights:
            if weight.kind != "linear" or weight.experts or weight.columns is None:
                continue
            # A bias of partial sums is added to their sum.
            parts = (
                ("bias", f"{weight.target}.bias" in names and not weights.is_partial(weight.target)),
                ("silu_mul", weight.target.endswith(".gate_up")),
            )
            for n, k in weights.shapes_of_ranks(weight.target):
                yield plans.problem(
                    "linear",
                    n=n,
                    k=k,
                    x=plans.x,
                    w=plans.x if weights.scheme is None else str(weights.scheme),
                    epilogue="+".join(name for name, on in parts if on) or "none",
                )

    return [*dict.fromkeys(problems())]
