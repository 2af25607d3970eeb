"""Workspaces in verification: passed as the runtime passes it, dirty or zeroed, and guarded."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.candidate import Candidate, WrongResultError
from gristmill.autotune.rotation import Rotation
from gristmill.autotune.verify import verify
from gristmill.kernel_registry.kernel import Kernel, Workspace
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.requirement import Requirement
from tests.calls import positional

OP = default_registry().op("linear")


@positional
def adds_what_is_there(config, x, weight, bias, residual, silu_mul, n, workspace, codes, scales, out):
    """Adds to its workspace without clearing it, which is correct only if that is zero."""
    y = OP.reference(x, weight[0])
    sums = workspace.view(torch.float32)[: y.numel()].view(y.shape)
    sums += y.float()
    out.copy_(sums)
    sums.zero_()


@positional
def forgets_to_clear(config, x, weight, bias, residual, silu_mul, n, workspace, codes, scales, out):
    """Leaves its sums where its next call expects zeros."""
    sums = workspace.view(torch.float32)[: out.numel()].view(out.shape)
    sums += OP.reference(x, weight[0])
    out.copy_(sums)


@positional
def writes_past_its_workspace(config, x, weight, bias, residual, silu_mul, n, workspace, codes, scales, out):
    out.copy_(OP.reference(x, weight[0]))
    torch.as_strided(workspace, (1,), (1,), workspace.storage_offset() + workspace.numel()).fill_(3)


def kernel(function, size: int, zeroed: bool) -> Kernel:
    return Kernel(
        op="linear",
        name=function.__name__,
        provider="test",
        language="python",
        target=f"{__name__}:{function.__name__}",
        requires=Requirement(),
        layouts=("dense_v1",),
        workspace=lambda problem, config: Workspace(size, zeroed),
    )


def outcome_of(function, size: int, zeroed: bool):
    return verify(OP, kernel(function, size, zeroed), {}, OP.problem("m=3,n=16,k=32,x=fp32,w=fp32"), "cpu")


def test_zeros_are_given_to_those_who_ask() -> None:
    assert outcome_of(adds_what_is_there, 3 * 16 * 4, True).ok
    assert not outcome_of(adds_what_is_there, 3 * 16 * 4, False).ok


@pytest.mark.parametrize("zeroed", [False, True])
def test_writing_past_the_workspace_shows(zeroed: bool) -> None:
    outcome = outcome_of(writes_past_its_workspace, 64, zeroed)
    assert not outcome.ok and outcome.reason == "wrote outside workspace"


def test_timing_hands_it_over_too() -> None:
    """Each kernel has its own workspace, although the kernels share argument lists."""
    rotation = Rotation(
        OP, kernel(adds_what_is_there, 192, True), OP.problem("m=3,n=16,k=32,x=fp32,w=fp32"), "cpu"
    )
    candidates = [Candidate(kernel(adds_what_is_there, 192, True), {}, rotation) for _ in range(2)]
    assert all(candidate.sample() > 0 and candidate.error < 1e-6 for candidate in candidates)
    with pytest.raises(WrongResultError):
        Candidate(kernel(forgets_to_clear, 192, True), {}, rotation)
