"""What the layers of one model share: the device, the policy, the plans bound so far, and scratch memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.bound import BoundPlan
from gristmill.kernel_registry.kernel import Workspace
from gristmill.kernel_registry.plan import BUCKETS, bucket_index
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.common import dtype_name
from gristmill.kernels.linear.linear import layout_for
from gristmill.runtime.workspace import Arenas

LAYOUT_SIZES = (1, 16, 256)
"""Batch sizes that decide in which layouts a weight is packed; other sizes then choose among kernels of those layouts."""


class Plans:
    """Binds plans on `device` under `policy` (None: the one GRISTMILL_POLICY names), one for each (op, static problem).

    dtype: of activations. Every plan is remembered: `bound` is what `explain` reports and what `prepare` warms up. owned: the
    parameters, packed as they are.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, policy: Policy | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self.policy = policy or Policy.current()
        self.bound: dict[tuple[str, str, frozenset[str] | None], BoundPlan] = {}
        self.owned: list[Tensor] = []
        self._layouts: dict[tuple[str, frozenset[str]], frozenset[str]] = {}
        self._needs: dict[tuple[int, int], tuple[str, Workspace]] = {}
        self.arenas = Arenas(device)

    @property
    def x(self) -> str:
        """Name of the activations' dtype in problems."""
        return dtype_name(self.dtype)

    def own(self, *tensors: Tensor | None) -> None:
        """Count these parameters among the model's resident weights."""
        self.owned += [tensor for tensor in tensors if tensor is not None]

    @property
    def weight_bytes(self) -> int:
        """Resident bytes of all parameters, packed as they are; memory that two of them share counts once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.owned}
        return sum(storages.values())

    def bind(self, op: str, problem: str, layouts: frozenset[str] | None = None) -> BoundPlan:
        """The plan of an operation for a static problem."""
        key = (op, problem, layouts)
        if key not in self.bound:
            self.bound[key] = ops.bind(op, problem, self.device, self.policy, layouts)
        return self.bound[key]

    def layouts(self, op: str, problem: str, without: frozenset[str] = frozenset()) -> frozenset[str]:
        """The layouts in which the weights of a static problem are to be packed. without: those that cannot hold the weight."""
        if (problem, without) not in self._layouts:
            definition = default_registry().op(op)
            static = definition.problem(problem)
            resolver = ops.resolver(self.device, self.policy)
            if {"n", "k"} <= static.as_dict().keys():
                chosen = resolver.plan(definition, static, LAYOUT_SIZES, without).layouts
            else:
                # Experts are packed once, for the kernel of a middling batch.
                best = resolver.resolve(definition, definition.at_bucket(static, LAYOUT_SIZES[1])).require()
                chosen = (layout_for(best.kernel, QuantScheme.parse(static.text("w"))).name,)
            self._layouts[problem, without] = frozenset(chosen)
        return self._layouts[problem, without]

    def scratch(self, plan: BoundPlan, size: int) -> Tensor | None:
        """Scratch memory for a call of this size on the current stream, uint8; None when its kernel needs none."""
        key = (id(plan), bucket_index(size))
        need = self._needs.get(key)
        if need is None:
            # The upper bound of the bucket: a smaller call of the same kernel never needs more.
            bound = BUCKETS[key[1]] if key[1] < len(BUCKETS) else size
            need = (plan.entry(bound).kernel, plan.workspace(bound))
            if key[1] < len(BUCKETS):
                self._needs[key] = need
        return self.arenas.take(*need)
