"""Collective operations: verified by worker groups of processes, on odd shapes in every dtype; a rank that died is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gristmill import ops
from gristmill.autotune.device import device_target
from gristmill.autotune.worker_group import WorkerGroup
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.collective.groups import enter, group_of

REGISTRY = default_registry()
OPS = ("all_reduce", "all_reduce_add_rms_norm", "all_gather", "all_to_all")
KERNELS = [
    k
    for op in OPS
    for k in REGISTRY.kernels_of(op)
    if k.language in ("python", "cpp") and k.requires.vendors in ((), ("cpu",))
]
SHAPES = ("m=1,n=1", "m=7,n=257,x=fp32", "m=7,n=257", "m=33,n=64,x=fp16")


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerGroup]:
    """Returns a worker group of two ranks, which all tests of this module share."""
    group = WorkerGroup(2, timeout=90)
    yield group
    group.close()


def verified(group: WorkerGroup, kernel: Kernel, problem: str) -> dict[str, Any]:
    """Returns the outcome of a kernel with its default configuration."""
    op = REGISTRY.op(kernel.op)
    asked = op.problem(problem)
    return group.verify(op, kernel, kernel.config(asked, device_target("cpu", Policy())), asked, "cpu")


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_two_ranks_match_the_reference(pair: WorkerGroup, kernel: Kernel) -> None:
    op = REGISTRY.op(kernel.op)
    for shape in SHAPES:
        outcome = verified(pair, kernel, f"{shape},world=2")
        assert outcome["ok"], (shape, outcome["reason"])
        if "norm" not in op.name:
            assert outcome["error"] == 0, "the sum of two numbers is rounded once, whatever the order"


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_match_the_reference(world: int) -> None:
    group = WorkerGroup(world, timeout=90)
    try:
        for kernel in KERNELS:
            for shape in SHAPES:
                outcome = verified(group, kernel, f"{shape},world={world}")
                assert outcome["ok"], (shape, outcome["reason"])
    finally:
        group.close()


@pytest.mark.slow
def test_a_dead_rank_is_replaced_with_its_peers() -> None:
    op, kernel, group = REGISTRY.op("all_reduce"), KERNELS[0], WorkerGroup(2, timeout=90)
    problem = op.problem("m=1,n=8,world=2")
    try:
        assert group.verify(op, kernel, {}, problem, "cpu")["ok"]
        process = group._workers[1]._process
        assert process is not None
        process.kill()
        process.wait()
        assert group.verify(op, kernel, {}, problem, "cpu")["ok"]
    finally:
        group.close()


@pytest.mark.parametrize("fault", ["one element", "a rank left out"])
def test_planted_faults_exceed_the_tolerance(fault: str) -> None:
    op = REGISTRY.op("all_reduce")
    problem = op.problem("m=7,n=257,world=1")
    x, group, world = op.inputs(problem, 0, "cpu")
    out = x.clone()
    if fault == "one element":
        out[3, 100] *= 1.01
    else:
        out.zero_()
    assert op.error is not None
    assert op.error(problem, (x, group, world), [out], [x]) > op.tolerance(problem).limit
    assert op.error(problem, (x, group, world), [x], [x]) == 0


@pytest.mark.parametrize("fault", ["one element of the norm", "one element of the residual", "sum left out"])
def test_planted_faults_of_the_fused_norm_exceed_the_tolerance(fault: str) -> None:
    op = REGISTRY.op("all_reduce_add_rms_norm")
    problem = op.problem("m=7,n=257,world=1")
    arguments = op.inputs(problem, 0, "cpu")
    x, residual, weight, eps, group, world = arguments
    stored = residual.clone()
    normed = op.reference(x, stored, weight, eps, group, world)
    outputs = [normed.clone(), stored.clone()]
    if fault == "sum left out":
        outputs[1] = residual
    else:
        wrong = outputs[0 if "norm" in fault else 1]
        place = int((normed.float() * stored.float()).abs().argmax())
        wrong.view(-1)[place] *= 1.02
    assert op.error is not None
    assert op.error(problem, arguments, outputs, [normed, stored]) > op.tolerance(problem).limit
    assert op.error(problem, arguments, [normed, stored], [normed, stored]) == 0


def test_calls_outside_a_group_are_refused() -> None:
    x = torch.ones(2, 3)
    alone = x.clone()
    ops.all_reduce(alone, "", 1)
    assert torch.equal(alone, x)
    out = torch.full_like(x, torch.nan)
    ops.all_gather(x, "", 1, out)
    assert torch.equal(out, x)
    assert group_of(2) == ("", 0)
    with pytest.raises(ValueError, match="world"):
        ops.all_reduce(x, "", 0)
    with pytest.raises(ValueError, match="joined no group 'none'"):
        enter("none", 2)
