"""Kernels in CuTe DSL where it is not installed: specs, configurations that fit shared memory, and what is counted and kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gristmill.autotune import compilations
from gristmill.kernel_registry import Target, default_registry
from gristmill.kernel_registry.build import Build
from gristmill.kernels import cutedsl
from gristmill.kernels.cutedsl import devices
from gristmill.kernels.linear.cutedsl_sm100 import shapes as sm100_shapes
from gristmill.kernels.moe.grouped_linear import cutedsl as grouped_cutedsl
from gristmill.kernels.moe.moe import cutedsl as moe_cutedsl

HOPPER, BLACKWELL = Target.parse("sm_90"), Target.parse("sm_100")
OP, LINEAR = (default_registry().op(name) for name in ("grouped_linear", "linear"))
KERNEL = default_registry().kernel("grouped_linear", "grouped_linear_cutedsl_sm90")
SHARED = 227 << 10
"""Bytes of shared memory that a CTA may have."""


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=16,e=4,n=64,k=128", None),
        ("m=16,e=4,n=64,k=136,epilogue=bias", None),
        ("m=16,e=4,n=64,k=136,gather=2", None),
        ("m=16,e=4,n=64,k=132,gather=2", "multiples of 8, got 132"),
        ("m=16,e=4,n=60,k=128", "multiples of 8"),
        ("m=16,e=4,n=24,k=128,epilogue=silu_mul", "multiples of 8, got 128 and 12"),
        ("m=16,e=4,n=64,k=128,x=fp16", "not bf16 by fp16"),
        ("m=16,e=4,n=64,k=128,x=fp32,w=fp32", "not fp32 by fp32"),
        ("m=16,e=4,n=64,k=128,w=int4_g128", "not int4_g128"),
    ],
)
def test_accepts(problem: str, reason: str | None) -> None:
    refusal = KERNEL.accepts(OP.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("problem", KERNEL.examples)
@pytest.mark.parametrize(
    ("machine", "target"), [*zip(grouped_cutedsl.MACHINES, (HOPPER, BLACKWELL), strict=True)]
)
def test_every_configuration_fits(machine: grouped_cutedsl.Machine, target: Target, problem: str) -> None:
    parsed, kernel = OP.problem(problem), grouped_cutedsl.kernel(machine)
    assert kernel.space is not None
    found = list(kernel.space(parsed, target))
    assert len(found) == len(machine.tiles) and found[0] == kernel.config(parsed, target)
    for config in found:
        bm, bn = int(config["bm"]), int(config["bn"])
        columns = bn // 2 if "silu_mul" in str(config["epilogue"]) else bn
        ring = int(config["slots"]) * (bm + bn) * grouped_cutedsl.STEP * 2
        tile = bm * columns * 2 if machine.name == "sm90" else 0  # Blackwell's are in tensor memory
        assert ring + tile + 16 * int(config["slots"]) + 64 + 1024 <= SHARED
        assert machine.name == "sm90" or (bm == 128 and 2 * bn <= 512)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("grouped_linear", "grouped_linear_cutedsl_sm100"),
        ("linear", "linear_cutedsl_sm100"),
        ("linear", "linear_fp8_cutedsl_sm100"),
    ],
)
def test_the_architecture_is_that_of_the_target(op: str, name: str) -> None:
    kernel = default_registry().kernel(op, name)
    problem = default_registry().op(op).problem(kernel.examples[0])
    for target in ("sm_100", "sm_103"):
        assert kernel.config(problem, Target.parse(target))["arch"] == f"{target}a"
        assert not kernel.requires.check_hardware(Target.parse(target))
    for target in ("sm_90", "sm_110", "sm_120", "sm_121", "gfx950"):
        assert kernel.requires.check_hardware(Target.parse(target))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=16,n=64,k=128,w=fp8_block.fp8_g128", None),
        ("m=16,n=64,k=144,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+silu_mul", None),
        ("m=16,n=64,k=136,w=fp8_ch.fp8_token", "K a multiple of 16"),
        ("m=16,n=60,k=128,w=fp8.fp8_token", "N of 8"),
        ("m=16,n=24,k=128,w=fp8.fp8_token,epilogue=silu_mul", "multiples of 8, got 12"),
        ("m=16,n=64,k=128,x=fp32,w=fp8_ch.fp8_token", "not fp32"),
        ("m=16,n=64,k=128,w=fp8_ch", "not fp8_ch"),
        ("m=16,n=64,k=128,w=int8_ch.int8_token", "not int8_ch.int8_token"),
    ],
)
def test_accepts_fp8(problem: str, reason: str | None) -> None:
    kernel = default_registry().kernel("linear", "linear_fp8_cutedsl_sm100")
    refusal = kernel.accepts(LINEAR.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=16,n=64,k=128", None),
        ("m=16,n=48,k=72,x=fp16,w=fp16,epilogue=bias+silu_mul+residual", None),
        ("m=16,n=64,k=132", "multiples of 8, got 132 and 64"),
        ("m=16,n=24,k=128,epilogue=silu_mul", "multiples of 8, got 128 and 12"),
        ("m=16,n=64,k=128,x=fp16", "not fp16 by bf16"),
        ("m=16,n=64,k=128,x=fp32,w=fp32", "not fp32 by fp32"),
        ("m=16,n=64,k=128,w=fp8_ch.fp8_token", "not bf16 by fp8_ch.fp8_token"),
        ("m=16,n=64,k=128,w=int4_g128", "not bf16 by int4_g128"),
    ],
)
def test_accepts_dense_on_blackwell(problem: str, reason: str | None) -> None:
    refusal = default_registry().kernel("linear", "linear_cutedsl_sm100").accepts(LINEAR.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("m=16,n=64,k=128,w=fp8_block.fp8_g128,codes=true", None),
        ("m=16,n=48,k=144,x=fp16,w=fp8_ch.fp8_token,epilogue=bias+silu_mul", None),
        ("m=16,n=64,k=136,w=fp8_ch.fp8_token", "K a multiple of 16"),
        ("m=16,n=60,k=128,w=fp8.fp8_token", "N of 8, got N=60"),
        ("m=16,n=40,k=128,w=fp8.fp8_token,epilogue=silu_mul", "multiples of 8, got 20"),
        ("m=16,n=64,k=128,x=fp32,w=fp8_ch.fp8_token", "not fp32"),
        ("m=16,n=64,k=128,w=fp8_ch", "not fp8_ch"),
        ("m=16,n=64,k=128,w=fp8.fp8", "not fp8.fp8"),
        ("m=16,n=64,k=128,w=int8_ch.int8_token", "not int8_ch.int8_token"),
    ],
)
def test_accepts_fp8_on_blackwell(problem: str, reason: str | None) -> None:
    refusal = default_registry().kernel("linear", "linear_fp8_cutedsl_sm100").accepts(LINEAR.problem(problem))
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize("name", ["linear_cutedsl_sm100", "linear_fp8_cutedsl_sm100"])
def test_every_configuration_of_linear_on_blackwell_fits(name: str) -> None:
    kernel = default_registry().kernel("linear", name)
    assert kernel.space is not None
    for text in kernel.examples:
        problem = LINEAR.problem(text)
        found = list(kernel.space(problem, BLACKWELL))
        assert len(found) == 3 and found[0] == kernel.config(problem, BLACKWELL)
        for config in found:
            tile = sm100_shapes.Tile(*(int(config[field]) for field in sm100_shapes.Tile._fields))
            assert tile.shared_bytes(bool(config.get("blocks"))) <= devices.SHARED_BYTES
            columns = tile.stages * tile.bn
            assert columns <= devices.TENSOR_COLUMNS and columns & (columns - 1) == 0
            # Each quad finishes whole parts of 32 columns, also of half a tile; two products at least, for tensor cores not to wait.
            assert tile.bn // 2 % (32 * tile.quads) == 0 and tile.stages >= 2
            assert config["epilogue"] == ("+".join(sorted(problem.flags("epilogue"))) or "none")


def test_the_size_of_a_problem_chooses_the_tile_on_blackwell() -> None:
    kernel = default_registry().kernel("linear", "linear_cutedsl_sm100")
    few, many = (kernel.config(LINEAR.problem(f"m={m},n=4096,k=128"), BLACKWELL) for m in (16, 8192))
    assert (few["bn"], many["bn"]) == (64, 256) and few["ctas"] == 148


def test_rows_per_expert_choose_the_tile() -> None:
    few, many = (KERNEL.config(OP.problem(f"m={m},e=8,n=512,k=128"), HOPPER)["bm"] for m in (64, 4096))
    assert (few, many) == (64, 128)


def test_both_products_of_moe_are_accepted_as_products() -> None:
    op = default_registry().op("moe")
    kernel = default_registry().kernel("moe", "moe_cutedsl_sm90")
    config = kernel.config(op.problem(kernel.examples[2]), HOPPER)
    first, second = (moe_cutedsl.config_of(config, product) for product in (1, 2))
    assert first["epilogue"] == "bias+clamp+silu_mul" and first["gather"] is True
    assert second["epilogue"] == "bias" and second["gather"] is False
    assert first.keys() == second.keys() == KERNEL.config(OP.problem(KERNEL.examples[0]), HOPPER).keys()
    assert "multiples of 8" in (kernel.accepts(op.problem("m=9,top_k=3,e=5,h=128,i=36")) or "")
    assert "multiples of 8" in (kernel.accepts(op.problem("m=9,top_k=3,e=5,h=60,i=64")) or "")


@pytest.mark.parametrize("name", ["moe_cutedsl_sm90", "moe_cutedsl_sm100"])
@pytest.mark.parametrize("sizes", ["h=2048,i=96", "h=2048,i=192", "h=2880,i=2880", "h=2048,i=1408"])
def test_ranks_of_models_are_accepted(name: str, sizes: str) -> None:
    """Qwen3-30B-A3B on eight and four ranks, gpt-oss, DeepSeek-V2-Lite."""
    op = default_registry().op("moe")
    kernel = default_registry().kernel("moe", name)
    assert kernel.accepts(op.problem(f"m=64,top_k=4,e=32,{sizes}")) is None


def test_the_hash_of_a_verification_has_the_compilers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_with(version: str) -> str:
        build = Build.of({"nvidia-cutlass-dsl": version})
        monkeypatch.setattr(Build, "probe", classmethod(lambda cls: build))
        return KERNEL.verification_hash()

    assert hash_with("4.8.1") == hash_with("4.8.1") != hash_with("4.9.0")
    triton = default_registry().kernel("grouped_linear", "grouped_linear_triton")
    assert triton.verification_hash() == triton.verification_hash()


class FakeCompiled:
    """A program that remembers its calls, and writes a file as CuTe DSL's does."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *arguments: object) -> None:
        self.calls.append(arguments)

    def export_to_c(self, path: str, name: str) -> None:
        assert name == cutedsl.ENTRY
        Path(path).write_bytes(b"machine code")


