"""LayerNorm in C++ for CPUs (`_layer_norm_cpu.cpp`), compiled for every ISA level."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.native import best_config
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import LayerNormCall

ENTRY = CallEntry("gm_layer_norm", "layer_norm")


def launch(config: Config, call: LayerNormCall) -> None:
    """The arguments of `layer_norm.reference`, then out [..., N]."""
    ENTRY.cpu(config, call)


KERNEL = Kernel(
    op="layer_norm",
    name="layer_norm_cpu",
    provider="gristmill",
    language="cpp",
    target=f"{__name__}:launch",
    requires=Requirement(vendors=("cpu",), code="cpp"),
    summary="one row a task, the mean before the squares, float32 inside",
    config=best_config("gm_layer_norm"),
    supports=("residual",),
    batch_invariant=True,
    priority=100,
)
