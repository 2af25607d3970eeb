"""What an engine did, as tables: drafts, KV transfer, kernels."""

from __future__ import annotations

from typing import Any

from gristmill import console
from gristmill.runtime.explain import summarize
from gristmill.runtime.kv_transfer.statistics import TransferStatus
from gristmill.runtime.speculation.statistics import SpeculationStatus


def print_drafts(status: SpeculationStatus | None) -> None:
    """Print acceptance, reasons and gains; None = the engine does not draft."""
    err = console.err()
    if status is None:
        err.print("no drafts: --speculate METHOD drafts tokens", highlight=False)
        return
    err.print(
        f"speculation by {status.method}: {status.accepted_tokens} of {status.draft_tokens} drafts accepted "
        f"({status.acceptance:.0%}), {status.mean_run:.2f} tokens per verified run, "
        f"{status.draft_bytes / 1e6:.1f} MB of weights and cache",
        highlight=False,
    )
    console.table(
        "Accepted drafts by position",
        ["position", "accepted", "of the runs"],
        [
            [place, count, f"{count / max(status.drafts, 1):.0%}"]
            for place, count in enumerate(status.accepted_by_position, 1)
        ],
        right=("position", "accepted", "of the runs"),
    )
    if status.reasons:
        console.table(
            "Requests and steps without drafts, or with fewer",
            ["reason", "times"],
            [[reason, count] for reason, count in status.reasons.items()],
            right=("times",),
        )
    for seqs, gain in status.gains.items():
        err.print(
            f"steps of up to {seqs} sequences: {gain:.2f} x the tokens per second of steps without drafts",
            highlight=False,
        )


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


def print_kernels(rows: list[dict[str, Any]]) -> None:
    """The kernels of `LLM.explain`, summed up."""
    console.table(
        "Kernels that ran",
        ["operation", "kernel", "weights", "plans", "why"],
        [[r["op"], r["kernel"], ", ".join(r["formats"]), r["plans"], r["reason"]] for r in summarize(rows)],
        right=("plans",),
    )
