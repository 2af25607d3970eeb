"""Norm, rotary embedding and cache write by torch: the reference itself, which does not synchronize."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.kv_cache.qk_norm_rope_cache import NAME, reference

if TYPE_CHECKING:
    from torch import Tensor


def launch(
    config: Config,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    interleaved: bool,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    q: Tensor,
) -> None:
    """The arguments of `qk_norm_rope_cache.reference`, then q [T, Hq, D]."""
    q.copy_(
        reference(
            qkv,
            q_weight,
            k_weight,
            eps,
            positions,
            cos_sin,
            key_cache,
            value_cache,
            slot_mapping,
            interleaved,
            k_scale,
            v_scale,
        )
    )


KERNEL = Kernel(
    op=NAME,
    name="qk_norm_rope_cache_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="norms, rotation and index_put_ in turn",
    batch_invariant=True,
)
