"""The calls of a model: sizes checked against the models' own arithmetic, division among ranks, errors,
coverage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from gristmill.autotune.place import place
from gristmill.bench.cli import cli
from gristmill.bench.coverage import coverage, shares
from gristmill.bench.shapes import MIX, ShapeError, Step, calls, load_config, model_names
from gristmill.kernel_registry.registry import default_registry
from gristmill.kernel_registry.store import Store, Timing, target_key

DECODE = [Step.decode("1x1024")]
PARAMETERS = {
    "llama-3-8b": 8.0,
    "llama-3-70b": 70.6,
    "qwen3-8b": 8.2,
    "qwen3-235b-a22b": 235,
    "deepseek-v3": 671,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 117,
}


@pytest.mark.parametrize("name", model_names())
def test_the_weights_of_all_calls_are_the_model(name: str) -> None:
    """The parameters counted from the problems, with the embedding, match those that the model's authors
    publish (1e9)."""
    config, total = load_config(name), 0
    # Only prefill multiplies by W_kv as a layer.
    step = DECODE if name != "deepseek-v3" else [Step.prefill("1x8")]
    for call in calls(config, 1, step):
        problem = default_registry().op(call.op).problem(call.problem)
        if call.op == "linear":
            total += call.count * problem.integer("n") * problem.integer("k")
        elif call.op == "moe":
            total += call.count * 3 * problem.integer("e") * problem.integer("h") * problem.integer("i")
    total += config["vocab_size"] * config["hidden_size"]
    assert math.isclose(total / 1e9, PARAMETERS[name], rel_tol=0.015), total


@pytest.mark.parametrize("name", model_names())
@pytest.mark.parametrize("tp", [2, 8])
def test_ranks_share_the_work(name: str, tp: int) -> None:
    def flops(ranks: int) -> float:
        ops = default_registry()
        return sum(
            c.count * ops.op(c.op).cost(ops.op(c.op).problem(c.problem)).flops
            for c in calls(load_config(name), ranks, MIX)
            if c.op == "linear" and c.part != "latents"
        )

    # With fewer KV heads than ranks, k and v are replicated, which adds a little.
    assert 1 / tp <= flops(tp) / flops(1) < 1.12 / tp


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="num_attention_heads is 32, which 3 ranks cannot share"):
        calls(load_config("llama-3-8b"), 3)
    with pytest.raises(ShapeError, match="one of deepseek-v3, gpt-oss-120b"):
        load_config("llama-4")
    with pytest.raises(ShapeError, match="expected SEQUENCESxTOKENS"):
        Step.decode("32,2048")
    with pytest.raises(ShapeError, match="the weight must be positive"):
        Step.decode("32x2048*0")
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(ShapeError, match="model_type 'rwkv'; known are llama"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**load_config("llama-3-8b"), "vocab_size": "many"}))
    with pytest.raises(ShapeError, match="vocab_size is 'many'"):
        calls(load_config(str(tmp_path)))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    },
}


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        (None, ""),
        (AWQ, ",w=int4_g128_zp"),
        (GPTQ, ",w=int4_g32"),
        (GPTQ | {"desc_act": True}, ",w=int4_g32,act_order=true"),
        (INT8, ",w=int8_ch"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ",w=nvfp4"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ",w=fp8_block"),
        ({"quant_method": "fp8"}, ",w=fp8"),
        ({"quant_method": "gristmill", "scheme": "int4_g64"}, ",w=int4_g64"),
    ],
)
def test_a_checkpoints_own_quantization_is_what_its_layers_are_called_with(
    quantization: dict | None, scheme: str
) -> None:
    config = load_config("llama-3-8b") | {"quantization_config": quantization}
    problems = {call.part: call.problem for call in calls(config, 1, DECODE)}
    assert problems["out"] == f"m=1,n=4096,k=4096{scheme}" and "w=" not in problems["lm_head"]
    assert {c.part: c.problem for c in calls(config, 1, DECODE, "mxfp8")}[
        "out"
    ] == "m=1,n=4096,k=4096,w=mxfp8"


def test_a_quantization_that_is_not_known_is_no_bf16() -> None:
    for quantization, complaint in (
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported"),
        ([1], "must be an object"),
        ({"quant_method": "gguf"}, "gguf"),
    ):
        with pytest.raises(ValueError, match=complaint):
            calls(load_config("llama-3-8b") | {"quantization_config": quantization}, 1, DECODE)
    with pytest.raises(ValueError, match="num_key_value_heads is 'eight'"):
        calls(load_config("llama-3-8b") | {"num_key_value_heads": "eight"}, 1, DECODE)


def test_biases_are_where_the_runtime_has_them() -> None:
    def biased(**more: object) -> set[str]:
        return {c.part for c in calls(load_config("llama-3-8b") | more, 1, DECODE) if "bias" in c.problem}

    assert biased() == set() and biased(model_type="qwen2") == {"qkv"}
    assert biased(attention_bias=True) == {"qkv", "out"} and biased(mlp_bias=True) == {
        "mlp gate_up",
        "mlp down",
    }


def test_coverage_knows_exact_near_and_default(policy_file) -> None:
    policy_file()
    here = place("cpu")
    # Down matches exactly; qkv (n=6144) is near the second.
    known = {
        "exact": "m=1,n=4096,k=14336",
        "near": "m=1,n=8192,k=4096",
    }
    store = Store()
    for problem in known.values():
        store.add(
            Timing("linear", "linear_cpu", "", {}, problem, target_key(here.target), here.build.key(), 5.0)
        )
    loaded = {
        c.call.part: c.level for c in coverage(calls(load_config("llama-3-8b"), 1, DECODE), here, store)
    }
    assert loaded["mlp down"] == "exact" and loaded["qkv"] == "near" and loaded["attention"] == "default"
    share = shares(coverage(calls(load_config("llama-3-8b"), 1, DECODE), here, store))
    assert math.isclose(sum(share.values()), 1) and share["exact"] > 0 and share["none"] == 0
    assert shares(coverage(calls(load_config("llama-3-8b"), 1, DECODE), here, Store()))["default"] == 1


def test_the_command_line(policy_file, tmp_path: Path) -> None:
    policy_file()
    result = CliRunner().invoke(cli, ["shapes", "--json"])
    assert [row["model"] for row in json.loads(result.stdout)] == model_names()
    result = CliRunner().invoke(
        cli,
        [
            "shapes",
            "--model",
            "llama-3-8b",
            "--tp",
            "2",
            "--weights",
            "int4_g128",
            "--decode",
            "4x100",
            "--json",
        ],
    )
    rows = {row["part"]: row for row in json.loads(result.stdout)}
    assert (
        rows["mlp gate_up"]["problem"] == "m=4,n=14336,k=4096,w=int4_g128,epilogue=silu_mul"
        and rows["qkv"]["count"] == 32
    )
    result = CliRunner().invoke(cli, ["coverage", "--model", "gpt-oss-20b", "--target", "h200", "--json"])
    output = json.loads(result.stdout)
    # A product with a bias takes the times of one without, where near ones were measured.
    assert {c["op"] for c in output["calls"] if c["level"] != "default"} == {"linear"}
    assert output["shares"]["near"] + output["shares"]["default"] == pytest.approx(1)
    assert output["shares"]["near"] < 0.1
    assert {c["step"] for c in output["calls"]} == {str(step) for step in MIX}
    arguments = [
        "coverage",
        "--model",
        "llama-3-8b",
        "--weights",
        "int4_g128",
        "--mix",
        "decode",
        "--target",
        "h200",
        "--json",
    ]
    shipped = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert {c["level"] for c in shipped["calls"] if c["problem"] == "m=1,n=4096,k=4096,w=int4_g128"} <= {
        "near",
        "exact",
    }
    (tmp_path / "empty.json").write_text('{"schema": 1, "verified": [], "timed": []}')
    without_times = json.loads(
        CliRunner().invoke(cli, [*arguments, "--store", str(tmp_path / "empty.json")]).stdout
    )
    assert shipped["shares"]["default"] < 1 and without_times["shares"]["default"] == 1
