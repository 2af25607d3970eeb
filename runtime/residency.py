"""Weights and cache of a runner, given back to the device while its engine sleeps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, get_args

import torch
from torch import Tensor

from gristmill.quant import memory
from gristmill.runtime.devices import parse_device
from gristmill.runtime.errors import UsageError
from gristmill.runtime.loader.load import parse_scheme
from gristmill.runtime.runner import Runner
from gristmill.runtime.weight_update import WeightSource, build_like, copy_weights, model_tensors

Part = Literal["weights", "kv_cache"]

Place = tuple[Tensor, int, int, tuple[int, ...], tuple[int, ...]]
"""A tensor, the key of its storage, and its offset, shape and strides there."""


class Residency:
    """The memory of a runner's model and cache. The model must not be used by anything else.

    Attributes:
        absent: the parts that were given back.
        outdated: why the weights cannot be used until they are updated; "" if they can.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.absent: set[Part] = set()
        self.outdated = ""
        self._graphs = False
        self._places: list[Place] = []
        self._sizes: dict[int, int] = {}
        self._copies: dict[int, Tensor] = {}

    @property
    def reason(self) -> str:
        """Why no step can run; "" if one can."""
        return "the engine sleeps: call wake_up" if self.absent else self.outdated

    def sleep(self, level: int) -> None:
        """Give back the cache, decode graphs, workspaces and the weights: to host memory (level 1), or discarded (level 2).

        On a CPU level 1 leaves the weights where they are.
        """
        runner, device = self.runner, self.runner.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a step whose requests have ended may still run
        self._graphs = runner.decode is not None
        runner.drop_graphs()
        runner.model.plans.workspaces.clear()
        runner.cache.release()
        self.absent = {"kv_cache"}
        if level == 2 or device.type == "cuda":
            self._release_weights(keep=level == 1)
            self.absent.add("weights")
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _release_weights(self, keep: bool) -> None:
        for tensor in model_tensors(self.runner.model):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if not storage.nbytes():
                continue
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                if keep:
                    self._copies[key] = (
                        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu()
                    )
            offset = int(tensor.storage_offset())
            self._places.append((tensor, key, offset, tuple(tensor.shape), tensor.stride()))
            tensor.set_(torch.UntypedStorage(0, device=tensor.device))
        if not keep:
            self.outdated = "sleep(level=2) discarded the weights: call update_weights"

    def wake_up(self, parts: Collection[Part]) -> None:
        """Allocate parts that were given back. Graphs are captured again when steps need them."""
        unknown = {parts} if isinstance(parts, str) else set(parts) - set(get_args(Part))
        if unknown:
            raise UsageError(
                f"parts must be a list of some of {', '.join(get_args(Part))}; got {', '.join(sorted(unknown))}"
            )
        waking = self.absent & set(parts)
        if "weights" in waking:
            self._restore_weights()
        if "kv_cache" in waking:
            self.runner.cache.allocate()
        self.absent -= waking
        if not self.absent:
            if self._graphs:
                self._graphs = False
                self.runner.make_decode_graphs()
            self.runner.make_prompt_graphs()

    @torch.inference_mode()
    def _restore_weights(self) -> None:
        storages = {}
        for key, size in self._sizes.items():
            filled = memory.empty((size,), torch.uint8, self.runner.device)
            if key in self._copies:
                filled.copy_(self._copies[key])
            storages[key] = filled.untyped_storage()
        for tensor, key, offset, shape, strides in self._places:
            tensor.set_(storages[key], offset, shape, strides)
        # Only now: where memory was too short, wake_up can be called again.
        self._places, self._sizes, self._copies = [], {}, {}

    def update(self, source: WeightSource, quant: object, staging: str | torch.device | None) -> None:
        """Write new weights into the memory of the old ones; see `gristmill.runtime.weight_update`."""
        if "weights" in self.absent:
            raise UsageError("the weights are asleep: call wake_up(['weights']) before update_weights")
        model = self.runner.model
        scheme = parse_scheme(quant)  # type: ignore[arg-type]  # refuses other types by name
        device = None if staging is None else parse_device(staging)
        copy_weights(model, build_like(model, source, scheme, device))
        self.outdated = ""
