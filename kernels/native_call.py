"""Native entries that take a call as one struct, written from the declaration of the operation (`kernel_registry.call_struct`).

    ENTRY = CallEntry(<name of the entry>, "rms_norm")
    ENTRY.cpu(config, call)              # of the configuration's code level
    ENTRY.cuda(config, call, device)     # on the device's current stream

An entry also gets the options that ``GM_CPU_CALL`` or ``GM_CUDA_CALL`` names, 64-bit integers out of the configuration: their names are
read from the library, so each is declared once, in the source that reads it. When an entry is first looked up, the digest of the struct
that the library was compiled with is compared with the digest of the declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, c_char_p, c_int, c_uint64, c_void_p
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING

from gristmill.kernel_registry.call import Call
from gristmill.kernel_registry.call_struct import WEIGHTS, digest, packer
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.common import DTYPE_CODES, dtype_name, row_stride
from gristmill.kernels.native import check, cpu_function, cpu_library, cuda_function, cuda_library
from gristmill.quant.native import NativeLibraryError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gristmill.kernel_registry.kernel import Config, ConfigValue

CUDA_ARGUMENTS = (c_char_p, c_char_p, c_int, c_void_p)


def addresses(weight: Sequence[Tensor]) -> list[int]:
    """The addresses of the tensors of a packed weight, and nulls."""
    return [tensor.data_ptr() for tensor in weight] + [0] * (WEIGHTS - len(weight))


def element_counts(weight: Sequence[Tensor]) -> list[int]:
    """The numbers of elements of the tensors of a packed weight; -1 for one that is not contiguous, 0 for one that there is not."""
    counts = [tensor.numel() if tensor.is_contiguous() else -1 for tensor in weight]
    return counts + [0] * (WEIGHTS - len(weight))


def weight_types(weight: Sequence[Tensor]) -> list[int]:
    """The codes of the dtypes of the tensors of a packed weight; -1 for another dtype."""
    return [DTYPE_CODES.get(dtype_name(tensor.dtype), -1) for tensor in weight] + [-1] * (
        WEIGHTS - len(weight)
    )


def dtype_code(dtype: torch.dtype) -> int:
    """The code of a torch dtype in native entries."""
    return DTYPE_CODES[dtype_name(dtype)]


FUNCTIONS = {
    "addresses": addresses,
    "dtype_code": dtype_code,
    "element_counts": element_counts,
    "row_stride": row_stride,
    "weight_types": weight_types,
}
"""What the sources of fields use."""


class Options:
    """The options of an entry: their names, separated by commas, as the library states them."""

    def __init__(self, names: str) -> None:
        self.names = tuple(name.strip() for name in names.split(",") if name.strip())
        self._layout = Struct(f"{len(self.names)}q")

    def pack(self, config: Config) -> bytes:
        """The bytes of their struct."""
        return self._layout.pack(*[int(config[name]) for name in self.names])


class CallEntry:
    """The entry `name` for the calls of `op`. Its functions are looked up once."""

    def __init__(self, name: str, op: str) -> None:
        self.name, self._op, self._shown = name, op, f"{op} ({name})"
        self._levels: dict[ConfigValue, tuple[Callable[..., int], Options]] = {}

    @cached_property
    def op(self) -> Op:
        """The operation; looked up late, so that its examples are not part of what a launch runs."""
        return default_registry().op(self._op)

    @cached_property
    def pack(self) -> Callable[[Call], bytes]:
        """``pack(call)``: the bytes of the struct."""
        return packer(self.op, FUNCTIONS)

    def cpu(self, config: Config, call: Call) -> None:
        """Call the entry of the configuration's code level. Raises the exception that a native return code stands for."""
        function, options = self.at(config["level"])
        if options.names:
            code = function(self.pack(call), options.pack(config))
        else:
            code = function(self.pack(call))
        if code:
            check(code, self._shown)

    def at(self, level: ConfigValue) -> tuple[Callable[..., int], Options]:
        """The entry of a code level, which takes the bytes of the call's struct and, if it has options, of theirs."""
        found = self._levels.get(level)
        if found is None:
            options = self._options(cpu_library(), f"{self.name}__{level}")
            types = (c_char_p, c_char_p) if options.names else (c_char_p,)
            found = self._levels[level] = cpu_function(self.name, str(level), types), options
        return found

    def cuda(self, config: Config, call: Call, device: int) -> None:
        """Launch on the current stream of `device`. Raises the exception that a native return code stands for."""
        import torch

        function, options = self._cuda
        # A device below 0, where a tensor is on a CPU, has no stream; the entry refuses it.
        stream = None if device < 0 else torch.cuda.current_stream(device).cuda_stream
        check(function(self.pack(call), options.pack(config), device, stream), self._shown)

    def ask(self, config: Config, call: Call) -> int:
        """What an entry of a GPU says without a device: bytes of shared memory, or the code of a refusal."""
        function, options = self._cuda
        return function(self.pack(call), options.pack(config), -1, None)

    @cached_property
    def _cuda(self) -> tuple[Callable[..., int], Options]:
        options = self._options(cuda_library("sm_90a"), self.name)
        return cuda_function(self.name, "sm_90a", CUDA_ARGUMENTS), options

    def _options(self, library: CDLL, symbol: str) -> Options:
        """The options of an entry, once its struct is that of the declaration."""
        self._check(library, symbol)
        names = library[f"options_of_{symbol}"]
        names.restype = c_char_p
        return Options(names().decode())

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