def test_programs_are_compiled_once_per_configuration_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FakeCompiled] = []

    def compile_program(source: cutedsl.Source, arch: str) -> FakeCompiled:
        made.append(FakeCompiled())
        return made[-1]

    def build(config: object) -> cutedsl.Source:
        return cutedsl.Source(None, ())

    monkeypatch.setenv(cutedsl.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(cutedsl, "_programs", {})
    monkeypatch.setattr(cutedsl, "listeners", [])
    monkeypatch.setattr(cutedsl, "_toolchain", lambda: "x86_64, nvidia-cutlass-dsl 4.8.1")
    monkeypatch.setattr(cutedsl, "compile_program", compile_program)
    monkeypatch.setattr(cutedsl, "_load", lambda path: None)
    compilations.watch("cutedsl")
    compilations.watch("cutedsl")
    before, late = compilations.total(), compilations.of_this_thread()
    one = cutedsl.program(build, {"arch": "sm_90a", "bm": 64})
    assert cutedsl.program(build, {"arch": "sm_90a", "bm": 64}) is one and len(made) == 1
    assert cutedsl.program(build, {"arch": "sm_90a", "bm": 128}) is not one
    assert len({file.name for file in tmp_path.iterdir()}) == 2
    after = compilations.total()
    assert (after.compiled - before.compiled, after.reused - before.reused) == (2, 0)
    assert len(compilations.names_since(late)) == 2


def test_a_launch_names_rows_that_are_not_aligned() -> None:
    x = torch.zeros(4, 68, dtype=torch.bfloat16)[:, :64]
    call = SimpleNamespace(x=x, weight=(torch.zeros(2, 8, 64, dtype=torch.bfloat16),), out=torch.zeros(4, 8))
    with pytest.raises(ValueError, match=r"multiples of 16 bytes, got strides \(68, 1\)"):
        grouped_cutedsl.launch(KERNEL.config(OP.problem(KERNEL.examples[0]), HOPPER), call)


def test_tiles_give_every_multiprocessor_work() -> None:
    """Few experts with few rows take narrow tiles, where wide ones would leave multiprocessors idle; many take wide ones."""
    hopper = grouped_cutedsl.MACHINES[0]

    def first(rows: int, experts: int, n: int) -> tuple[int, int]:
        tile = hopper.ranked(rows, experts, n, 132)[0]
        return int(tile["bm"]), int(tile["bn"])

    assert first(8, 128, 1536) == first(8, 128, 2048) == (64, 128)  # 96 and 128 tiles
    assert first(2, 8, 14336) == (64, 256) and first(2, 8, 4096) == (64, 64)
    # Seven turns of 896 tiles, not four of 448 that are twice as wide.
    assert first(128, 8, 14336) == (64, 128)
    assert first(512, 128, 1536) == (64, 256) and first(8192, 8, 14336) == (128, 256)
    assert len(hopper.ranked(0, 8, 64, 132)) == len(hopper.tiles)
