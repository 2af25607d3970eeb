"""Native entries that take a call as one struct, written from the declaration of the operation (`kernel_registry.call_struct`).

    ENTRY = CallEntry(<name of the entry>, "rms_norm")
    ENTRY.cpu(level, call)               # the entry of a code level
    ENTRY.cuda(config, call, device)     # on the device's current stream

An entry of a GPU also gets the options that ``GM_CUDA_CALL`` names, 64-bit integers out of the configuration: their names are read from the
library, so each is declared once, in the source that reads it. When an entry is first looked up, the digest of the struct that the
library was compiled with is compared with the digest of the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, c_char_p, c_int, c_uint64, c_void_p
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.call import Call
from gristmill.kernel_registry.call_struct import WEIGHTS, digest, packer
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import check, cpu_function, cpu_library, cuda_function, cuda_library
from gristmill.quant.native import NativeLibraryError

if TYPE_CHECKING:
    from torch import Tensor

CPU_ARGUMENTS = (c_char_p,)
CUDA_ARGUMENTS = (c_char_p, c_char_p, c_int, c_void_p)


def addresses(weight: Sequence[Tensor]) -> list[int]:
    """The addresses of the tensors of a packed weight, and nulls."""
    return [tensor.data_ptr() for tensor in weight] + [0] * (WEIGHTS - len(weight))


def dtype_code(dtype: Any) -> int:
    """The code of a torch dtype in native entries."""
    return DTYPE_CODES[dtype_name(dtype)]


class CallEntry:
    """The entry `name` for the calls of `op`. Its functions are looked up once."""

    def __init__(self, name: str, op: str) -> None:
        self.name, self._op = name, op
        self._checked: set[str] = set()

    @cached_property
    def op(self) -> Op:
        """The operation; looked up late, so that its examples are not part of what a launch runs."""
        return default_registry().op(self._op)

    @cached_property
    def pack(self) -> Callable[[Any], bytes]:
        """``pack(call)``: the bytes of the struct."""
        return packer(self.op, {"addresses": addresses, "dtype_code": dtype_code, "row_stride": row_stride})

    def cpu(self, level: Any, call: Call) -> None:
        """Call the entry of a code level. Raises the exception that a native return code stands for."""
        function = cpu_function(self.name, level, CPU_ARGUMENTS)
        if level not in self._checked:
            self._check(cpu_library(), f"{self.name}__{level}")
            self._checked.add(level)
        check(function(self.pack(call)), self.name)

    def cuda(self, options: Mapping[str, Any], call: Any, device: int) -> None:
        """Launch on the current stream of `device`. Raises the exception that a native return code stands for."""
        import torch

        function, names, layout = self._cuda
        values = layout.pack(*[int(options[name]) for name in names])
        stream = torch.cuda.current_stream(device).cuda_stream
        check(function(self.pack(call), values, device, stream), self.name)

    def ask(self, options: Mapping[str, Any], call: Any) -> int:
        """What an entry of a GPU says without a device: bytes of shared memory, or the code of a refusal."""
        function, names, layout = self._cuda
        return function(self.pack(call), layout.pack(*[int(options[name]) for name in names]), -1, None)

    @cached_property
    def _cuda(self) -> tuple[Callable[..., int], tuple[str, ...], Struct]:
        function = cuda_function(self.name, "sm_90a", CUDA_ARGUMENTS)
        library = cuda_library("sm_90a")
        self._check(library, self.name)
        named = library[f"options_of_{self.name}"]
        named.restype = c_char_p
        names = tuple(name.strip() for name in named().decode().split(",") if name.strip())
        return function, names, Struct(f"{len(names)}q")

    def _check(self, library: CDLL, symbol: str) -> None:
        """NativeLibraryError if the library was compiled with another struct of the operation's calls."""
        try:
            compiled = library[f"call_of_{symbol}"]
        except AttributeError:
            raise NativeLibraryError(
                f"{symbol} of {library._name} takes no call of {self.op.name}; run `make build`"
            ) from None
        compiled.restype = c_uint64
        if compiled() != digest(self.op):
            raise NativeLibraryError(
                f"{library._name} was built from another declaration of {self.op.name} than this Python code has; "
                "run `make generate build`"
            )
