"""Layouts of other libraries' kernels, checked against those libraries: exact unpacking, and torch's own
packing."""

from __future__ import annotations

import pytest
import torch

from gristmill.autotune.device import device_target
from gristmill.autotune.resolve import confirmed_build
from gristmill.autotune.verify import with_workspace
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernels.load import load
from gristmill.quant import pack, quantize, unpack
from gristmill.quant.layouts.humming_v1 import LAYOUT as HUMMING
from gristmill.quant.packed import LayoutError
from tests.conftest import HAS_GPU

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
KERNEL = default_registry().kernel("linear", "linear_humming")


def _no_humming() -> str:
    if not HAS_GPU:
        return "no GPU"
    target = device_target(DEVICE, Policy())
    return "; ".join(
        KERNEL.requires.check_build(
            target, confirmed_build(default_registry(), target, Policy(pins={"*": ("*",)}))
        )
    )


needs_humming = pytest.mark.skipif(bool(reason := _no_humming()), reason=reason or "humming is here")


@needs_humming
@pytest.mark.parametrize("least", [False, True], ids=["", "the least code is used"])
@pytest.mark.parametrize("scheme", HUMMING.schemes)
def test_humming_is_unpacked_exactly(scheme: str, least: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    q = quantize(
        torch.randn(256, 384, generator=generator, device=DEVICE)
        * torch.rand(256, 1, generator=generator, device=DEVICE),
        scheme,
    )
    if least:
        q.codes[5, 7] = 0
    packed = pack(q, HUMMING)
    assert abs(packed.nbytes - HUMMING.nbytes(scheme, 256, 384)) < 1024
    assert unpack(packed).identical(q)
    packed.slots["weight"].view(-1)[100] ^= 2
    assert not unpack(packed).identical(q)


@needs_humming
def test_humming_refuses_fused_weights_of_several_multipliers() -> None:
    from gristmill.quant import concat

    q = concat([quantize(torch.randn(128, 256, device=DEVICE) * s, "nvfp4") for s in (1, 3)], -2)
    with pytest.raises(LayoutError, match="segments"):
        pack(q, HUMMING)


@needs_humming
@pytest.mark.parametrize("m", [1, 40, 300])
def test_humming_leaves_its_locks_zero_and_streams_do_not_meet(m: int) -> None:
    op = default_registry().op("linear")
    problem = op.problem(f"m={m},n=512,k=2048,w=int4_g128")
    x, q, *rest = op.inputs(problem, 3, DEVICE)
    tensors, launcher, expected = pack(q, HUMMING).tensors, load(KERNEL), op.reference(x, q)
    streams, outs, spaces = [torch.cuda.Stream() for _ in range(2)], [], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            arguments = with_workspace(op, KERNEL, {}, problem, [x, tensors, *rest])
            outs.append([torch.empty_like(expected) for _ in range(20)])
            spaces.append(arguments[6])
            for out in outs[-1]:
                launcher({}, op.Call(*arguments, out))
    torch.cuda.synchronize()
    assert not any(space.any() for space in spaces)
    for out in (out for each in outs for out in each):
        assert float((out.float() - expected.float()).norm() / expected.float().norm()) < 1e-2


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_g128"])
def test_tinygemm_is_packed_as_torch_packs(scheme: str) -> None:
    q = quantize(torch.randn(264, 512, device=DEVICE), scheme)
    packed = pack(q, "tinygemm_v1")
    # torch stores the even column in the high nibble
    swapped = (q.codes >> 4) | (q.codes << 4)
    assert torch.equal(packed.slots["tiles"], torch._convert_weight_to_int4pack(swapped, 8))
    assert unpack(packed).identical(q)
