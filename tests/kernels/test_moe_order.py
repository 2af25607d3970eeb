"""moe with the order of rows given: kernels that read it do not sort rows, and others do not look at it; planted orders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.autotune.verify import kernel_arguments
from gristmill.kernel_registry.arguments import Tensor
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from gristmill.kernels.moe._chain import ORDER
from gristmill.kernels.moe.moe import op as moe
from gristmill.kernels.moe.permute import op as permute
from tests.calls import make_call
from tests.kernels.running import BLOCKS, Runnable, runnables, scheme_of

MOE = runnables("moe")
ALL = default_registry().kernels_of("moe")


def run(implementation: Runnable, **order: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the ids of the call: of several experts, repeated ones and those of other ranks."""
    op, kernel = implementation.op, implementation.kernel
    axes = "m=7,top_k=2,e=4,h=64,i=32"
    if "few_tokens" in kernel.name:
        axes = "m=1,top_k=2,e=4,h=64,i=32"
    problem = op.problem(f"{axes},w={scheme_of(implementation, axes, ('bf16', 'mxfp4', *BLOCKS))}")
    arguments = kernel_arguments(op, kernel, op.inputs(problem, 7, "cpu"))[: -len(ORDER)]
    ids = arguments[2]
    ids.copy_(
        torch.tensor([[3, 0], [1, 1], [-1, 3], [0, 2], [4, 9], [2, 3], [0, 1]], dtype=torch.int32)[: len(ids)]
    )
    if order:
        order = dict(zip(ORDER, permute.reference(order["ids"](ids), 4), strict=True))
    out = torch.full_like(arguments[0], float("nan"))
    call = make_call("moe", *arguments, **order, out=out)
    op.guard(op.static(problem))(call)
    load(kernel)(kernel.config(problem, implementation.target), call)
    return out, ids


@pytest.mark.parametrize("implementation", MOE, ids=str)
def test_the_same_bits_with_and_without_an_order(implementation: Runnable) -> None:
    out, _ = run(implementation)
    assert torch.equal(run(implementation, ids=lambda ids: ids)[0], out)


@pytest.mark.parametrize("implementation", MOE, ids=str)
def test_kernels_that_read_the_order_and_only_they_follow_it(implementation: Runnable) -> None:
    """The order of other ids: an expert's rows are then those of another one."""
    out, _ = run(implementation)
    swapped, _ = run(implementation, ids=lambda ids: torch.where(ids == 0, 3, torch.where(ids == 3, 0, ids)))
    reads = implementation.kernel.reads
    assert reads in ((), ORDER)
    assert torch.equal(swapped, out) == (reads == ())
    assert not out.isnan().any()


def test_kernels_that_sort_rows_read_the_order() -> None:
    """All but those that have no order: of few tokens, and of CPUs, which sort in the one call that they are."""
    assert {kernel.name for kernel in ALL if not kernel.reads} == {"moe_few_tokens_triton", "moe_cpu"}
    declared = {a.name for a in moe.OP.arguments if isinstance(a, Tensor) and a.derived}
    assert declared == set(ORDER)


def test_an_order_is_given_whole_and_in_the_sizes_of_the_call() -> None:
    problem = moe.OP.problem("m=5,top_k=2,e=4,h=64,i=32")
    arguments = moe.OP.inputs(problem, 0, "cpu")[: -len(ORDER)]
    order = permute.reference(arguments[2], 4)
    assert moe.OP.describe(*arguments, *order) == problem
    for place in range(3):
        some = [None if i == place else tensor for i, tensor in enumerate(order)]
        with pytest.raises(ValueError, match="expert_offsets, permutation and inverse go together"):
            moe.OP.describe(*arguments, *some)
        wrong = [tensor[1:] if i == place else tensor for i, tensor in enumerate(order)]
        with pytest.raises(ValueError, match=ORDER[place]):
            moe.OP.describe(*arguments, *wrong)
    with pytest.raises(TypeError, match="permutation"):
        moe.OP.describe(*arguments, order[0], order[1].long(), order[2])
