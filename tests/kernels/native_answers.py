"""What the library for Hopper says of a problem with a configuration: a call that names no device launches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.scheme import cdiv
from gristmill.kernels.linear.frag16_sm90 import _launch as frag16
from gristmill.kernels.linear.w8a8_sm90 import _launch as w8a8
from gristmill.kernels.moe.grouped_linear.frag16_sm90 import _launch as grouped
from gristmill.kernels.moe.moe.w8a8_sm90 import _launch as grouped_w8a8
from gristmill.kernels.native import cuda_entry, library_dir
from tests.calls import positional
from tests.kernels.built_formats import built

HAS_LIBRARY = (library_dir() / "libgristmill_cuda_sm90a.so").is_file()
needs_library = pytest.mark.skipif(not HAS_LIBRARY, reason="the CUDA library is not built: needs nvcc")
BF16, POINTER = 2, 16
Call = tuple[str, Any, dict[str, int]]
"""An entry, the module of its launcher, and the fields of its arguments."""


def _linear(problem: Problem, config: Config, schedule: str) -> Iterator[Call]:
    if str(config["format"]) not in {form.name for form in built(schedule)}:
        return
    m, n, k = problem.integers(*"mnk")
    fields = {name: int(value) for name, value in config.items() if name not in frag16.DESCRIPTIVE}
    fields |= {"m": m, "n": n, "k": k, "ldx": cdiv(k, 8) * 8, "x_type": BF16, "scale_type": BF16}
    yield f"gm_linear_{config['format']}_{schedule}_sm90", frag16, fields


def _linear_w8a8(problem: Problem, config: Config) -> Iterator[Call]:
    m, n, k = problem.integers(*"mnk")
    fields = {name: int(value) for name, value in config.items() if name != "format"}
    yield (
        f"gm_linear_w8a8_{config['format']}_sm90",
        w8a8,
        fields | {"m": m, "n": n, "k": k, "ldx": k, "y_type": BF16},
    )


@positional
def _product(config: Config, number: str, rows: int, e: int, n: int, k: int, silu_mul: bool) -> Call:
    fields = {name: int(config[f"{name}{number}"]) for name in grouped.SHAPE}
    fields |= {"offsets": POINTER, "rows": rows, "x_rows": rows, "experts": e, "n": n, "k": k, "ldx": k}
    fields |= {"top_k": 1, "silu_mul": int(silu_mul), "x_type": BF16, "scale_type": BF16}
    return f"gm_grouped_linear_{config['format']}_sm90", grouped, fields


def _moe(problem: Problem, config: Config, gated: bool) -> Iterator[Call]:
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    yield _product(config, "1", m * top_k, e, 2 * i, h, gated)
    yield _product(config, "2", m * top_k, e, h, i, False)


def _grouped_linear(problem: Problem, config: Config) -> Iterator[Call]:
    m, e, n, k = problem.integers(*"menk")
    yield _product(config, "", m, e, n, k, "silu_mul" in problem.flags("epilogue"))


def _moe_w8a8(problem: Problem, config: Config) -> Iterator[Call]:
    m, top_k, e, h, i = problem.integers("m", "top_k", "e", "h", "i")
    for number, n, k in (("1", 2 * i, h), ("2", h, i)):
        fields = {name: int(config[f"{name}{number}"]) for name in grouped_w8a8.SHAPE}
        fields |= {"rows": m * top_k, "experts": e, "n": n, "k": k, "y_type": BF16}
        yield f"gm_grouped_w8a8_{config['format']}_sm90", grouped_w8a8, fields


_CALLS: dict[str, Callable[[Problem, Config], Iterator[Call]]] = {
    "moe_sm90": lambda problem, config: _moe(problem, config, True),
    "moe_epilogue_sm90": lambda problem, config: _moe(problem, config, False),
    "moe_w8a8_sm90": _moe_w8a8,
    "grouped_linear_sm90": _grouped_linear,
    "linear_w8a8_sm90": _linear_w8a8,
    **{
        f"linear_{bits}_{name}_sm90": lambda problem, config, schedule=schedule: _linear(
            problem, config, schedule
        )
        for bits in ("w4a16", "w8a16")
        for name, schedule in (
            ("decode", "decode"),
            ("decode_ws", "decode_ws"),
            ("gemm_ws", "gemm_ws"),
            ("invariant", "gemm_ws"),
        )
    },
}


def answers(kernel: Kernel) -> bool:
    """Whether the library that is built here says what it refuses of a kernel's calls."""
    return HAS_LIBRARY and kernel.name in _CALLS


def answer(kernel: Kernel, problem: Problem, config: Config) -> int | None:
    """Bytes of shared memory, or the code of the first launch that is refused; None where the library has no answer."""
    if not answers(kernel):
        return None
    codes = []
    for name, module, fields in _CALLS[kernel.name](problem, config):
        codes.append(cuda_entry(name, module.ARGS)(module.ARGS.new(**({"device": -1} | fields))))
    return min(codes, default=None)
