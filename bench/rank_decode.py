"""`kernelbench decode` by several ranks: each makes its share of the model and runs the same steps in its own engine.

There is no driver, so a step includes scheduling, but no messages between processes. Rank 0 chooses the kernels, and its times are those
that are returned: every step ends together on all ranks.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gristmill.kernel_registry.policy import Policy
from gristmill.runtime.config import ModelConfig

SECONDS = 900.0
"""How long a rank waits for the others: one of them may compile and verify kernels meanwhile."""


def measure_together(
    config: ModelConfig,
    quant: str,
    batches: tuple[int, ...],
    context: int,
    steps: int,
    device: str,
    ranks: int,
    policy: Policy | None = None,
    trace: bool = False,
) -> Iterator[dict[str, Any]]:
    """As `measure_decode`, with `ranks` processes; RuntimeError with the traceback of a rank that fails."""
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(1, ranks)]
    results = [spawn.Pipe(duplex=False) for _ in range(ranks)]
    kind = device.partition(":")[0]
    with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
        processes = []
        for rank in range(ranks):
            choices = [here for here, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
            measure = (config, quant, batches, context, steps)
            file = str(Path(folder) / "rendezvous")
            arguments = (rank, ranks, kind, file, choices, results[rank][1], policy, measure, trace)
            processes.append(spawn.Process(target=_run, args=arguments, daemon=True))
            processes[-1].start()
        try:
            for end in [*(sender for _, sender in results), *(end for pair in pairs for end in pair)]:
                end.close()
            yield from _received([receiver for receiver, _ in results])
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(receivers: list[Connection]) -> Iterator[dict[str, Any]]:
    """The rows of rank 0, until all ranks have ended."""
    while receivers:
        for ready in wait(receivers):
            assert isinstance(ready, Connection)
            try:
                rank, row = ready.recv()
            except EOFError:
                raise RuntimeError("a rank ended without a result") from None
            if isinstance(row, str):
                raise RuntimeError(f"rank {rank} failed:\n{row}")
            if row is None:
                receivers.remove(ready)
            elif rank == 0:
                yield row


def _run(
    rank: int,
    ranks: int,
    kind: str,
    file: str,
    choices: list[Connection],
    result: Connection,
    policy: Policy | None,
    measure: tuple[ModelConfig, str, tuple[int, ...], int, int],
    trace: bool,
) -> None:
    import torch

    from gristmill import ops
    from gristmill.bench.decode import measure_decode
    from gristmill.kernels.collective.groups import rendezvous
    from gristmill.runtime.parallel.choices import Asking, answer_in_threads
    from gristmill.runtime.parallel.mesh import Mesh
    from gristmill.runtime.parallel.wire import GROUP

    try:
        device = "cpu" if kind == "cpu" else f"{kind}:{rank}"
        if kind == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        else:
            torch.cuda.set_device(rank)
        resolver = ops.resolver(torch.device(device), policy)
        if rank == 0:
            answer_in_threads(resolver, choices)
        else:
            resolver.chooser = Asking(choices[0])
        rendezvous(GROUP, rank, ranks, kind, file, SECONDS)
        for row in measure_decode(*measure, device, policy, Mesh(rank, ranks, device, GROUP), trace):
            result.send((rank, row | {"ranks": ranks}))
        result.send((rank, None))
    except Exception:
        result.send((rank, traceback.format_exc()))
