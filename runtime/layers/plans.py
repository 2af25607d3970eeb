"""What the layers of a model share: device, policy, bound plans, and workspaces of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.errors import UnpreparedError
from gristmill.autotune.resolve import Resolver
from gristmill.kernel_registry.kernel import Workspace
from gristmill.kernel_registry.plan import BUCKETS, bucket_index
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.problem import AxisValue, Problem
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import ACTIVATION_FORMATS, QuantScheme, cdiv
from gristmill.kernels.common import ITEM_BYTES, dtype_name
from gristmill.kernels.given_codes import GROUPS
from gristmill.kernels.moe._rows import ROWS
from gristmill.quant import QuantTensor
from gristmill.runtime.kv_cache.paged import AUTO, CacheFormat
from gristmill.runtime.layers.loaded_schemes import LoadedSchemes, in_scheme
from gristmill.runtime.parallel.mesh import ALONE, Mesh


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
        if self.device.type != "cuda":
            return 0
        if self.device.index is None:
            return torch.cuda.current_stream(self.device).cuda_stream
        # As that, without an object for the stream, which takes as long as the rest of a call of a plan.
        stream: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return stream


BLOCK_SIZE = 16
"""The default number of tokens per block of the paged cache."""
LARGE_STEP = 1024
"""Above the largest bucket, a call gets the workspace of the next multiple of this many rows."""


class Plans:
    """Binds plans on `device` under `policy` (None: the one GRISTMILL_POLICY names), one for each (op, static problem).

    Layers bind their plans when they are made, and call them in each step.

    Args:
        dtype: the dtype of activations.
        block_size: tokens per block of the paged cache.
        cache_format: how the cache stores keys and values.
        mesh: the ranks that share the model.

    Attributes:
        bound: all plans so far, which `explain` reports.
        owned: the parameters, as packed.
        schemes: the schemes that weights are loaded in.
        layers: how many layers have weights of each problem, packed in these layouts.
        is_warm: whether a kernel that is selected from now on is late (`set_warm`).
        on_bind: called with each plan that is new to the model.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        policy: Policy | None = None,
        block_size: int = BLOCK_SIZE,
        cache_format: CacheFormat = AUTO,
        mesh: Mesh = ALONE,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.block_size = block_size
        self.cache_format = cache_format
        self.mesh = mesh
        self.policy = policy or Policy.current()
        self.bound: dict[tuple[Problem, frozenset[str] | None], BoundPlan] = {}
        self.owned: list[Tensor] = []
        self.schemes = LoadedSchemes()
        self.layers: Counter[tuple[Problem, frozenset[str]]] = Counter()
        self.is_warm = False
        self.on_bind: Callable[[BoundPlan], None] | None = None
        self._calls: dict[tuple[BoundPlan, int], None] | None = None  # those recorded
        self._reads: dict[tuple[int, int], tuple[str, ...]] = {}
        self._needs: dict[tuple[int, int], tuple[str, Workspace]] = {}
        self.workspaces = Workspaces(device)

    @property
    def x(self) -> str:
        """Name of the activations' dtype in problems."""
        return dtype_name(self.dtype)

    def own(self, *tensors: Tensor | None) -> None:
        """Add these parameters to the model's resident weights."""
        self.owned += [tensor for tensor in tensors if tensor is not None]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, as packed; shared memory counts once."""
        total = end = 0
        for start, size in sorted((t.data_ptr(), t.numel() * t.element_size()) for t in self.owned):
            total += max(0, start + size - max(start, end))
            end = max(end, start + size)
        return total

    def problem(self, op: str, /, **axes: AxisValue) -> Problem:
        """The static problem of an operation; AxisError for invalid axes."""
        return default_registry().op(op).problem(axes)

    def with_activations(self, weight: QuantTensor, declared: str | None = None) -> QuantTensor:
        """The weight in the scheme that this device multiplies it in; no tensor changes.

        On a CPU, the scheme that the policy's `activations` asks for. Else the scheme with the activation format that the checkpoint
        declares, if a kernel of this device multiplies it and the policy does not ask for floats.
        """
        if self.policy.activations == "int8" and self.device.type == "cpu":
            return replace(weight, scheme=weight.scheme.with_int8_activation(weight.g_idx is not None))
        has_own = weight.scheme.is_dense or weight.scheme.activation is not None
        if declared not in ACTIVATION_FORMATS or has_own or self.policy.activations == "float":
            return weight
        scheme = replace(weight.scheme, activation=declared)
        problem = self.problem("linear", n=weight.n, k=weight.k, x=self.x, w=str(scheme))
        runs = weight.g_idx is None and self.compiled(problem)
        return replace(weight, scheme=scheme) if runs else weight

    def loaded(self, weight: QuantTensor, declared: str | None = None, x: str | None = None) -> QuantTensor:
        """The weight [N, K] of a layer as it is loaded: `with_activations`, and on accelerators by the rule of `LoadedSchemes`, where it may
        lose its activation format, or become dense in the dtype of x (None: the model's).
        """
        weight = self.with_activations(weight, declared)
        x, act_order = x or self.x, weight.g_idx is not None
        problem = self.problem(
            "linear", n=weight.n, k=weight.k, x=x, w=str(weight.scheme), act_order=act_order
        )
        growth = weight.n * weight.k * ITEM_BYTES[x] - weight.nbytes
        return in_scheme(weight, self.schemes.choose(problem, growth, self.resolver))

    def declared_experts(self, problem: Problem, declared: str | None) -> Problem:
        """A problem of `moe`, with the activation format that the checkpoint declares by the same rule as `with_activations`."""
        scheme = QuantScheme.parse(problem.text("w"))
        has_own = scheme.is_dense or scheme.activation is not None
        if declared not in ROWS or has_own or self.policy.activations == "float":
            return problem
        quantized = problem.with_values(w=str(replace(scheme, activation=declared)))
        return quantized if not problem["act_order"] and self.compiled(quantized) else problem

    def compiled(self, problem: Problem) -> bool:
        """Whether a kernel that is no chain of torch's operations, and is not interpreted, may be selected for a problem."""
        resolver = self.resolver
        build = replace(resolver.build, triton_interpreter=False)
        return any(
            kernel.auto
            and kernel.language != "python"
            and (kernel.batch_invariant or not self.policy.batch_invariant)
            and not kernel.why_not(problem, resolver.target, build)
            for kernel in resolver.registry.kernels_of(problem.op)
        )

    def takes_codes(self, problem: Problem) -> str | None:
        """The format in which a product is given codes by the layer before it: where its weight has a format of activations, and a compiled
        kernel multiplies given codes. None = it takes floats."""
        form = QuantScheme.parse(problem.text("w")).activation
        if form not in ROWS or form not in GROUPS or not self.compiled(problem.with_values(codes=True)):
            return None
        return form

    @property
    def gates_apart(self) -> bool:
        """Whether products of quantized activations leave silu(gate) · up to a launch of its own: on GPUs, where different CTAs multiply
        gate and up."""
        return self.device.type == "cuda"

    def bind(self, op: str, /, **axes: AxisValue) -> BoundPlan:
        """The plan of an operation without packed weights."""
        return self.bind_packed(self.problem(op, **axes))

    def bind_packed(
        self, problem: Problem, layouts: frozenset[str] | None = None, again: bool = False
    ) -> BoundPlan:
        """The plan of a static problem over weights that are packed in these layouts. again: another plan of the same layer."""
        key = (problem, layouts)
        if layouts is not None and not again:
            self.layers[problem, layouts] += 1
        if key not in self.bound:
            plan = self.bound[key] = ops.bind(problem.op, problem, self.device, self.policy, layouts)
            plan.is_warm = self.is_warm
            if self._calls is not None:
                plan.record(self._calls)
            if self.on_bind is not None:
                self.on_bind(plan)
        return self.bound[key]

    def set_warm(self, warm: bool) -> None:
        """Whether kernels that are selected from now on are reported as late. A plan that two models share follows the last."""
        self.is_warm = warm
        for plan in self.bound.values():
            plan.is_warm = warm

    @property
    def late(self) -> int:
        """The kernels that were selected after a warm-up, while requests waited."""
        return sum(plan.late for plan in self.bound.values())

    @contextmanager
    def recorded(self) -> Iterator[dict[tuple[BoundPlan, int], None]]:
        """The plans that are called meanwhile, with their buckets, in the order of first calls: no kernel runs. Outputs of integers are zeros,
        those of floats undefined."""
        self._calls = calls = dict[tuple[BoundPlan, int], None]()
        for plan in self.bound.values():
            plan.record(calls)
        try:
            yield calls
        finally:
            self._calls = None
            for plan in self.bound.values():
                plan.stop_recording()

    @property
    def resolver(self) -> Resolver:
        """Selection on the device under the policy."""
        return ops.resolver(self.device, self.policy)

    def reads(self, plan: BoundPlan, size: int, argument: str) -> bool:
        """Whether the kernel for calls of this size reads a derived argument; while calls are recorded, the kernel that selection prefers then."""
        index = bucket_index(size)
        found = self._reads.get((id(plan), index))
        if found is None:
            entry = plan.entries[index] if self._calls is not None else plan.entry(size)
            if entry is None:
                best = plan.resolver.select(plan.op, plan.problem(index), plan.layouts).best
                return best is not None and argument in best.kernel.reads
            found = self._reads[id(plan), index] = plan.resolver.kernel(plan.op, entry.kernel).reads
        return argument in found

    def workspace(self, plan: BoundPlan, size: int) -> Tensor | None:
        """The workspace of a call of this size on the current stream, uint8; None if its kernel needs none, or while calls are recorded."""
        if self._calls is not None:
            return None
        index = bucket_index(size)
        # Upper bounds, so that few are needed: a smaller call of the same kernel never needs more.
        bound = BUCKETS[index] if index < len(BUCKETS) else cdiv(size, LARGE_STEP) * LARGE_STEP
        need = self._needs.get((id(plan), bound))
        if need is None:
            need = self._needs[id(plan), bound] = (plan.entry(bound).kernel, plan.workspace(bound))
        return self.workspaces.take(*need)
