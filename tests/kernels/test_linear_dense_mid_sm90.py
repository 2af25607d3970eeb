"""Dense products of a few dozen rows on Hopper without a GPU: accepted problems, configurations, what the launcher refuses, machine code."""

from __future__ import annotations

import re

import pytest
import torch

from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.target import Target
from gristmill.kernels.linear.dense_mid_sm90 import _launch, spec
from gristmill.kernels.native import library_dir
from tests.calls import make_call
from tests.kernels.machine_code import TOOLS, images, instructions, usage

REGISTRY, TARGET = default_registry(), Target.parse("sm_90")
KERNEL, OP = REGISTRY.kernel("linear", "linear_dense_mid_sm90"), REGISTRY.op("linear")
LIBRARY = library_dir() / "libgristmill_cuda_sm90a.so"
SHAPES = (
    (6144, 4096),
    (4096, 14336),
    (2560, 8192),
    (14336, 8192),
    (5120, 2048),
    (2112, 7168),
    (6144, 1024),
    (1, 8),
)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,n=4096,k=4096", None),
        ("m=64,n=7,k=8,x=fp16,w=fp16", None),
        ("m=128,n=4096,k=4096,epilogue=bias+silu_mul+residual", None),
        ("m=129,n=4096,k=4096", "made for M <= 128, not 129"),
        ("m=64,n=4096,k=4100", "K = 4100 is not a multiple"),
        ("m=64,n=4096,k=4096,x=fp16,w=bf16", "not fp16 by bf16"),
        ("m=64,n=4096,k=4096,x=fp32,w=fp32", "not fp32 by fp32"),
        ("m=64,n=4096,k=4096,w=int4_g128", "not bf16 by int4_g128"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("m", [1, 17, 64, 128])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_default_is_tried_first_and_nothing_twice(n: int, k: int, m: int) -> None:
    problem = OP.problem(f"m={m},n={n},k={k}")
    tried = list(KERNEL.space(problem, TARGET))
    assert tried[0] == KERNEL.config(problem, TARGET)
    assert len(tried) == len({tuple(sorted(config.items())) for config in tried}) <= 70
    times = [KERNEL.estimate_config(problem, config, TARGET) for config in tried]
    assert times == sorted(times) and times[0] > 0
    for config in tried:
        assert (
            config["split"] <= max(1, k // spec.STEP) and spec.slots(m, config["rows"], config["ctas"]) >= 2
        )


def test_configurations_of_one_size_run_all() -> None:
    """The narrowest ring of the largest width still has two slots, so that a tuned configuration serves any rows of x."""
    for rows in spec.ROWS:
        for ctas in range(1, spec.CTAS[rows] + 1):
            assert spec.slots(spec.MOST_ROWS, rows, ctas) >= 2
            assert spec.slots(64, rows, ctas) >= 3


def test_torch_is_the_better_guess_until_times_say_otherwise() -> None:
    assert KERNEL.estimate is None and not KERNEL.proven
    assert KERNEL.priority < REGISTRY.kernel("linear", "linear_torch").priority


def test_launcher_refuses_weights_that_do_not_fit() -> None:
    config = {"rows": 64, "split": 1, "ctas": 1}
    flat, x = torch.zeros(64 * 64 + 1).bfloat16(), torch.zeros(20, 64).bfloat16()
    out = torch.zeros(20, 64).bfloat16()
    for wrong in (flat[1:].view(64, 64), torch.zeros(64, 128).bfloat16()[:, :64]):
        with pytest.raises(ValueError, match="contiguous and 16-byte aligned"):
            _launch.launch(config, make_call("linear", x, [wrong], None, None, False, 64, None, out))
    weight = torch.zeros(64, 64).bfloat16()
    nothing = make_call("linear", x[:0], [weight], None, None, False, 64, None, out[:0])
    _launch.launch(config, nothing)  # no rows, no launch


@pytest.mark.skipif(
    not LIBRARY.is_file() or TOOLS is None,
    reason="needs the CUDA library and triton's cuobjdump and nvdisasm",
)
def test_machine_code() -> None:
    """Every instance is present and without a stack, leaves registers for the CTAs beside it, and multiplies a slot without waiting within it."""
    names = {
        f"dense_mid_{form}_{width}x{rows}": (width, rows)
        for form in ("fp16", "bf16")
        for width in spec.WIDTHS
        for rows in spec.ROWS
    }
    found = {}
    for image in images(LIBRARY):
        for name, registers, stack in usage(image):
            if name in names:
                found[name] = (image, registers, stack)
    assert set(found) == set(names)
    image = found[next(iter(names))][0]
    for name, text in instructions(image, list(names)).items():
        width, rows = names[name]
        _, registers, stack = found[name]
        threads = rows * 2 + 32
        assert stack == 0 and "LDL" not in text and "STL" not in text, name
        ctas = spec.CTAS[rows] - (width > 64 and rows in (128, 192))
        assert -(-registers // 8) * 8 * threads * ctas <= 65536, (name, registers)
        assert "UTMALDG.3D" in text and "UTMALDG.2D" in text, name
        products = re.findall(rf"HGMMA\.64x{width}x16\b[^\n]*", text)
        assert len(products) == 4 == len(re.findall("HGMMA", text)), name
        assert sum("gsb0" in product for product in products) == 1, f"{name}: products taken apart"
        assert "R2UR" not in text[text.index(products[0]) : text.index(products[-1])], name
