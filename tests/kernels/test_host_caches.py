"""KV caches in the memory orders of host engines: every kernel that runs here reads them in place.

vLLM keeps K and V of a head side by side in the last dimension, [blocks, kv_heads, block_size, 2 · head_dim]
in two orders; others keep them in one allocation of [blocks, 2, ...] or [2, blocks, ...].
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.calls import make_call, positional
from tests.kernels.running import Runnable, runnables

Views = tuple[Tensor, Tensor]


def poisoned(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype)


def heads_first(blocks: int, size: int, heads: int, dim: int, like: Tensor) -> Views:
    memory = poisoned(blocks, heads, size, 2 * dim, like=like).transpose(1, 2)
    return memory[..., :dim], memory[..., dim:]


def tokens_first(blocks: int, size: int, heads: int, dim: int, like: Tensor) -> Views:
    memory = poisoned(blocks, size, heads, 2 * dim, like=like)
    return memory[..., :dim], memory[..., dim:]


def pair_in_a_block(blocks: int, size: int, heads: int, dim: int, like: Tensor) -> Views:
    memory = poisoned(blocks, 2, size, heads, dim, like=like)
    return memory[:, 0], memory[:, 1]


def one_layer_of_many(blocks: int, size: int, heads: int, dim: int, like: Tensor) -> Views:
    memory = poisoned(blocks, 3, 2, heads, size, dim, like=like)[:, 1].transpose(2, 3)
    return memory[:, 0], memory[:, 1]


ORDERS = (heads_first, tokens_first, pair_in_a_block, one_layer_of_many)
PAGED = runnables("paged_attention")
MLA = runnables("mla_attention")


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("kernel", PAGED, ids=str)
def test_paged_attention(kernel: Runnable, order: Callable[..., Views]) -> None:
    """Results are bitwise equal to those over separate contiguous caches, and poison around the views is not
    read."""
    texts = ("q_tokens=9,seqs=3,max_q=4,max_ctx=40,total_ctx=70,heads=4,kv_heads=2,head_dim=64",)
    for problem in map(kernel.op.problem, texts):
        if kernel.kernel.accepts(problem) is not None:
            continue
        q, k, v, *rest = kernel.op.inputs(problem, 5, "cpu")
        expected, actual = (torch.full_like(q, float("nan")) for _ in range(2))
        kernel(q, k.contiguous(), v.contiguous(), *rest, expected)
        views = order(*k.shape, like=k)
        for view, values in zip(views, (k, v), strict=True):
            view.copy_(values)
            assert not view.is_contiguous()
        kernel(q, *views, *rest, actual)
        assert expected.isfinite().all() and torch.equal(actual, expected)


@pytest.mark.parametrize("kernel", MLA, ids=str)
def test_mla_attention(kernel: Runnable) -> None:
    for text in kernel.op.examples:
        problem = kernel.op.problem(text)
        if kernel.kernel.accepts(problem) is not None or not problem.integer("q_tokens"):
            continue
        q, cache, *rest = kernel.op.inputs(problem, 5, "cpu")
        outputs = []
        for memory in (cache.contiguous(), poisoned(cache.shape[0], 2, *cache.shape[1:], like=cache)[:, 1]):
            memory.copy_(cache)
            ((shape, dtype),) = kernel.op.like(q, memory, *rest)
            outputs.append(torch.full(shape, float("nan"), dtype=dtype))
            kernel(q, memory, *rest, outputs[-1])
        assert torch.equal(*outputs)
        return


def test_every_family_is_covered() -> None:
    for kernels in (PAGED, MLA):
        assert {"cpp", "triton"} <= {kernel.kernel.language for kernel in kernels}


@positional
def ignores_strides(config, q, k_cache, v_cache, *rest):
    """Planted fault: treats the caches as contiguous."""
    k, v = (torch.as_strided(c, c.shape, torch.empty(c.shape).stride()) for c in (k_cache, v_cache))
    torch_kernel = next(k for k in PAGED if k.kernel.name == "paged_attention_torch")
    from gristmill.kernels.load import load

    load(torch_kernel.kernel)(config, make_call(torch_kernel.kernel.op, q, k, v, *rest))


def test_a_kernel_that_ignores_strides_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = next(k for k in PAGED if k.kernel.name == "paged_attention_torch")
    monkeypatch.setattr("tests.kernels.running.load", lambda spec: ignores_strides)
    with pytest.raises(AssertionError):
        test_paged_attention(kernel, heads_first)
