"""Memory of parameters: huge pages inside large tensors, and nowhere else."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gristmill.quant import memory

PAGE = memory.HUGE_PAGE


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (start, length) of every call of madvise."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(
        memory, "_madvise", lambda: lambda start, length, _advice: ranges.append((start, length)) or 0
    )
    return ranges


def test_whole_pages_inside_a_tensor_are_advised(advised: list[tuple[int, int]]) -> None:
    tensor = memory.empty((5, PAGE), torch.uint8)
    ((start, length),) = advised
    assert start % PAGE == length % PAGE == 0 and length >= 4 * PAGE
    assert tensor.data_ptr() <= start and start + length <= tensor.data_ptr() + tensor.nbytes


def test_small_ones_and_other_devices_are_left_alone(advised: list[tuple[int, int]]) -> None:
    memory.empty((PAGE,), torch.uint8)
    memory.empty((9, PAGE), torch.uint8, "meta")
    assert not advised


def test_a_copy_is_the_same_and_its_own() -> None:
    tensor = torch.randint(0, 256, (3000, 2000), dtype=torch.uint8)
    copy = memory.copy_of(tensor.t())
    assert torch.equal(copy, tensor.t()) and copy.is_contiguous() and copy.data_ptr() != tensor.data_ptr()


def test_a_system_without_the_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: None) -> object:
        return object()

    memory._madvise.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", none)
    try:
        assert memory._madvise() is None
        assert memory.empty((5, PAGE), torch.uint8).shape == (5, PAGE)
    finally:
        memory._madvise.cache_clear()


def test_parameters_share_blocks() -> None:
    """Tensors in a block are apart, aligned and writable; large ones, and those outside, are alone."""
    alone = memory.parameter((3, 5), torch.float16)
    assert alone.untyped_storage().nbytes() == 30
    with memory.shared_blocks():
        small = [memory.parameter((n, 7), torch.float32) for n in (1, 100, 0, 257)]
        large = memory.parameter((memory.BLOCK,), torch.uint8)
        last = memory.parameter((memory.BLOCK // 2,), torch.uint8)
        after = memory.parameter((memory.BLOCK // 2,), torch.uint8)
    assert len({t.untyped_storage().data_ptr() for t in (*small, last)}) == 1
    assert len({t.untyped_storage().data_ptr() for t in (small[0], large, after)}) == 3
    assert all(t.data_ptr() % memory.ALIGNMENT == 0 and t.is_contiguous() for t in (*small, last, after))
    for i, t in enumerate(small):
        t.fill_(i)
    assert all(bool((t == i).all()) for i, t in enumerate(small))
    assert memory.parameter((2,), torch.uint8).untyped_storage().nbytes() == 2
