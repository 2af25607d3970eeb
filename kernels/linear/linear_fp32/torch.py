"""linear_fp32 in torch: operands are converted to float32, which takes a launch of their own each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.linear.linear_fp32.op import reference

if TYPE_CHECKING:
    from gristmill.kernels.calls import LinearFp32Call


def launch(config: Config, call: LinearFp32Call) -> None:
    """x [..., K], W [N, K] -> out float32 [..., N]."""
    call.out.copy_(reference(call.x, call.weight, call.bias))


KERNEL = Kernel(
    op="linear_fp32",
    name="linear_fp32_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="torch's product of float32",
)
