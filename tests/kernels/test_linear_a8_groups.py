"""GGUF's types multiplied as they are stored: random blocks of every type, read, packed, and multiplied with activations of 8 bits.

Planted faults: another factor, scale or minimum, exchanged nibbles, a moved high bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gristmill.autotune.device import device_target
from gristmill.autotune.metrics import error_of
from gristmill.autotune.verify import run_reference
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.scheme import QuantScheme
from gristmill.kernels.load import load
from gristmill.quant import QuantTensor, pack
from gristmill.quant.formats.gguf_blocks import TYPES, read_blocks
from gristmill.quant.packed import Packed
from tests.calls import make_call
from tests.quant.formats.test_gguf import random_blocks

OP = default_registry().op("linear")
KERNEL = default_registry().kernel("linear", "linear_a8_groups_cpu")
KINDS = ("Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
FACTORED = ("Q4_K", "Q5_K", "Q6_K")


def weight(kind: str, n: int, k: int) -> QuantTensor:
    pytest.importorskip("gguf")
    values = TYPES[kind].values
    blocks = torch.from_numpy(random_blocks(kind, n, k // values))
    return read_blocks("w", kind, blocks.view(n, -1), (n, k))


def error(q: QuantTensor, packed: Packed, m: int, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """The error of the kernel against the reference, and the tolerance."""
    x = torch.randn(m, q.k, generator=torch.Generator().manual_seed(m)).to(dtype)
    problem = OP.problem(
        {
            "m": m,
            "n": q.n,
            "k": q.k,
            "x": {torch.float32: "fp32"}.get(dtype, "bf16"),
            "w": f"{q.scheme}.int8_g32",
        }
    )
    assert KERNEL.accepts(problem) is None
    out = torch.full((m, q.n), float("nan"), dtype=dtype)
    config = KERNEL.config(problem, device_target("cpu", Policy()))
    load(KERNEL)(config, make_call("linear", x, packed.tensors, None, None, False, q.n, None, out))
    arguments = [
        x,
        replace(q, scheme=QuantScheme.parse(f"{q.scheme}.int8_g32")),
        None,
        None,
        False,
        q.n,
        *(None,) * 3,
    ]
    return error_of(OP, problem, arguments, [out], run_reference(OP, arguments)), OP.tolerance(problem).limit


@pytest.mark.parametrize("m", [1, 3, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file(kind: str, m: int) -> None:
    for n in (16, 33):
        q = weight(kind, n, 768)
        packed = pack(q, "cpu_groups16_v1")
        assert (packed.slots["scales"].dtype == torch.int8) == (kind in FACTORED)
        for dtype in (torch.float32, torch.bfloat16):
            actual, limit = error(q, packed, m, dtype)
            assert actual <= limit


def factor(packed: Packed) -> None:
    packed.slots["factors"][0, 1, 3] *= 1.5


def scale(packed: Packed) -> None:
    packed.slots["scales"][0, 5, 7] += 20


def minimum(packed: Packed) -> None:
    packed.slots["offsets"][0, 5, 7] += 20


def nibbles(packed: Packed) -> None:
    line = packed.slots["codes"][0, 2]
    line.copy_((line >> 4) | (line << 4))


def high_bit(packed: Packed) -> None:
    packed.slots["codes"][0, 4 if packed.scheme.bits == 5 else 2] ^= 1


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("Q4_K", factor),
        ("Q6_K", factor),
        ("Q4_K", scale),
        ("Q6_K", scale),
        ("Q4_K", minimum),
        ("Q5_K", minimum),
        ("Q4_K", nibbles),
        ("Q5_K", high_bit),
        ("Q6_K", high_bit),
    ],
)
def test_a_planted_fault_is_over_the_tolerance(kind: str, plant: Callable[[Packed], None]) -> None:
    q = weight(kind, 16, 512)
    packed = pack(q, "cpu_groups16_v1")
    plant(packed)
    actual, limit = error(q, packed, 3)
    assert actual > limit


def output(q: QuantTensor, x: Tensor) -> Tensor:
    packed = pack(q, "cpu_groups16_v1")
    out = torch.full((x.shape[0], q.n), float("nan"))
    problem = OP.problem({"m": x.shape[0], "n": q.n, "k": q.k, "x": "fp32", "w": f"{q.scheme}.int8_g32"})
    config = KERNEL.config(problem, device_target("cpu", Policy()))
    load(KERNEL)(config, make_call("linear", x, packed.tensors, None, None, False, q.n, None, out))
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_x_does_not_depend_on_the_others(kind: str) -> None:
    q = weight(kind, 33, 768)
    x = torch.randn(13, 768, generator=torch.Generator().manual_seed(0))
    out = output(q, x)
    for rows in (1, 2, 4, 5):
        assert torch.equal(output(q, x[:rows]), out[:rows])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", FACTORED)
def test_the_largest_codes_scales_and_activations_do_not_overflow(kind: str, sign: int) -> None:
    """All bits set: with 127 in every column, the sums of int16 and int32 are the largest there are."""
    blocks = torch.full((16, 2, TYPES[kind].size), 255, dtype=torch.uint8)
    halves = blocks.view(torch.float16)
    if kind == "Q6_K":
        blocks[..., 192:208] = 127
        halves[..., 104] = 0.5
    else:
        halves[..., :2] = 0.5
    q = read_blocks("w", kind, blocks.view(16, -1), (16, 512))
    x = torch.full((5, 512), float(sign))
    expected = x.double() @ q.dequantize().double().T
    for rows in (1, 5):
        torch.testing.assert_close(output(q, x[:rows]).double(), expected[:rows], rtol=1e-6, atol=0)


def test_tensors_that_are_no_such_weight_are_refused() -> None:
    q = weight("Q4_K", 16, 512)
    packed = pack(q, "cpu_groups16_v1")
    packed.slots["factors"].resize_(0)
    with pytest.raises(
        ValueError, match=r"factors of a \[16, 512\] weight are 32 contiguous elements, got \(0,\)"
    ):
        error(q, packed, 1)
