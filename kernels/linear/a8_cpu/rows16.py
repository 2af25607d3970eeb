"""Linear with int8 activations in C++ for CPUs over cpu_rows16_v1 (`_linear_a8_cpu.cpp`): integer products, exact sums.

x is quantized in the kernel, by the rules of `quant/activations.py`. Which instructions multiply depends on the code level:
vpdpbusd with VNNI, else pmaddubsw with sums of int16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.cpu import need_rows16, packing, shape_of
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearCall

WEIGHTS = ("int4", "int8", "mxfp4", "nvfp4")
BLOCKS = {"int8_token": 0, "int8_g32": 32, "int8_g128": 128}
"""Columns of x that share a scale, by activation format; 0: the whole row."""
ENTRY = CallEntry("gm_linear_a8_rows16", "linear")
_LEVEL = best_config("gm_linear_a8_rows16")


def launch(config: Config, call: LinearCall) -> None:
    """x [..., K], the five tensors of cpu_rows16_v1 -> out [..., N or N / 2]."""
    try:
        ENTRY.cpu(config, call)
    except (TypeError, ValueError):
        need_rows16("linear_a8_cpu", config, call.weight, *shape_of(call))
        raise


def accepts(problem: Problem) -> str | None:
    """Named 4-bit and 8-bit schemes whose codes are integers after scaling, with int8 activations."""
    scheme = QuantScheme.parse(problem.text("w"))
    if scheme.activation not in BLOCKS:
        return f"takes activations of {', '.join(BLOCKS)}, not {scheme.activation or 'their own dtype'}"
    if not scheme.is_named or scheme.weight not in WEIGHTS:
        return f"decodes the schemes of ALL_WEIGHT_SCHEMES of {', '.join(WEIGHTS)}, not {scheme}"
    if problem["act_order"] and BLOCKS[scheme.activation]:
        return f"{scheme.activation} blocks are of consecutive columns, which act_order separates"
    return None


def config(problem: Problem, target: Target) -> Config:
    """The code level, what the scheme determines of a packed weight, and the block of x (0 = row)."""
    scheme = QuantScheme.parse(problem.text("w"))
    return {**_LEVEL(problem, target), **packing(scheme), "block": BLOCKS[scheme.activation or ""]}


KERNEL = Kernel(
    op="linear",
    name="linear_a8_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="x quantized to int8, 16 output rows per vector, products and sums in integers",
    accepts=accepts,
    supports=("codes",),
    config=config,
    layouts=("cpu_rows16_v1",),
    batch_invariant=True,
    priority=100,
)
