"""Loading a kernel's launcher."""

from __future__ import annotations

from collections.abc import Callable

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernels.interpreter import install, interpreting


def load(kernel: Kernel) -> Callable[..., None]:
    """The launcher of `kernel`; repairs the interpreter first when a Triton kernel is to run in it."""
    if kernel.language == "triton" and interpreting():
        install()
    return kernel.load()
