"""Kernels of rms_norm, each wrong in a different way. Verification must reject every one."""

from __future__ import annotations

import torch

from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from tests.calls import positional

OP = default_registry().op("rms_norm")


@positional
def honest(config, x, weight, eps, out):
    out.copy_(OP.reference(x, weight, eps))


@positional
def forgets_the_last_row(config, x, weight, eps, out):
    out[:-1].copy_(OP.reference(x, weight, eps)[:-1])


@positional
def forgets_the_tail_of_rows(config, x, weight, eps, out):
    full = x.shape[-1] // 64 * 64
    out[:, :full].copy_(OP.reference(x, weight, eps)[:, :full])


@positional
def writes_one_element_too_far(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)


@positional
def writes_one_element_too_early(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).fill_(1.0)


@positional
def changes_its_input(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    x[0, 0] += 1


@positional
def ignores_eps_and_scale(config, x, weight, eps, out):
    out.copy_(OP.reference(x, torch.ones_like(weight), eps))


@positional
def swaps_two_rows(config, x, weight, eps, out):
    y = OP.reference(x, weight, eps)
    out.copy_(y[torch.tensor([1, 0, *range(2, len(y))])])


@positional
def one_weight_is_off(config, x, weight, eps, out):
    other = weight.clone()
    other[len(other) // 2] *= 1.05
    out.copy_(OP.reference(x, other, eps))


@positional
def gets_no_memory(config, x, weight, eps, out):
    raise torch.OutOfMemoryError("out of memory")


@positional
def one_nan(config, x, weight, eps, out):
    honest(config, x, weight, eps, out)
    out.view(-1)[-1] = float("nan")


@positional
def raises(config, x, weight, eps, out):
    raise RuntimeError("no such instruction")


WRONG = (
    forgets_the_last_row,
    forgets_the_tail_of_rows,
    writes_one_element_too_far,
    writes_one_element_too_early,
    changes_its_input,
    ignores_eps_and_scale,
    swaps_two_rows,
    one_weight_is_off,
    one_nan,
    raises,
)


def kernel(function) -> Kernel:
    return Kernel(
        op="rms_norm",
        name=function.__name__,
        provider="test",
        language="python",
        target=f"tests.autotune.zoo:{function.__name__}",
        requires=Requirement(),
    )
