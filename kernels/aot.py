"""What a Triton kernel asks the compile matrix to build for a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AotCase:
    """One ahead-of-time compilation.

    signature: argument name -> Triton type (``*bf16``, ``i32``, ``fp32``); pointers and ``i32`` named in `aligned` are
    multiples of 16. constants: the constexpr arguments. options: num_warps, num_stages. promises: instructions that
    must appear in the machine code (``wgmma``, ``mfma``, ...), by the names of `gristmill.kernel_registry.targets`.
    """

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    promises: tuple[str, ...] = ()
