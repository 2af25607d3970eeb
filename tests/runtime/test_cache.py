"""The memory of the cache: zeros of the right shape that occupy no physical memory until they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gristmill.runtime.kv_cache.paged import PagedCache, token_bytes
from gristmill.runtime.kv_cache.size import step_limits
from gristmill.runtime.loader.config import load_config
from tests.runtime.oracle import DEEPSEEK, LLAMA, MODELS


def resident() -> int:
    """Returns the resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize(
    ("name", "dtype"), [(LLAMA, torch.bfloat16), (LLAMA, torch.float32), (DEEPSEEK, torch.float16)]
)
def test_shapes_and_zeros(name: str, dtype: torch.dtype) -> None:
    config = load_config(MODELS / name)
    cache = PagedCache(config, 5, 16, dtype, torch.device("cpu"))
    assert cache.nbytes == 5 * 16 * token_bytes(config, dtype)
    assert len(cache.layers) == config.num_layers
    for layer in cache.layers:
        for part in layer:
            assert part.dtype is dtype and part.is_contiguous() and not part.any()
            assert part.shape[:2] == (5, 16)
        assert len(layer) == (1 if config.mla else 2)
    cache.layers[0][0].fill_(1)
    assert not any(part.any() for layer in cache.layers[1:] for part in layer)


def test_unused_blocks_take_no_memory() -> None:
    before = resident()
    cache = PagedCache(load_config(MODELS / LLAMA), 10_000, 16, torch.float32, torch.device("cpu"))
    assert cache.nbytes > 900 << 20
    assert resident() - before < 50 << 20


@pytest.mark.parametrize(
    ("device", "memory", "given", "expected"),
    [
        ("cpu", 0, (None, None), (64, 2048)),
        ("cpu", 0, (3000, None), (3000, 3000)),
        ("cpu", 0, (None, 70), (64, 70)),
        ("cuda", 24 << 30, (None, None), (64, 2048)),
        ("cuda", 141 << 30, (None, None), (256, 8192)),
        ("cuda", 141 << 30, (4, 512), (4, 512)),
    ],
)
def test_step_limits_suit_the_device(
    device: str,
    memory: int,
    given: tuple[int | None, int | None],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory // 2, memory))
    assert step_limits(torch.device(device), *given) == expected
