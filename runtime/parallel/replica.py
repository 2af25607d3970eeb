"""One replica: a process with an `LLM` of its own, started by `Replicas` as ``python -m gristmill.runtime.parallel.replica``."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch

from gristmill.runtime.llm import LLM
from gristmill.runtime.parallel import child_process
from gristmill.runtime.parallel.engine_host import EngineHost
from gristmill.runtime.parallel.reporter import Reporter
from gristmill.runtime.progress import progress_to


def serve(connection: Connection) -> None:
    """Load the model, say how far it is, and serve. The first message: arguments of `LLM`; how many replicas share the CPUs; seconds of a step."""
    model, options, share, watchdog = connection.recv()
    torch.set_num_threads(max(1, torch.get_num_threads() // share))
    with progress_to(Reporter(lambda report: connection.send(("loading", *report)))):
        llm = LLM(model, **options)
    connection.send(("loaded",))
    try:
        EngineHost(connection, llm, watchdog).serve()
    finally:
        llm.close()


if __name__ == "__main__":
    child_process.serve(serve)
