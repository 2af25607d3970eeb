"""Launches of the kernels that write into the memory of other ranks (`symmetric`): in several, where a call does not fit in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.collective.groups import enter
from gristmill.kernels.collective.symmetric import symmetric
from gristmill.kernels.native_call import CallEntry

if TYPE_CHECKING:
    from gristmill.kernels.calls import AllGatherCall, AllReduceAddRmsNormCall, AllReduceCall, AllToAllCall


def begin(
    call: AllGatherCall | AllToAllCall | AllReduceCall | AllReduceAddRmsNormCall, op: str, *names: str
) -> dict[str, int]:
    """Begin a collective call; the options of its entry for the memory of the group.

    Args:
        names: the tensors of the call, each of which must begin at a multiple of 16 bytes; ValueError otherwise.
    """
    enter(call.group, call.world)
    memory = symmetric(call.group)
    for name in names:
        if (address := getattr(call, name).data_ptr()) % 16:
            raise ValueError(f"{op}: {name} must begin at a multiple of 16 bytes, got address {address:#x}")
    return memory.options


def launch_rows(
    entry: CallEntry,
    config: Config,
    call: AllGatherCall | AllToAllCall | AllReduceAddRmsNormCall,
    most: int,
    *names: str,
) -> None:
    """Launch a call of which `most` rows of x fit in the memory of a rank. names: its tensors with a row for each of x."""
    rows, device = call.x.shape[0], call.x.get_device()
    if rows <= most:
        entry.cuda(config, call, device)
        return
    for first, end in parts(rows, most):
        own = {name: getattr(call, name)[first:end] for name in names}
        entry.cuda(config, call.replace(**own), device)


def parts(count: int, most: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the launches of a call of `count` rows or elements, of at most `most` each."""
    return ((begin, min(count, begin + most)) for begin in range(0, count, most))
