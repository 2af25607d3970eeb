"""moe_block_scaled_cutedsl_sm100 without CuTe DSL: accepted problems, where it runs, configurations, the workspace, weights of another format.
tests/integrations/cutedsl/test_experts.py has the rest."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernel_registry import Target, default_registry, grades
from gristmill.kernels.interpreter import install
from gristmill.kernels.linear.block_scaled_cutedsl.shapes import FORMS
from gristmill.kernels.moe._block_scaled_chain import sizes_of_rows
from gristmill.kernels.moe.grouped_linear.block_scaled_cutedsl import product as experts
from gristmill.kernels.moe.moe import block_scaled_cutedsl
from gristmill.quant import pack, quantize
from tests.calls import make_call

pytest.importorskip("triton", reason="triton is not installed")
OP = default_registry().op("moe")
KERNEL = default_registry().kernel("moe", "moe_block_scaled_cutedsl_sm100")
B200 = Target.parse("sm_100")


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4", None),
        ("m=0,top_k=4,e=32,h=2944,i=2944,x=fp16,w=mxfp4.mxfp8,epilogue=w13_bias+w2_bias+clamp", None),
        ("m=4096,top_k=8,e=256,h=7168,i=2048,w=mxfp8.mxfp8", None),
        ("m=4096,top_k=8,e=256,h=7168,i=128,w=mxfp4.mxfp4", None),
        ("m=1,top_k=2,e=4,h=256,i=256,w=nvfp4", "not nvfp4"),
        ("m=1,top_k=2,e=4,h=256,i=256,w=fp8_block.fp8_g128", "not fp8_block.fp8_g128"),
        ("m=1,top_k=2,e=4,h=256,i=256,x=fp32,w=nvfp4.nvfp4", "fp16 or bf16 activations, not fp32"),
        ("m=1,top_k=8,e=128,h=2048,i=96,w=nvfp4.nvfp4", None),
        ("m=1,top_k=4,e=32,h=2880,i=2880,w=mxfp4.mxfp4,epilogue=w13_bias+w2_bias+clamp", None),
        ("m=1,top_k=8,e=128,h=2048,i=192,w=mxfp8.mxfp8", None),
        (
            "m=1,top_k=4,e=32,h=2880,i=2880,w=mxfp4.mxfp8",
            "spreads to bytes: needs K a multiple of 128, got K=2880",
        ),
        (
            "m=1,top_k=2,e=4,h=208,i=256,w=nvfp4.nvfp4",
            "whole 16 bytes of a row: needs K a multiple of 32, got K=208",
        ),
        ("m=1,top_k=2,e=4,h=256,i=256,w=mxfp4.mxfp4,act_order=true", "not act-order"),
        ("m=1,top_k=2,e=65536,h=32768,i=128,w=mxfp4.mxfp4", "in int32, and 65536 experts of 32768 rows"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sm_100", None),
        ("sm_103", None),
        ("sm_110", "family"),
        ("sm_120", "tcgen05"),
        ("sm_121", "tcgen05"),
        ("sm_90", "tcgen05"),
    ],
)
def test_runs_on_the_family_of_sm_100(name: str, reason: str | None) -> None:
    reasons = KERNEL.requires.check_hardware(Target.parse(name))
    assert not reasons if reason is None else reason in reasons[0]


@pytest.mark.parametrize(
    ("rows", "experts_count", "n", "expected"),
    [
        (8, 128, 2048, [64, 128, 256]),  # eight experts with a row each
        (512, 128, 2048, [256, 64, 128]),
        (0, 4, 64, [64, 128, 256]),
        (32768, 256, 7168, [256, 64, 128]),
    ],
)
def test_tiles(rows: int, experts_count: int, n: int, expected: list[int]) -> None:
    """The widest that give every multiprocessor one."""
    assert experts.tiles(rows, experts_count, n, False, 148) == expected
    assert experts.tiles(rows, experts_count, n, True, 148) == [256]


def test_both_products_have_a_configuration() -> None:
    problem = OP.problem(
        "m=64,top_k=4,e=32,h=2944,i=2944,w=mxfp4.mxfp8,epilogue=w13_bias+w2_bias+clamp,x=fp16"
    )
    made = list(KERNEL.space(problem, B200))
    assert made[0] == KERNEL.config(problem, B200) and len(made) == 3
    first, second = (block_scaled_cutedsl.config_of(made[0], number) for number in (1, 2))
    assert (first["epilogue"], first["gather"], first["bn"]) == ("bias+clamp+silu_mul", True, 256)
    assert (second["epilogue"], second["gather"]) == ("bias", False)
    assert first.keys() == second.keys() == experts.aot(B200)[0].config.keys()
    assert {first[key] for key in ("x", "arch", "scheme")} == {"fp16", "sm_100a", "mxfp4.mxfp8"}
    assert KERNEL.config(problem, Target.parse("sm_103"))["arch"] == "sm_103a"


def test_gating_follows_where_gate_and_up_are_no_whole_tiles_of_scales() -> None:
    problem = OP.problem("m=64,top_k=8,e=128,h=2048,i=192,w=mxfp8.mxfp8,epilogue=w13_bias+clamp")
    made = list(KERNEL.space(problem, B200))
    assert made[0] == KERNEL.config(problem, B200) and len(made) == 5
    first, second = (block_scaled_cutedsl.config_of(made[0], number) for number in (1, 2))
    assert (first["epilogue"], second["epilogue"]) == ("bias", "none")
    assert {config["bn1"] for config in made} == {config["bn2"] for config in made} == {64, 128, 256}


def test_every_scheme_and_tile_is_compiled() -> None:
    made = {(case.config["scheme"], case.config["epilogue"] != "none") for case in experts.aot(B200)}
    assert {scheme for scheme, _ in made} == set(FORMS)
    assert {case.config["bn"] for case in experts.aot(B200)} == {64, 128, 256}
    assert len({case.name for case in experts.aot(B200)}) == len(experts.aot(B200))


@pytest.mark.parametrize("scheme", FORMS)
def test_the_workspace_has_room_for_the_rows_of_either_product(scheme: str) -> None:
    form = scheme.partition(".")[2]
    problem = OP.problem(f"m=30,top_k=3,e=4,h=128,i=256,w={scheme}")
    size = KERNEL.workspace(problem, KERNEL.config(problem, B200)).bytes
    chain = 256 + 2 * 512 + 90 * (256 + 128) * 2
    assert size >= chain + max(sum(sizes_of_rows(form, 30, 128)), sum(sizes_of_rows(form, 90, 256)))
    assert all(part % 256 == 0 for part in sizes_of_rows(form, 33, 128))


def test_another_weight_is_refused_by_name() -> None:
    install()
    weights = [
        pack(quantize(torch.randn(3, n, k), "nvfp4"), "scales128x4_v1") for n, k in ((256, 128), (128, 128))
    ]
    w13, w2 = (list(one.tensors) for one in weights)
    w13[1] = w13[1][:, :, :1]
    problem = OP.problem("m=2,top_k=1,e=3,h=128,i=128,w=nvfp4.nvfp4")
    x, out = torch.zeros(2, 128, dtype=torch.bfloat16), torch.empty(2, 128, dtype=torch.bfloat16)
    ids, scores = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    call = make_call("moe", x=x, weights=scores, ids=ids, w13=w13, w2=w2, inter=128, out=out)
    expected = r"expected codes \[3, 256, 64\], scales \[3, 2, 2, 512\] and 768 multipliers of rows, got \[3, 256, 64\], \[3, 2, 1, 512\] and 768"
    with pytest.raises(ValueError, match=expected):
        block_scaled_cutedsl.launch(KERNEL.config(problem, B200), call)


def test_it_is_graded_as_compiled_and_interpreted() -> None:
    """It has run nowhere; its PTX is executed on a CPU."""
    for name in ("sm_100", "sm_103"):
        assert {proof.grade for proof in grades.proofs(KERNEL, Target.parse(name))} == {
            "compiled",
            "interpreted",
        }
