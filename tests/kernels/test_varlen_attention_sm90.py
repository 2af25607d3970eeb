"""The spec of the Hopper kernel of attention over dense sequences: what it takes, and what its entry point refuses."""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import pytest

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.attention.varlen_attention.sm90 import _launch as launcher
from gristmill.kernels.attention.varlen_attention.sm90.spec import EXAMPLES, KERNEL
from gristmill.kernels.native import cuda_function, library_dir

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

    def asked(qk_dim: int = 192, v_dim: int = 128, **others: Any) -> int:
        given = {"heads": 4, "kv_heads": 2, "dtype": 2, "scale": 1.0, "ctas": 132, "seqs": 1} | others
        shape = (9, 9, given["seqs"], given["heads"], given["kv_heads"], qk_dim, v_dim, given["dtype"])
        return int(
            cuda_function("gm_varlen_attention_sm90", "sm_90a", launcher.ARGUMENTS)(
                *(None,) * 7, (c_int64 * 8)(), *shape, given["scale"], given["ctas"], -1, None
            )
        )

    dtype, shape, argument = -1, -2, -5
    assert 0 < asked(128) == asked(64) < asked(192) == asked(136, 8) <= 232_448
    assert asked(200) == asked(192, 136) == asked(100) == asked(192, 4) == asked(0) == shape
    assert asked(heads=5) == asked(kv_heads=0) == asked(seqs=0) == shape
    assert asked(dtype=0) == dtype and asked(scale=0.0) == asked(scale=-1.0) == asked(ctas=0) == argument
