"""Scratch memory shared by the layers of a model: one arena per stream, used by every kernel that needs a workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.autotune.errors import UnpreparedError
from gristmill.kernel_registry.kernel import Workspace


class Arenas:
    """Scratch memory on one device.

    Work on one stream runs in order, so its kernels share an arena; each stream has a separate one. A kernel that needs zeros
    restores them for its own next call, so it has a separate arena. Arenas only grow. A CUDA graph that was captured on a
    stream keeps the tensors of `held`, because it uses that memory also after the arena has been replaced by a larger one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._arenas: dict[tuple[int, str], Tensor] = {}

    def take(self, kernel: str, need: Workspace) -> Tensor | None:
        """At least `need.bytes` bytes for a launch of `kernel` on the current stream, uint8; None if it needs none.

        Raises:
            UnpreparedError: the arena would have to grow while a graph is captured.
        """
        if need.bytes == 0:
            return None
        key = (self._stream(), kernel if need.zeroed else "")
        arena = self._arenas.get(key)
        if arena is None or arena.numel() < need.bytes:
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise UnpreparedError(
                    f"{kernel} needs {need.bytes} bytes of scratch memory, more than are allocated: run the step "
                    "once on this stream before it is captured"
                )
            make = torch.zeros if need.zeroed else torch.empty
            self._arenas[key] = arena = make(need.bytes, dtype=torch.uint8, device=self.device)
        return arena

    def clear(self) -> None:
        """Give all memory back."""
        self._arenas.clear()

    def held(self) -> tuple[Tensor, ...]:
        """The arenas of the current stream."""
        stream = self._stream()
        return tuple(arena for (owner, _), arena in self._arenas.items() if owner == stream)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
