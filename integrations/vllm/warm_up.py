"""Warming up: every kernel that a step of the host can need is resolved, verified and loaded before the first request."""

from __future__ import annotations

from collections.abc import Iterator

from gristmill.integrations.sizes import powers
from gristmill.kernel_registry.scheme import cdiv
from gristmill.runtime.decode_graphs import SIZES
from gristmill.runtime.runner import Runner
from gristmill.runtime.sampler import SamplingRow
from gristmill.runtime.sampling_params import SamplingParams
from gristmill.runtime.scheduler import ScheduledRequest

NAME = "warm-up"


def warm_up(runner: Runner, max_tokens: int, max_seqs: int, max_model_len: int) -> int:
    """Run steps of every size that selects kernels, over blocks of the cache that hold nothing yet; the number of steps.

    max_tokens, max_seqs: tokens and requests per step. max_model_len: tokens of the longest request. A CUDA graph is captured for
    every number of sequences and bound of the context that decode steps have one for.
    """
    longest = min(max_model_len, runner.cache.num_blocks * runner.cache.block_size)
    bounds = [longest] if runner.decode is None else [*powers(longest)]
    most = min(max_seqs, max_tokens)
    graphs = () if runner.decode is None else SIZES
    sizes = sorted({*powers(most), *(size for size in graphs if size < most)})
    steps = [_decode(runner, seqs, context) for seqs in sizes for context in bounds]
    steps += [step for tokens in powers(max_tokens) for step in _prefill(runner, tokens, longest)]
    for step in steps:
        _run(runner, step)
    # Requests that edit logits sample in float32 whatever the model's dtype is.
    runner.processors.add(NAME, SamplingParams(repetition_penalty=2.0), [0], 1, ())
    for seqs in sizes:
        _run(runner, _decode(runner, seqs, longest))
    runner.processors.remove(NAME)
    return len(steps) + len(sizes)


def _run(runner: Runner, entries: list[ScheduledRequest]) -> None:
    runner.run(entries, [SamplingRow(SamplingParams(), 0, 0)] * len(entries))


def _decode(runner: Runner, seqs: int, context: int) -> list[ScheduledRequest]:
    """One new token of each sequence, the last of its context."""
    return [_entry(runner, context - 1, 1) for _ in range(seqs)]


def _prefill(runner: Runner, tokens: int, longest: int) -> Iterator[list[ScheduledRequest]]:
    """That many tokens as prompts from their beginning, and as chunks behind tokens that are in the cache."""
    chunk = min(tokens, longest)
    whole, rest = divmod(tokens, chunk)
    counts = [chunk] * whole + [rest] * (rest > 0)
    yield [_entry(runner, 0, count) for count in counts]
    behind = [count for count in counts if count < longest]
    if behind:
        yield [_entry(runner, min(runner.cache.block_size, longest - count), count) for count in behind]


def _entry(runner: Runner, start: int, count: int) -> ScheduledRequest:
    # All of them write the same blocks: what is there is never read by a request.
    blocks = range(cdiv(start + count, runner.cache.block_size))
    return ScheduledRequest(NAME, start, count, True, [0] * count, [*blocks], [])
