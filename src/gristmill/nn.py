"""Modules for any torch model: ``gristmill.nn.Linear``, ``Embedding`` and ``RMSNorm``, and `quantize_module`, which puts them in.

Modules hold their weights packed for the kernels of the device. ``state_dict()`` has the neutral fields of a QuantTensor instead, as
gristmill's own checkpoint directories do (``NAME.codes``, ``NAME.scales``, ...), so that it loads on every device. A module is one
operator in a graph of `torch.compile`. They are for inference: no gradient passes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gristmill import ops
from gristmill.autotune.bound import BoundPlan
from gristmill.autotune.packing import pack_linear
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.linear.weight import problem_of
from gristmill.quant.packed import Packed, unpack
from gristmill.quant.rtn import quantize
from gristmill.quant.tensor import QuantTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What a module computes in."""

HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""The attributes of a module that hold its forward hooks."""

FIELDS = ("codes", "scales", "zero", "global_scale", "g_idx", "n_idx")
"""Fields of a QuantTensor in a state dict."""


class _Quantized(torch.nn.Module):
    """A module with one QuantTensor, whose state dict holds its fields."""

    scheme: QuantScheme
    shape: tuple[int, int]

    def weight(self) -> QuantTensor:
        """The weight in neutral form."""
        raise NotImplementedError

    def set_weight(self, weight: QuantTensor) -> None:
        """Replace the weight by another of the same scheme and shape."""
        raise NotImplementedError

    def _check(self, weight: QuantTensor) -> None:
        if weight.shape != self.shape or weight.scheme != self.scheme:
            raise ValueError(f"{self} cannot hold {weight}")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{name}": tensor for name, tensor in self.weight().tensors().items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        stored = {name: state_dict.pop(prefix + name) for name in FIELDS if prefix + name in state_dict}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if "codes" not in stored:
            missing_keys.append(f"{prefix}codes")
            return
        try:
            self.set_weight(from_fields(stored, self.scheme, self.shape))
        except (ValueError, TypeError) as error:
            error_msgs.append(f"{prefix}codes: {error}")


def from_fields(fields: Mapping[str, Tensor], scheme: QuantScheme, shape: tuple[int, int]) -> QuantTensor:
    """The QuantTensor whose fields a state dict holds."""
    return QuantTensor(
        fields["codes"],
        fields.get("scales"),
        shape,
        scheme,
        fields.get("zero"),
        fields.get("global_scale"),
        g_idx=fields.get("g_idx"),
        n_idx=fields.get("n_idx"),
    )


class Linear(_Quantized):
    """y = x · Wᵀ + b with a weight in any scheme, dense ones included: what `torch.nn.Linear` is for floats.

    Args:
        weight: QuantTensor [N, K], on the device that the module runs on.
        bias: [N] or None.
        dtype: the dtype of x, the bias and y: float32, float16 or bfloat16.
        policy: None = the one that GRISTMILL_POLICY names.

    Raises:
        ValueError: a bias of another shape, or another dtype; a scheme that no kernel takes here is a NoKernelError.
    """

    def __init__(
        self,
        weight: QuantTensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        policy: Policy | None = None,
    ) -> None:
        super().__init__()
        self.scheme, self.shape = weight.scheme, (weight.n, weight.k)
        self.policy = policy
        self.dtype = _computed_in(dtype)
        if bias is not None and tuple(bias.shape) != (weight.n,):
            raise ValueError(
                f"the bias of a Linear of {weight.n} rows is [{weight.n}], got {list(bias.shape)}"
            )
        self.bias = (
            None if bias is None else torch.nn.Parameter(bias.detach().to(weight.device, dtype), False)
        )
        self._packed: dict[str, Packed] = {}
        self._buffer_names: list[str] = []
        self._pack(weight)

    @property
    def in_features(self) -> int:
        """K, as in `torch.nn.Linear`."""
        return self.shape[1]

    @property
    def out_features(self) -> int:
        """N, as in `torch.nn.Linear`."""
        return self.shape[0]

    @classmethod
    def from_float(
        cls, module: torch.nn.Linear, scheme: QuantScheme | str, *, policy: Policy | None = None
    ) -> Linear:
        """A `torch.nn.Linear` rounded to nearest in `scheme`; ValueError where the scheme does not take its shape."""
        return cls(
            quantize(module.weight.detach(), scheme), module.bias, dtype=module.weight.dtype, policy=policy
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] of any strides -> [..., N]."""
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        tensors = [getattr(self, name) for name in self._buffer_names]
        return ops.linear(x, tensors, self.bias, None, False, self.shape[0], None, plan=self.plan)

    def weight(self) -> QuantTensor:
        """The weight in neutral form, unpacked from its first layout."""
        packed = next(iter(self._packed.values()))
        slots = {slot: self.get_buffer(f"{packed.layout}_{slot}") for slot in packed.slots}
        return unpack(replace(packed, slots=slots))

    def set_weight(self, weight: QuantTensor) -> None:
        """Replace the weight, in place where it stays on its device: CUDA graphs and compiled graphs go on with the new one.

        Raises:
            ValueError: a weight of another scheme or shape.
        """
        self._check(weight)
        self._pack(weight.to(self.plan.resolver.device))

    def _pack(self, weight: QuantTensor) -> None:
        problem = problem_of(
            weight.scheme,
            weight.n,
            weight.k,
            self.dtype,
            self.bias is not None,
            act_order=weight.g_idx is not None,
        )
        static = default_registry().op("linear").problem(problem)
        resolver = ops.resolver(weight.device, self.policy)
        linear_weight = pack_linear(weight, static, resolver)
        packed = {layout: linear_weight.packed[layout] for layout in sorted(linear_weight.packed)}
        packed_slots = {f"{layout}_{slot}": t for layout, p in packed.items() for slot, t in p.slots.items()}
        for name in self._buffer_names:
            if name not in packed_slots:
                del self._buffers[name]
        for name, tensor in packed_slots.items():
            buffer = self._buffers.get(name)
            if buffer is not None and _alike(buffer, tensor):
                buffer.copy_(tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)
        self._buffer_names = list(packed_slots)
        self._packed = {layout: replace(p, slots=dict.fromkeys(p.slots)) for layout, p in packed.items()}  # type: ignore[arg-type]
        self.plan: BoundPlan = ops.bind("linear", static, weight.device, self.policy, linear_weight.layouts)
        if weight.device.type == "cuda":
            torch.cuda.synchronize(
                weight.device
            )  # a kernel may read its weight before the work ahead of it has ended

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """`to`, `cuda`, `half`: on another device the weight is packed again for it; its codes keep their dtypes."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.plan.resolver.device))
        if probe.dtype != self.dtype or probe.device != torch.device(self.plan.resolver.device):
            if probe.is_meta:
                raise ValueError(f"{self} cannot be on the meta device: its weight is packed for a real one")
            dtype = _computed_in(probe.dtype)
            weight = self.weight().to(probe.device)
            self.dtype = dtype
            if self.bias is not None:
                self.bias.data = fn(self.bias.data)
            self._pack(weight)
        return self

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"in_features={self.shape[1]}, out_features={self.shape[0]}, bias={self.bias is not None}, scheme={self.scheme}"


class Embedding(_Quantized):
    """Rows of a [vocab, hidden] weight, dequantized as they are looked up: what `torch.nn.Embedding` is for floats.

    Args:
        weight: QuantTensor [vocab, hidden].
        dtype: the dtype of the rows that it returns.
    """

    def __init__(self, weight: QuantTensor, *, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.scheme, self.shape, self.dtype = weight.scheme, (weight.n, weight.k), dtype
        self._weight = weight

    @classmethod
    def from_float(cls, module: torch.nn.Embedding, scheme: QuantScheme | str) -> Embedding:
        """A `torch.nn.Embedding` rounded to nearest in `scheme`; ValueError where the scheme does not take its shape, or it has a
        max_norm, which changes its weight in every call."""
        if module.max_norm is not None:
            raise ValueError(f"an Embedding has no max_norm, got one of {module.max_norm:g}")
        return cls(quantize(module.weight.detach(), scheme), dtype=module.weight.dtype)

    def weight(self) -> QuantTensor:
        """The weight."""
        return self._weight

    def set_weight(self, weight: QuantTensor) -> None:
        """Replace the weight; ValueError for one of another scheme or shape."""
        self._check(weight)
        self._weight = weight.to(self._weight.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 or int32 [...] -> [..., hidden]; as of `torch.nn.Embedding`, a token outside 0 ... vocab - 1 is an IndexError on a
        CPU, and fails a device assertion on a GPU."""
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"the tokens of an Embedding are int64 or int32, got {tokens.dtype}")
        tokens = tokens.where(tokens >= 0, self.shape[0])  # else torch would count them from the end
        rows = self._weight.decode_rows(tokens.reshape(-1))
        return rows.to(self.dtype).view(*tokens.shape, self.shape[1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embedding:
        """`to`, `cuda`, `half`: codes and scales keep their dtypes."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self._weight.device))
        self.dtype, self._weight = probe.dtype, self._weight.to(probe.device)
        return self

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"{self.shape[0]}, {self.shape[1]}, scheme={self.scheme}"


class RMSNorm(torch.nn.Module):
    """x · rsqrt(mean(x²) + eps) · weight over the last dimension, in float32 and rounded once.

    Args:
        weight: [N], in the dtype of x. eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(weight.detach(), False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """x [..., N] -> [..., N]. With a residual of x's shape: it becomes x + residual in place, and the answer is (norm of it, it)."""
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"residual must have x's shape {list(x.shape)}, got {list(residual.shape)}")
        rows = x.reshape(-1, x.shape[-1])
        if residual is None:
            return ops.rms_norm(rows, self.weight, self.eps).view(x.shape)
        added = residual.view(rows.shape)
        return ops.fused_add_rms_norm(rows, added, self.weight, self.eps).view(x.shape), residual

    def extra_repr(self) -> str:
        """What ``print(module)`` shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def quantize_module(
    model: torch.nn.Module,
    scheme: QuantScheme | str,
    *,
    skip: Iterable[str] = ("lm_head", "*.lm_head"),
    embeddings: bool = False,
    policy: Policy | None = None,
) -> torch.nn.Module:
    """Round the linear layers of any torch model to nearest, and put `Linear` in their place. The model itself is changed.

    A matrix that the model shares with another module stays as it is. A module that is in several places is replaced in all of them, and
    forward hooks go over to the module that takes the place of theirs. `torch.nn.TransformerEncoderLayer` keeps its attention, and is computed
    module by module, without its fast path.

    Args:
        scheme: the scheme of the weights, ``int4_g128``, ``mxfp4``, ``fp8_block`` ...; a float dtype keeps them as they are.
        skip: patterns of names of modules that stay as they are.
        embeddings: whether to quantize `torch.nn.Embedding` as well.
        policy: None = the one that GRISTMILL_POLICY names.

    Raises:
        ValueError: an unknown scheme, or a layer whose shape it does not take: the message names it. A model that is one layer itself,
            whose place nothing can take: `Linear.from_float` and `Embedding.from_float` round it.
        NoKernelError: no kernel runs the scheme here.
    """
    scheme = QuantScheme.parse(scheme)
    patterns = tuple(skip)
    kinds: tuple[type, ...] = (torch.nn.Linear, torch.nn.Embedding) if embeddings else (torch.nn.Linear,)
    if type(model) in kinds:
        kind = type(model).__name__
        raise ValueError(f"the model is itself a {kind}: use gristmill.nn.{kind}.from_float(model, scheme)")
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    replaced: dict[torch.nn.Module, _Quantized] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) not in kinds or any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if owners[id(module.weight)] > 1:
            continue
        if module not in replaced:
            replaced[module] = _rounded(name, module, scheme, policy)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced[module])
    _leave_fast_paths(model)
    return model


def _leave_fast_paths(model: torch.nn.Module) -> None:
    """`torch.nn.TransformerEncoderLayer` and its encoder give their weights to one kernel of torch's where nothing is trained: those that hold
    ours call their modules instead, as in training."""
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoderLayer) and _holds_ours(module):
            module.activation_relu_or_gelu = 0  # of neither function: the kernel takes no others
        elif isinstance(module, torch.nn.TransformerEncoder) and any(map(_holds_ours, module.layers)):
            module.use_nested_tensor = False  # which that kernel alone takes


def _holds_ours(layer: torch.nn.Module) -> bool:
    return any(isinstance(getattr(layer, name, None), _Quantized) for name in ("linear1", "linear2"))


def _rounded(name: str, module: torch.nn.Module, scheme: QuantScheme, policy: Policy | None) -> _Quantized:
    """The module that takes the place of a float one."""
    rounded: _Quantized
    try:
        if isinstance(module, torch.nn.Embedding):
            rounded = Embedding.from_float(module, scheme)
        else:
            assert isinstance(module, torch.nn.Linear)
            rounded = Linear.from_float(module, scheme, policy=policy)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; leave it out with skip=[{name!r}, ...]") from error
    for hooks in HOOKS:  # the same dictionaries, from which a handle removes its hook
        setattr(rounded, hooks, getattr(module, hooks))
    return rounded.train(module.training)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """`dtype`; ValueError for one that no module computes in."""
    if dtype not in DTYPES:
        raise ValueError(f"a module computes in {', '.join(map(str, DTYPES))}, got {dtype}")
    return dtype


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
