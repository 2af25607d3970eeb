"""Workspaces of kernels, shared by the layers of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.kernel import Workspace


class Workspaces:
    """The workspaces on one device.

    Work on one stream runs in order, so all its kernels share one workspace; each stream has its own. A kernel that needs a zeroed
    workspace restores the zeros for its next call, so it does not share. Workspaces only grow. A CUDA graph keeps the tensors of `held`,
    because it uses that memory even after a larger workspace has replaced it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[tuple[int, str], Tensor] = {}

    def take(self, kernel: str, need: Workspace) -> Tensor | None:
        """At least `need.bytes` bytes for a launch of `kernel` on the current stream, uint8; None if it needs none.

        Raises:
            UnpreparedError: the workspace would have to grow while a graph is captured.
        """
        if need.bytes == 0:
            return None
        key = (self._stream(), kernel if need.zeroed else "")
        tensor = self._tensors.get(key)
        if tensor is None or tensor.numel() < need.bytes:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise UnpreparedError(
                    f"{kernel} needs a workspace of {need.bytes} bytes, more than is allocated: run the step once on this stream "
                    "before it is captured"
                )
            make = torch.zeros if need.zeroed else torch.empty
            self._tensors[key] = tensor = make(need.bytes, dtype=torch.uint8, device=self.device)
        return tensor

    def clear(self) -> None:
        """Free all workspaces."""
        self._tensors.clear()

    def held(self) -> tuple[Tensor, ...]:
        """The workspaces of the current stream."""
        stream = self._stream()
        return tuple(tensor for (owner, _), tensor in self._tensors.items() if owner == stream)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
