"""Experts with e4m3 weights and activations in Triton's interpreter: rows quantized bit for bit, every tile, planted faults, workspaces, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gristmill.autotune.verify import verify
from gristmill.kernel_registry import Kernel, Target, default_registry
from gristmill.kernel_registry.kernel import Config
from gristmill.kernels.interpreter import install
from gristmill.kernels.moe import _e4m3_rows_triton
from gristmill.kernels.moe.grouped_linear import w8a8_triton as product
from gristmill.kernels.moe.moe import w8a8_triton as experts
from gristmill.quant import pack, quantize
from gristmill.quant.activations import quantize_activation
from tests.calls import make_call
from tests.kernels.running import padded_rows
from tests.kernels.test_block_scaled_triton import rows

pytest.importorskip("triton", reason="triton is not installed")
MOE, GROUPED = (default_registry().op(name) for name in ("moe", "grouped_linear"))
MOE_KERNEL = default_registry().kernel("moe", "moe_w8a8_triton")
GROUPED_KERNEL = default_registry().kernel("grouped_linear", "grouped_linear_w8a8_triton")
SIZES = "top_k=3,e=5,h=144,i=136"
TARGETS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "gfx950", "gfx1201")


@pytest.fixture(autouse=True)
def repaired() -> None:
    install()


@pytest.mark.parametrize("form", ["fp8_token", "fp8_g128"])
@pytest.mark.parametrize(("m", "k"), [(3, 40), (5, 200), (3, 1280), (4, 2060)])
def test_each_row_is_quantized_bit_for_bit(form: str, m: int, k: int) -> None:
    x = padded_rows(rows(m, k))
    room = torch.full((_e4m3_rows_triton.bytes_of(form, m, k) + 7,), 0xAA, dtype=torch.uint8)
    made, expected = _e4m3_rows_triton.quantize(form, x, room), quantize_activation(x, form)
    assert torch.equal(made.codes.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(made.scales, expected.scales.view(m, -1))
    assert torch.equal(room[-7:], torch.full((7,), 0xAA, dtype=torch.uint8)), "written past its room"


def test_a_row_with_nan_has_a_scale_of_nan() -> None:
    x = torch.randn(3, 300)
    x[1, 140] = float("nan")
    for form, columns in (("fp8_token", [0]), ("fp8_g128", [1])):
        room = torch.empty(_e4m3_rows_triton.bytes_of(form, 3, 300), dtype=torch.uint8)
        made = _e4m3_rows_triton.quantize(form, x, room)
        assert made.scales.isnan().nonzero().tolist() == [[1, column] for column in columns]


@pytest.mark.parametrize("scheme", product.SCHEMES)
@pytest.mark.parametrize("target", ["sm_89", "sm_100"])
def test_tiles_for_few_rows_and_many(scheme: str, target: str) -> None:
    for text in (
        "m=11,e=33,n=36,k=32,epilogue=silu_mul",
        "m=45,e=2,n=130,k=260",
        "m=80,e=2,n=70,k=130,gather=2",
    ):
        problem = GROUPED.problem(f"{text},w={scheme}")
        config = GROUPED_KERNEL.config(problem, Target.parse(target))
        outcome = verify(GROUPED, GROUPED_KERNEL, config, problem, "cpu")
        assert outcome.ok, outcome.reason


@pytest.mark.parametrize(
    ("op", "kernel", "text"),
    [
        (GROUPED, GROUPED_KERNEL, "m=70,e=3,n=72,k=272,w=fp8_block.fp8_g128,epilogue=bias+silu_mul"),
        (MOE, MOE_KERNEL, "m=40,top_k=2,e=3,h=144,i=136,w=fp8_block.fp8_g128"),
    ],
)
def test_every_configuration_of_the_space(op: Any, kernel: Kernel, text: str) -> None:
    problem = op.problem(text)
    assert kernel.space is not None
    for text in ("sm_90", "sm_120"):
        configs = [*kernel.space(problem, Target.parse(text))]
        assert configs[0] == kernel.config(problem, Target.parse(text)) and 3 <= len(configs) <= 6
        assert len({*map(str, configs)}) == len(configs)
        for config in configs:
            outcome = verify(op, kernel, config, problem, "cpu")
            assert outcome.ok, (config, outcome.reason)


CONFIG: Config = {"scheme": "fp8_block.fp8_g128", "bm": 16, "bn": 64, "warps": 4, "stages": 3}
GROUPED_FAULT = "m=33,e=3,n=272,k=400,w=fp8_block.fp8_g128"
MOE_FAULT = "m=33,top_k=2,e=3,h=400,i=272,w=fp8_block.fp8_g128"


def with_scales(weight: list[torch.Tensor], at: tuple[int, ...], factor: float) -> list[torch.Tensor]:
    """A weight with one scale multiplied."""
    codes, scales, *others = weight
    scales = scales.clone()
    scales[at] *= factor
    return [codes, scales, *others]


def right_product(config: Config, call: Any) -> None:
    product.launch(CONFIG, call)


def wrong_last_scale(config: Config, call: Any) -> None:
    product.launch(CONFIG, call.replace(weight=with_scales(call.weight, (0, 2, 3), 1.25)))


def scales_of_another_expert(config: Config, call: Any) -> None:
    codes, scales, *others = call.weight
    product.launch(CONFIG, call.replace(weight=[codes, scales.roll(1, 0), *others]))


def right_experts(config: Config, call: Any) -> None:
    experts.launch(CONFIG, call)


def wrong_scale_of_w13(config: Config, call: Any) -> None:
    experts.launch(CONFIG, call.replace(w13=with_scales(call.w13, (0, 1, 2), 2.0)))


def wrong_scale_of_w2(config: Config, call: Any) -> None:
    experts.launch(CONFIG, call.replace(w2=with_scales(call.w2, (0, 1, 1), 2.0)))


def ids_of_other_tokens(config: Config, call: Any) -> None:
    experts.launch(CONFIG, call.replace(ids=call.ids.roll(1, 0)))


@pytest.mark.parametrize(
    ("kernel", "problem", "launcher", "right"),
    [
        (GROUPED_KERNEL, GROUPED_FAULT, "right_product", True),
        (GROUPED_KERNEL, GROUPED_FAULT, "wrong_last_scale", False),
        (GROUPED_KERNEL, GROUPED_FAULT, "scales_of_another_expert", False),
        (MOE_KERNEL, MOE_FAULT, "right_experts", True),
        (MOE_KERNEL, MOE_FAULT, "wrong_scale_of_w13", False),
        (MOE_KERNEL, MOE_FAULT, "wrong_scale_of_w2", False),
        (MOE_KERNEL, MOE_FAULT, "ids_of_other_tokens", False),
    ],
)
def test_one_wrong_scale_fails(kernel: Kernel, problem: str, launcher: str, right: bool) -> None:
    op, faulty = default_registry().op(kernel.op), replace(kernel, target=f"{__name__}:{launcher}")
    outcome = verify(op, faulty, CONFIG, op.problem(problem), "cpu")
    assert outcome.ok == right and outcome.error is not None, outcome.reason


def call(workspace: torch.Tensor | None = None, **changed: torch.Tensor) -> Any:
    """A call of seven tokens, with slots of the second weight changed."""
    generator = torch.Generator().manual_seed(0)
    w13, w2 = (
        pack(quantize(torch.randn(5, n, k, generator=generator), "fp8_block"), "plain_v1").slots
        for n, k in ((272, 144), (144, 136))
    )
    ids = torch.randint(0, 5, (7, 3), dtype=torch.int32, generator=generator)
    scores, silu = torch.rand(7, 3, generator=generator), (None, None, False, 1.702, 7.0)
    slots = [*{**w2, **changed}.values()]
    return make_call(
        "moe",
        torch.randn(7, 144, generator=generator),
        scores,
        ids,
        [*w13.values()],
        slots,
        136,
        workspace,
        *silu,
        torch.empty(7, 144),
    )


def test_a_workspace_may_hold_anything_but_must_be_large_enough() -> None:
    problem = MOE.problem(f"m=7,{SIZES},x=fp32,w=fp8_block.fp8_g128")
    made = call(torch.full((MOE_KERNEL.workspace(problem, CONFIG).bytes,), 0xFF, dtype=torch.uint8))
    experts.launch(CONFIG, made)
    first = made.out.clone()
    assert first.isfinite().all()
    experts.launch(CONFIG, made.replace(workspace=None))
    assert torch.equal(made.out, first)
    with pytest.raises(ValueError, match="contiguous bytes"):
        experts.launch(CONFIG, made.replace(workspace=made.workspace[:-1]))


def test_experts_of_other_ranks_add_nothing() -> None:
    made = call()
    experts.launch(CONFIG, made.replace(ids=torch.full_like(made.ids, 5)))
    assert not made.out.any()
    alone = made.replace(ids=torch.where(made.ids == 2, 2, -1).int())
    experts.launch(CONFIG, alone)
    some = (made.ids == 2).any(1)
    assert not made.out[~some].any() and made.out[some].abs().amax(1).min() > 0


def test_codes_may_have_any_strides() -> None:
    made = call()
    experts.launch(CONFIG, made)
    given = quantize_activation(made.x, "fp8_g128")
    codes = padded_rows(given.values)
    scales = given.scales.T.contiguous().T
    nothing = torch.full_like(made.x, float("nan"))
    again = made.replace(x=nothing, codes=codes, scales=scales, out=torch.empty_like(made.out))
    experts.launch(CONFIG, again)
    assert torch.equal(again.out, made.out)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("codes", torch.zeros(5, 143, 136, dtype=torch.uint8)),
        ("scales", torch.zeros(5, 2, 1)),
        ("scales", torch.zeros(4, 2, 2)),
        ("row_block", torch.zeros(143, dtype=torch.int32)),
        ("perm", torch.arange(136, dtype=torch.int32)),
    ],
)
def test_another_weight_is_refused_by_name(name: str, changed: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected codes \[5, 144, 136\] and scales \[5, block rows, 2\]"):
        experts.launch(CONFIG, call(**{name: changed}))


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        (MOE_KERNEL, f"m=1,{SIZES},w=fp8_block.fp8_g128", None),
        (MOE_KERNEL, f"m=1,{SIZES},x=fp32,w=fp8_ch.fp8_token", None),
        (MOE_KERNEL, f"m=1,{SIZES},w=fp8_block", "not fp8_block"),
        (MOE_KERNEL, f"m=1,{SIZES},w=int8_ch.int8_token", "not int8_ch.int8_token"),
        (MOE_KERNEL, f"m=1,{SIZES},w=fp8_block.fp8_g128,act_order=true", "act-order"),
        (GROUPED_KERNEL, "m=1,e=2,n=16,k=32,x=fp32,w=fp8_block.fp8_g128", "not fp32"),
        (GROUPED_KERNEL, "m=1,e=2,n=16,k=33,w=fp8_block.fp8_g128,epilogue=bias", None),
    ],
)
def test_accepts(kernel: Kernel, problem: str, reason: str | None) -> None:
    refusal = kernel.accepts(default_registry().op(kernel.op).problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("kernel", [MOE_KERNEL, GROUPED_KERNEL], ids=lambda kernel: kernel.name)
def test_targets(kernel: Kernel) -> None:
    for name in TARGETS:
        assert not kernel.requires.check_hardware(Target.parse(name)), name
    for name in ("sm_80", "sm_86", "gfx90a", "gfx942", "gfx1100"):
        assert "lacks" in kernel.requires.check_hardware(Target.parse(name))[0], name
