"""The compilations of a Triton kernel in the compile matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.kernel_registry.target import Target
from gristmill.kernels.lazy_triton import function_of


@dataclass(frozen=True)
class AotCase:
    """One ahead-of-time compilation.

    Attributes:
        function: the jitted function.
        signature: argument name -> Triton type (``*bf16``, ``i32``, ``fp32``); pointers and ``i32`` named in `aligned` are multiples of 16.
        constants: the constexpr arguments.
        options: num_warps, num_stages.
        promises: instructions that must appear in the machine code (``wgmma``, ``mfma``, ...), by the names of
            `gristmill.kernel_registry.targets`; and, with the constant OVERLAP (`kernels.dependent_launch`), the wait for the previous
            kernel ahead of every access to memory.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    promises: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "function", function_of(self.function))
        if self.constants.get("OVERLAP"):
            object.__setattr__(self, "promises", (*self.promises, "dependent_launch"))


def matrix_product(target: Target, rows: int) -> tuple[str, ...]:
    """The instruction that a half-precision `tl.dot` over tiles of `rows` rows is guaranteed to use on a target; () if none is.

    From 64 rows on, wgmma on Hopper and tcgen05 on data-centre Blackwell; below that, and on other targets, any matrix
    instruction. Before sm_80 Triton uses none on NVIDIA, since it dropped Volta's.
    """
    features = target.features
    large = next((name for name in ("wgmma", "tcgen05") if name in features), None)
    if rows >= 64 and large is not None:
        return (large,)
    return tuple(
        name
        for name, feature in (("mma", "mma.bf16"), ("mfma", "mfma"), ("wmma", "wmma"))
        if feature in features
    )
