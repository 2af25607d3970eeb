"""Counts of KV transfer as text on stderr, for the command line."""

from __future__ import annotations

from gristmill import console
from gristmill.runtime.kv_transfer.statistics import TransferStatus


def print_transfer(status: TransferStatus | None) -> None:
    """Print what was loaded and saved, and failures; nothing for an engine without stores."""
    if status is None:
        return
    err = console.err()
    err.print(
        f"KV transfer with {' + '.join(status.stores)}: {status.loaded_tokens} of {status.queried_tokens} tokens loaded, "
        f"{status.loaded_blocks} blocks ({status.loaded_bytes / 1e6:.1f} MB); {status.saved_blocks} blocks saved ({status.saved_bytes / 1e6:.1f} MB)",
        highlight=False,
    )
    if status.failures:
        rows = [[reason, count] for reason, count in status.failures.items()]
        console.table("Blocks that were computed, or not saved", ["reason", "times"], rows, right=("times",))
