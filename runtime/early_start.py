"""What a load onto a GPU needs later, begun beside its first steps: the driver's context of the device, and Triton."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from gristmill.autotune.compilations import keep_below, prepare_triton
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.targets.probe import probe_cuda


@contextlib.contextmanager
def started_early(device: str | torch.device, policy: Policy | None) -> Iterator[None]:
    """Begin in threads, which have ended after the block. The block finds out itself what is missing: that fails here in silence.

    Args:
        device: as of `EngineConfig`; for ``auto`` no context is made, since it is not known on which GPU.
        policy: says where Triton keeps what it compiles; None = the one GRISTMILL_POLICY names.
    """
    keep_below(policy or Policy.current())
    threads = [
        threading.Thread(target=begin, args=arguments, name="gristmill-early-start", daemon=True)
        for begin, arguments in ((_make_context, (str(device),)), (prepare_triton, ()))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def _make_context(device: str) -> None:
    with contextlib.suppress(Exception):
        probe_cuda()  # initializes the driver while other threads run, unlike torch
        torch.cuda.init()
        if device != "auto":
            torch.empty(1, dtype=torch.uint8, device=device)
