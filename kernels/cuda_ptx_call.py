"""Native entries of the library of PTX that take a call as one struct: `native_call.CallEntry` for GPUs from sm_80 on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from gristmill.kernels.cuda_ptx import ARCH
from gristmill.kernels.native import cuda_function, cuda_library
from gristmill.kernels.native_call import CUDA_ARGUMENTS, CallEntry, Options


class PtxCallEntry(CallEntry):
    """The entry `name` for the calls of `op`."""

    @cached_property
    def _cuda(self) -> tuple[Callable[..., int], Options]:
        options = self._options(cuda_library(ARCH), self.name)
        return cuda_function(self.name, ARCH, CUDA_ARGUMENTS), options
