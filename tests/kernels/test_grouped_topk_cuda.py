"""grouped_topk in CUDA C++, as far as it shows without a GPU: what it takes, its configurations, what its entries refuse, its machine code.
tests/native/test_grouped_topk_fibers.py executes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.load import load
from gristmill.kernels.moe.grouped_topk import sm75, sm80, sm90
from gristmill.kernels.native import library_dir
from tests.calls import make_call
from tests.kernels.machine_code import TOOLS, images, instructions, usage

KERNELS = (sm90.KERNEL, sm80.KERNEL, sm75.KERNEL)
OP = default_registry().op("grouped_topk")
LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
NAMES = {f"choose_{x}_{each}" for x in ("fp32", "fp16", "bf16") for each in (4, 8, 12, 16, 32)}
needs_library = pytest.mark.skipif(
    not LIBRARY.is_file() or TOOLS is None,
    reason="needs the CUDA library and triton's cuobjdump and nvdisasm",
)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ("m=1,e=1024,top_k=1024", None),
        ("m=1,e=1025,top_k=8", "made for up to 1024 experts, not 1025"),
        ("m=1,e=66,top_k=2,n_group=33,topk_group=2", "chooses among up to 32 groups, not 33"),
        ("m=1,e=66,top_k=2,n_group=33,topk_group=33", None),
        ("m=1,e=64,top_k=2,n_group=32,topk_group=2", None),
    ],
)
def test_what_it_takes(axes: str, reason: str | None) -> None:
    assert [kernel.accepts(OP.problem(axes)) for kernel in KERNELS] == [reason] * len(KERNELS)


def test_configurations() -> None:
    """A warp to a block as long as the device takes all blocks at a time: 2,000 tokens of 160 experts take 4.7 us on an H200 so, 5.2 us with
    four warps to a block."""
    kernel, target = KERNELS[0], Target.parse("h200")
    problems = [OP.problem(f"m={m},e=256,top_k=8") for m in (1, 265, 2000, 2112, 2113)]
    chosen = [dict(kernel.config(problem, target)) for problem in problems]
    assert chosen == [{"warps": warps} for warps in (1, 1, 1, 1, 4)]
    assert kernel.space is not None
    space = list(kernel.space(OP.problem("m=1,e=256,top_k=8"), target))
    assert all(config in space for config in chosen)


@needs_library
def test_entries_refuse_what_they_cannot_run() -> None:
    """Before they look for a device."""

    def call(*arguments: Any, rows: int = 2) -> Any:
        top_k = arguments[1]
        weights, ids = torch.zeros(rows, top_k), torch.zeros(rows, top_k, dtype=torch.int32)
        return make_call("grouped_topk", *arguments, weights=weights, ids=ids)

    launch = load(KERNELS[0])
    for config, arguments in (
        ({"warps": 5}, (torch.zeros(2, 16), 2)),
        ({"warps": 0}, (torch.zeros(2, 16), 2)),
        ({"warps": 1}, (torch.zeros(2, 1025), 2)),
        ({"warps": 1}, (torch.zeros(2, 66), 2, None, 33, 2)),
        ({"warps": 1}, (torch.zeros(2, 16), 5, None, 4, 1)),
    ):
        with pytest.raises(ValueError, match="gm_grouped_topk_sm90"):
            launch(config, call(*arguments))
    launch({"warps": 1}, call(torch.zeros(0, 16), 2, rows=0))


@needs_library
def test_machine_code() -> None:
    """Every instance is present; nothing is spilled; a reduction for each place; vector loads behind the wait."""
    (image,) = (image for image in images(LIBRARY) if {row[0] for row in usage(image)} & NAMES)
    used = {name: (registers, stack) for name, registers, stack in usage(image)}
    assert used.keys() == NAMES
    for name, (registers, stack) in used.items():
        assert registers <= (128 if name.endswith("32") else 64) and stack == 0, (name, registers, stack)
    for name, text in instructions(image, ["choose_fp32_8", "choose_bf16_8"]).items():
        before, after = text.split("ACQBULK", 1)
        assert "LDG" not in before, f"{name}: reads before the wait"
        assert "LDG.E.128" in after and "LDL" not in text and "STL" not in text, name
        # The eight usual places and what is left, a loop over others and what is left, the exact loop; the maximum of a softmax.
        assert text.count("REDUX.MAX") == 9 + 2 + 1 + 1, name
