"""Steps on a CPU, recorded once and run again without the Python of layers, plans and launchers.

A step of a model is some hundreds of native calls, and a few operations of torch between them. With one request a call takes some tens of
microseconds, which is what Python takes to make it. A step over buffers at fixed addresses makes the same calls each time: `RecordedStep` notes
them as the step runs (`CallList`), with the operations of torch (a dispatch mode), and `replay` makes them again: one call from Python for each
run of native calls. It is what a CUDA graph is on a GPU, and the same rules hold: what differs between two steps is in the buffers.

Memory that the step makes is taken from a `StepMemory`, which the steps of a model share.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.kernels.call_list import CallList, UnrecordableError

aten = torch.ops.aten
EMPTY = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Operations whose results are memory, and nothing else."""


class StepMemory:
    """Memory of recorded steps, of which one runs at a time: a storage that no tensor uses any more serves the next one that fits.

    Attributes:
        nbytes: bytes of all storages.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._storages: list[torch.UntypedStorage] = []  # by size

    def move(self, tensor: Tensor) -> None:
        """Give a new tensor other memory: the smallest storage here that is large enough and unused, or its own, which stays here."""
        need = tensor.untyped_storage().nbytes()
        for storage in self._storages:
            if need <= storage.nbytes() <= 2 * need and torch._C._storage_Use_Count(storage._cdata) == 1:
                tensor.set_(storage, 0, tensor.shape, tensor.stride())
                return
        insort(self._storages, tensor.untyped_storage(), key=torch.UntypedStorage.nbytes)
        self.nbytes += need

    def fill(self, byte: int) -> None:
        """Write over all of it, for tests."""
        for storage in self._storages:
            torch.tensor((), dtype=torch.uint8).set_(storage).fill_(byte)


class RecordedStep:
    """The native calls and the operations of torch of a step, which runs now.

    Args:
        compute: the step. It reads and writes tensors that live as long as the record, and decides nothing by their values.
        memory: of the tensors that it makes.

    Raises:
        UnrecordableError: it reads a value on the host, or calls a kernel in Python or an operation of another library.
        UnpreparedError: it calls a kernel that was not selected yet.

        The step was not completed.
    """

    def __init__(self, compute: Callable[[], None], memory: StepMemory) -> None:
        self._calls = CallList()
        recorder = _Recorder(self._calls, memory)
        with recorder, self._calls.recording():
            compute()
        self._parts = tuple(recorder.parts(len(self._calls)))
        self.calls, self.operations = len(self._calls), recorder.operations

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the step again."""
        for part in self._parts:
            part()


class _Recorder(TorchDispatchMode):
    """Notes the operations of torch of a step, as functions that repeat them, each with the number of native calls before it."""

    def __init__(self, calls: CallList, memory: StepMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._memory = calls, memory
        self._operations: list[tuple[int, Callable[[], object]]] = []

    @property
    def operations(self) -> int:
        """How many there are."""
        return len(self._operations)

    def parts(self, calls: int) -> list[Callable[[], object]]:
        """The functions that repeat the step, whose native calls are [0, calls)."""
        parts, begin = list[Callable[[], object]](), 0
        for before, operation in [*self._operations, (calls, None)]:
            if before > begin:
                parts.append(partial(self._calls.run, begin, before))
                begin = before
            if operation is not None:
                parts.append(operation)
        return parts

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace not in ("aten", "prims"):
            raise UnrecordableError(f"it calls {func}")
        result = func(*args, **kwargs)
        if func in EMPTY:
            self._memory.move(result)
            return result
        results = tree_leaves(result)
        if not all(isinstance(value, Tensor) for value in results):
            raise UnrecordableError(f"{func} reads a value on the host")
        if func._schema.is_mutable:
            self._note(partial(func, *args, **kwargs))
            return result
        inputs = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        if any(_storage(value) not in inputs for value in results):  # else they are views
            self._note(partial(_repeat, func, args, kwargs, result))
        return result

    def _note(self, operation: Callable[[], object]) -> None:
        self._operations.append((len(self._calls), operation))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _repeat(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Any) -> None:
    """An operation with new results again, into the tensors of the first time."""
    again = func(*args, **kwargs)
    if isinstance(first, Tensor):
        first.copy_(again)
    else:
        for old, new in zip(tree_leaves(first), tree_leaves(again), strict=True):
            old.copy_(new)
