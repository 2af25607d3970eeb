"""The spec of the Hopper kernel of attention over dense sequences: what it takes, and what its entry point refuses."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.varlen_attention.sm90 import _launch as launcher
from gristmill.kernels.attention.varlen_attention.sm90.spec import EXAMPLES, KERNEL
from gristmill.kernels.native import library_dir

LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
OP = default_registry().op("varlen_attention")
BASE = "q_tokens=64,seqs=4,max_q=32,max_ctx=64,total_ctx=200,heads=4,kv_heads=2"
HOPPER = Target.parse("sm_90")


def test_what_is_refused() -> None:
    for axes, reason in (
        ("x=fp32", "fp32"),
        ("qk_dim=100", "multiples of 8"),
        ("v_dim=68", "multiples of 8"),
        ("v_dim=56", "64 elements and more"),
        ("qk_dim=8", "64 elements and more"),
        ("qk_dim=200", "up to 192"),
        ("v_dim=136", "up to 128"),
    ):
        refusal = KERNEL.accepts(OP.problem(f"{BASE},{axes}"))
        assert refusal is not None and reason in refusal
    for qk_dim, v_dim in ((192, 128), (128, 128), (64, 128), (64, 64), (184, 72)):
        assert KERNEL.accepts(OP.problem(f"{BASE},qk_dim={qk_dim},v_dim={v_dim},x=fp16")) is None


def test_examples_are_accepted() -> None:
    assert len(EXAMPLES) > 3
    for axes in EXAMPLES:
        assert KERNEL.accepts(OP.problem(axes)) is None


def test_the_configuration_holds_no_size_of_a_problem() -> None:
    small, large = (
        OP.problem(f"q_tokens={n},seqs=1,max_q={n},max_ctx={n},total_ctx={n},heads=16,kv_heads=16")
        for n in (7, 4096)
    )
    assert KERNEL.config(small, HOPPER) == KERNEL.config(large, HOPPER)


@pytest.mark.skipif(not LIBRARY.is_file(), reason="needs the CUDA library")
def test_the_entry_says_what_it_takes() -> None:
    """Its shared memory fits, and other heads, dtypes and scales are refused."""

    def asked(
        qk_dim: int = 192,
        v_dim: int = 128,
        heads: int = 4,
        kv_heads: int = 2,
        seqs: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        scale: float = 1.0,
        ctas: int = 132,
        window: tuple[int, int] = (-1, 0),
    ) -> int:
        q, out = torch.empty(9, heads, qk_dim, dtype=dtype), torch.empty(9, heads, v_dim, dtype=dtype)
        k, v = torch.empty(9, kv_heads, qk_dim, dtype=dtype), torch.empty(9, kv_heads, v_dim, dtype=dtype)
        starts = torch.zeros(seqs + 1).int()
        return launcher.ENTRY.ask(
            {"ctas": ctas}, OP.Call(q, k, v, starts, starts, 9, 9, scale, None, *window, out=out)
        )

    dtype, shape, argument = -1, -2, -5
    assert 0 < asked(128) == asked(64) < asked(192) == asked(136, 8) <= 232_448
    assert asked(200) == asked(192, 136) == asked(100) == asked(192, 4) == asked(0) == shape
    for window in ((-1, -1), (0, 0), (3, 10**9), (-1, 5)):
        assert 0 < asked(64, 64, window=window) < asked(72, 64, window=window) == asked(128), window
        assert asked(192, window=window) == asked() and asked(200, window=window) == shape, window
    assert asked(64, 64, window=(10**9, 0)) == asked(128), "a window that is none is causal"
    assert asked(window=(-2, 0)) == asked(window=(0, -2)) == argument
    assert asked(heads=5) == asked(kv_heads=0) == asked(seqs=0) == shape
    assert (
        asked(dtype=torch.float32) == dtype
        and asked(scale=0.0) == asked(scale=-1.0) == asked(ctas=0) == argument
    )
