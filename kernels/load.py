"""Loading a kernel's launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernels.interpreter import install, interpreting
from gristmill.kernels.lazy_triton import complete


def load(kernel: Kernel) -> Callable[..., None]:
    """The launcher of `kernel`. For a Triton kernel, Triton is imported here rather than by the first launch, and its
    interpreter repaired if the kernel is to run in it."""
    if kernel.language != "triton":
        return kernel.load()
    if interpreting():
        install()
    launcher = kernel.load()
    complete(vars(sys.modules[kernel.target.partition(":")[0]]))
    return launcher
