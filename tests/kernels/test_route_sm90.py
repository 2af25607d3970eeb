"""route_sm90, as far as it shows without a GPU: what it takes, what its entry refuses, its machine code. tests/native/test_route_fibers.py
executes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from gristmill.kernels.moe.route import chain_sm90, sm90
from gristmill.kernels.native import library_dir
from tests.calls import make_call
from tests.kernels.machine_code import TOOLS, images, instructions, usage

OP = default_registry().op("route")
LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
NAMES = {f"route_{x}_{each}" for x in ("fp32", "fp16", "bf16") for each in (4, 8, 12, 16, 32)}
needs_library = pytest.mark.skipif(
    not LIBRARY.is_file() or TOOLS is None,
    reason="needs the CUDA library and triton's cuobjdump and nvdisasm",
)


@pytest.mark.parametrize(
    ("axes", "reason"),
    [
        ("m=64,e=1024,local=1024,top_k=32", None),
        ("m=65,e=256,local=256,top_k=8", "sorts up to 64 tokens in a cluster, not 65"),
        ("m=1,e=256,local=256,top_k=33", "chooses up to 32 experts per token, not 33"),
        ("m=1,e=1025,local=1,top_k=8", "made for up to 1024 experts, not 1025"),
        ("m=1,e=66,local=66,top_k=2,n_group=33,topk_group=2", "chooses among up to 32 groups, not 33"),
    ],
)
def test_what_it_takes(axes: str, reason: str | None) -> None:
    assert sm90.KERNEL.accepts(OP.problem(axes)) == reason


def test_the_chain_takes_what_its_choice_does() -> None:
    takes = chain_sm90.KERNEL.accepts
    assert takes(OP.problem("m=999,e=1024,local=1024,top_k=40")) is None
    assert takes(OP.problem("m=1,e=1025,local=8,top_k=8")) == "made for up to 1024 experts, not 1025"


@needs_library
def test_the_entry_refuses_what_it_cannot_run() -> None:
    """Before it looks for a device."""

    def call(rows: int, experts: int, top_k: int, local: int, first: int, *groups: int) -> Any:
        arguments = (torch.zeros(rows, experts), top_k, local, first, None, *groups)
        empty = [torch.zeros(size, dtype=torch.int32) for size in (local + 1, rows * top_k, rows * top_k)]
        ids = torch.zeros(rows, top_k, dtype=torch.int32)
        return make_call(
            "route", *arguments, **dict(zip(OP.outputs, (ids.float(), ids, *empty), strict=True))
        )

    launch = load(sm90.KERNEL)
    for arguments in (
        (65, 16, 2, 16, 0),
        (2, 1025, 2, 16, 0),
        (2, 64, 33, 64, 0),
        (2, 16, 2, 9, 8),
        (2, 16, 2, 8, -1),
        (2, 66, 2, 66, 0, 33, 2),
        (2, 16, 5, 16, 0, 4, 1),
    ):
        with pytest.raises(ValueError, match="gm_route_sm90"):
            launch({}, call(*arguments))


@needs_library
def test_machine_code() -> None:
    """Every instance is present; nothing is spilled; no fence waits for what was sent to other CTAs; inputs are read behind the wait."""
    (image,) = (image for image in images(LIBRARY) if {row[0] for row in usage(image)} & NAMES)
    used = {name: (registers, stack) for name, registers, stack in usage(image)}
    assert used.keys() == NAMES
    for name, (registers, stack) in used.items():
        assert registers <= (128 if name.endswith("32") else 80) and stack == 0, (name, registers, stack)
    for name, text in instructions(image, ["route_fp32_8", "route_bf16_8"]).items():
        before, after = text.split("ACQBULK", 1)
        assert "LDG" not in before, f"{name}: reads before the wait"
        assert "MEMBAR" in before and "MEMBAR" not in after, name
        # A bit, and a count of experts of other ranks, to each of eight CTAs.
        assert after.count("REDAS.OR") == 2 * 8, name
        assert "ATOM" not in text and "LDL" not in text and "STL" not in text, name
