"""Native entries of the libraries of PTX that take a call as one struct: `native_call.CallEntry` for GPUs from an architecture on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from gristmill.kernels.cuda_ptx import ARCH
from gristmill.kernels.native import cuda_function, cuda_library
from gristmill.kernels.native_call import CUDA_ARGUMENTS, CallEntry, Options


class PtxCallEntry(CallEntry):
    """The entry `name` for the calls of `op` in the library for `arch`, ``compute_75`` for example."""

    def __init__(self, name: str, op: str, arch: str = ARCH) -> None:
        super().__init__(name, op)
        self._arch = arch

    @cached_property
    def _cuda(self) -> tuple[Callable[..., int], Options]:
        options = self._options(cuda_library(self._arch), self.name)
        return cuda_function(self.name, self._arch, CUDA_ARGUMENTS), options
