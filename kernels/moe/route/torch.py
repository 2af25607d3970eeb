"""Route by torch: grouped top-k and a stable argsort."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.requirement import Requirement
from gristmill.kernels.moe.grouped_topk import torch as grouped_topk
from gristmill.kernels.moe.permute import torch as permute
from gristmill.kernels.moe.route._chain import run

if TYPE_CHECKING:
    from gristmill.kernels.calls import RouteCall


def launch(config: Config, call: RouteCall) -> None:
    """logits [M, E] -> weights, ids [M, top_k], expert_offsets [local + 1], permutation and inverse [M * top_k]."""
    run(call, partial(grouped_topk.launch, config), partial(permute.launch, {}))


KERNEL = Kernel(
    op="route",
    name="route_torch",
    provider="torch",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(packages=(("torch", "2.11"),)),
    summary="grouped_topk, permute, both by torch",
    batch_invariant=True,
)
