"""The code around FlashInfer's wrappers, tested without FlashInfer and without a GPU: page lists, and reuse
of plans."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`_flashinfer`, imported beside an empty module called flashinfer."""
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    name = "gristmill.kernels.attention._flashinfer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_pages(module: Any) -> None:
    table = torch.tensor(
        [[5, 2, 9], [7, 1 << 30, 1 << 30], [3, 4, 1 << 30], [1 << 30] * 3], dtype=torch.int32
    )
    indptr, indices, last, contexts = module._pages(table, torch.tensor([9, 4, 5, 0], dtype=torch.int32), 4)
    assert indptr.tolist() == [0, 3, 4, 6, 6] and indices.tolist() == [5, 2, 9, 7, 3, 4]
    assert last.tolist() == [1, 4, 1, 0] and contexts.tolist() == [9, 4, 5, 0]
    assert indptr.dtype == indices.dtype == last.dtype == torch.int32


def test_a_plan_is_kept_only_for_tensors_that_nobody_wrote(module: Any) -> None:
    planned = module.Planned(None)
    a, b = torch.zeros(3), torch.zeros(3)
    assert planned.stale((a, b), (1,)) and not planned.stale((a, b), (1,))
    assert planned.stale((a, b), (2,))
    b[0] = 1
    assert planned.stale((a, b), (2,)) and not planned.stale((a, b), (2,))
    assert planned.stale((a, b.clone()), (2,)), "equal values in another tensor"
    with torch.inference_mode():
        c = torch.zeros(3)
        assert planned.stale((a, c), (2,)) and planned.stale((a, c), (2,)), (
            "writes to inference tensors are not counted"
        )


def test_problems_that_flashinfer_has_not_are_refused_with_a_reason() -> None:
    registry = default_registry()
    for op, text, reason in (
        ("paged_attention", "heads=8,kv_heads=2", None),
        ("paged_attention", "heads=8,kv_heads=2,x=fp32", "fp16 and bf16"),
        ("paged_attention", "heads=8,kv_heads=2,head_dim=80", "head_dim 80"),
        ("paged_attention", "heads=8,kv_heads=2,sinks=true", "sinks"),
        ("mla_attention", "heads=16", None),
        ("mla_attention", "heads=16,latent_dim=256", "latent 256"),
    ):
        refusal = registry.kernel(op, f"{op}_flashinfer").accepts(registry.op(op).problem(text))
        assert refusal is None if reason is None else reason in refusal
