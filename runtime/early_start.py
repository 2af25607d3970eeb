"""What a load onto a GPU needs later, begun beside its first steps: the driver, its context of the device, and the import of Triton."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

import torch

from gristmill.kernel_registry.targets.probe import probe_cuda


@contextlib.contextmanager
def started_early(device: str | torch.device) -> Iterator[None]:
    """Begin at once, in a thread, and go on; the thread has ended after the block. The block finds out itself what is missing: that fails here in
    silence.

    Args:
        device: as of `EngineConfig`; for ``auto`` no context is made, since it is not known on which GPU.
    """
    thread = threading.Thread(target=_start, args=(str(device),), name="gristmill-early-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _start(device: str) -> None:
    with contextlib.suppress(Exception):
        probe_cuda()  # initializes the driver while other threads run, unlike torch
        torch.cuda.init()
        if device != "auto":
            torch.empty(1, device=device)
    with contextlib.suppress(Exception):
        importlib.import_module("triton")
